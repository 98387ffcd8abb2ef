"""History of servers on a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.core.domain import Answer, Inventory, Node

INVENTORY = Inventory(
    path=Path("inventory.yaml"),
    cluster="c",
    image="base:1",
    nodes=(Node(name="n1", host="n1", ip="10.0.0.1", gpus=8, head=True),),
)


def history_entry(id: str, **changes: Any) -> dict[str, Any]:
    spec = {
        "model": f"org/{id}",
        "backend": "ray",
        "host": "0.0.0.0",
        "port": 8000,
        "tp": 8,
        "pp": 2,
        "dp": 1,
        "args": ["--x", "1"],
    }
    return {
        "at": 1.5,
        "desired": {"id": id, "image": "sha256:1", "asked_for": {**spec, **changes}},
    }


def answer(history: Any, spec: Any = None) -> Answer:
    texts = [
        content if isinstance(content, str) else json.dumps(content) if content is not None else ""
        for content in (history, spec)
    ]
    return Answer(
        node="n1", code=0, out="".join(f"{text}\n\x1e\n" for text in texts), err="", seconds=0.1
    )
