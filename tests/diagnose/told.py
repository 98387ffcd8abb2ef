"""What nodes answer to `vlaunch doctor` and `vlaunch collect`: as `tools/diagnosis.py` asks it,
from values of the test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from launcher.core.domain import Answer
from launcher.core.transport import Command
from tests.command_line import Cluster


@dataclass
class Telling:
    """One node: its parts by name, the lines of its audit trail, and how the answer as a whole is
    spoiled.
    """

    parts: dict[str, str] = field(default_factory=dict)
    audit: str = ""
    instead: Answer | None = None


def state(name: str, role: str = "head", status: str = "running", **more: Any) -> str:
    """Return Docker's word on one container."""
    restarts = more.pop("restarts", 0)
    said = {"Status": status, "ExitCode": 0, "OOMKilled": False, "Error": "", **more}
    return json.dumps({"name": f"/{name}", "role": role, "state": said, "restarts": restarts})


def tell(cluster: Cluster, **nodes: Telling) -> None:
    """Let nodes answer; those that are not named have nothing to tell."""
    answer = cluster.world.answer

    def told(command: Command) -> Answer | None:
        word = command.argv[3] if command.argv[:2] == ("sh", "-c") else ""
        node = nodes.get(command.node, Telling())
        if word == "audit":
            return Answer(node=command.node, code=0, out=node.audit)
        if word != "doctor":
            return answer(command)
        if node.instead is not None:
            return node.instead
        mark, wanted = command.argv[4], command.argv[11].split()
        parts = {"clock": "1795300000", "ids": "aaa", **node.parts}
        kept = {name: text for name, text in parts.items() if _part(name) in ("", *wanted)}
        out = "".join(f"\n{mark} {name}\n{text}\n{mark} rc 0\n" for name, text in kept.items())
        return Answer(node=command.node, code=0, out=out)

    cluster.world.answer = told  # type: ignore[method-assign]


def _part(name: str) -> str:
    kind = name.partition("-")[0]
    known = {
        "desired": "record",
        "observed": "record",
        "history": "record",
        "kernel": "kernel",
        "inspect": "inspect",
        "log": "logs",
        "engine": "engines",
        "driver": "inside",
        "worker": "inside",
        "ray": "inside",
        "nccl": "inside",
        "zone": "inside",
    }
    return known.get(kind, "")
