"""The inventory's JSON Schema, from the same model that validates, for completion and checks in editors.

`python -m launcher.inventory.json_schema` writes it to `schema.json` beside this module, where editors find it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.inventory.schema import InventoryFile


def json_schema() -> dict[str, Any]:
    """Return the schema; a test keeps `schema.json` in step with it."""
    schema = InventoryFile.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False)
    Path(__file__).with_name("schema.json").write_text(f"{text}\n", encoding="utf-8")
