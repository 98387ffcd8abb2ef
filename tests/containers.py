"""A container as a node reports it, for tests that care for some of what it says."""

from __future__ import annotations

from typing import Any

from launcher.tools.docker import Container


def container(name: str = "vlaunch-c-gpu01", **said: Any) -> Container:
    """Return a running container of the head's, but for what is `said`."""
    usual: dict[str, Any] = {
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
    return Container(name=name, **{**usual, **said})
