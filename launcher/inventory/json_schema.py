"""The inventory's JSON Schema, from the same model that validates, for completion and checks in
editors.

`python -m launcher.inventory.json_schema` writes it to `schema.json` beside this module, where
editors find it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.inventory.schema import InventoryFile, Section


def json_schema(root: type[Section] = InventoryFile) -> dict[str, Any]:
    """Return the schema of files that are a `root`; a test keeps `schema.json` in step with it."""
    schema = root.model_json_schema(mode="validation")
    for each in (schema, *schema.get("$defs", {}).values()):
        for described in (each, *each.get("properties", {}).values()):
            # a docstring, which ends its lines where the source does
            if "description" in described:
                described["description"] = " ".join(described["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write(root: type[Section], path: Path) -> None:
    """Write the schema where editors find it."""
    text = json.dumps(json_schema(root), indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(InventoryFile, Path(__file__).with_name("schema.json"))
