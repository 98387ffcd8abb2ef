"""A container, as reported by a node, for tests."""

from __future__ import annotations

from typing import Any

from launcher.tools.docker import Container


def container(name: str = "vlaunch-c-gpu01", **changes: Any) -> Container:
    """Return the head's running container, with changes."""
    defaults: dict[str, Any] = {
        "id": "1",
        "role": "head",
        "node": "gpu01",
        "image": "i",
        "status": "running",
        "spec": "",
        "exit_code": 0,
        "restarts": 0,
        "env": {},
        "labels": {},
    }
    return Container(name=name, **{**defaults, **changes})
