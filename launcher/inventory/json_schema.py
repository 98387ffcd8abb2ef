"""The inventory's JSON Schema, from the same model that validates, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from launcher.inventory.schema import InventoryFile


def json_schema() -> dict[str, Any]:
    """Return the schema as `schema.json` beside this module holds it; a test keeps the two in step."""
    schema = InventoryFile.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
