"""The audit trails of all nodes as one: asked for, and merged by time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.model import Node, natural
from launcher.tools import audit
from launcher.tools.audit import Entry
from launcher.transport import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What one command did on some nodes: `entry` with the nodes that it says the same of."""

    entry: Entry
    nodes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        said = asdict(self.entry)
        del said["node"]
        return {**said, "nodes": list(self.nodes), "changes": list(self.entry.changes)}


def ask(cluster: str, nodes: Sequence[Node], last: int = 0) -> list[Command]:
    """Ask each node for its last lines."""
    return [
        Command(
            node=node.name,
            argv=audit.read(node.state_dir or "", cluster, last),
            timeout=30,
        )
        for node in nodes
    ]


def merge(entries: Iterable[Entry]) -> list[Happened]:
    """Put the entries of all nodes in the order of time; what is the same on several nodes, or was
    read twice, is said once.

    Nodes that share a home share a file, and each of them tells all of it.
    """
    same: dict[Entry, list[str]] = {}
    for entry in dict.fromkeys(entries):
        same.setdefault(replace(entry, node=""), []).append(entry.node)
    found = [
        Happened(entry=entry, nodes=tuple(sorted(nodes, key=natural)))
        for entry, nodes in same.items()
    ]
    return sorted(found, key=lambda each: each.entry.at)
