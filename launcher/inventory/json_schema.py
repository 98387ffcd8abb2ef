"""The inventory's JSON Schema, from the same model that validates, for completion and checks in
editors.

`vlaunch schema` prints it; `schema.json` beside this module is its output, for editors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.inventory.schema import InventoryFile, known, reader, sections


def json_schema(root: type[Any] = InventoryFile) -> dict[str, Any]:
    """Return the schema of files that are a `root`; a test keeps `schema.json` in step with it."""
    schema = reader(root).json_schema(mode="validation")
    shapes = {root.__name__: schema, **schema.get("$defs", {})}
    for section in {root, *_inside(root)}:
        shape = shapes[section.__name__]
        shape["description"] = " ".join(shape["description"].split())
        for key, field in known(section).items():
            if field.description:
                # Pydantic's own keeps the line ends of the source.
                key_shape = {**shape["properties"][key], "description": field.description}
                shape["properties"][key] = dict(sorted(key_shape.items()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _inside(section: type[Any]) -> Iterator[type[Any]]:
    """Find the sections below one, at every depth."""
    for field in known(section).values():
        for inner in sections(field.annotation):
            yield inner
            yield from _inside(inner)
