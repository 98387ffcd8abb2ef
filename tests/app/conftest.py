"""An entry of an audit trail."""

from __future__ import annotations

from typing import Any

ENTRY: dict[str, Any] = {
    "at": "2026-11-21T21:00:05Z",
    "who": "anna",
    "host": "laptop",
    "verb": "up",
    "command": "vlaunch up",
    "node": "gpu01",
    "changes": ["pulling x:1", "starting the Ray head"],
    "id": "1a2b3c4d",
    "inventory": "0123456789ab",
    "vlaunch": "0.1.0",
}
