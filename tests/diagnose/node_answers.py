"""Simulated answers of nodes to the queries of `vlaunch doctor` and `vlaunch collect`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from launcher.core.domain import Answer
from launcher.core.transport import Command
from tests.command_line import Cluster


@dataclass
class NodeAnswers:
    """Answers of one node: the report's parts by name, the audit trail, and `instead`, an answer in
    place of the report.
    """

    parts: dict[str, str] = field(default_factory=dict)
    audit: str = ""
    instead: Answer | None = None


def state(name: str, role: str = "head", status: str = "running", **fields: Any) -> str:
    """Return a container's state as in the report."""
    restarts = fields.pop("restarts", 0)
    values = {"Status": status, "ExitCode": 0, "OOMKilled": False, "Error": "", **fields}
    return json.dumps({"name": f"/{name}", "role": role, "state": values, "restarts": restarts})


def set_answers(cluster: Cluster, **nodes: NodeAnswers) -> None:
    """Set the answers of nodes; other nodes have empty reports."""
    answer = cluster.world.answer

    def simulated(command: Command) -> Answer | None:
        program = command.argv[3] if command.argv[:2] == ("sh", "-c") else ""
        node = nodes.get(command.node, NodeAnswers())
        if program == "audit":
            return Answer(node=command.node, code=0, out=node.audit)
        if program != "doctor":
            return answer(command)
        if node.instead is not None:
            return node.instead
        mark, requested = command.argv[4], command.argv[11].split()
        parts = {"clock": "1795300000", "ids": "aaa", **node.parts}
        sections = {name: text for name, text in parts.items() if _part(name) in ("", *requested)}
        out = "".join(f"\n{mark} {name}\n{text}\n{mark} rc 0\n" for name, text in sections.items())
        return Answer(node=command.node, code=0, out=out)

    cluster.world.answer = simulated  # type: ignore[method-assign]


def _part(name: str) -> str:
    kind = name.partition("-")[0]
    parts = {
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
    return parts.get(kind, "")
