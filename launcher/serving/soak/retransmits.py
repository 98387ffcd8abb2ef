"""TCP segments that kernels of nodes had to send again: per node, and per pair of nodes.

A pair's count is of connections that were still open at the end: the kernel forgets the others.
What NCCL sends by RDMA is in none of these counts.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.core.domain import Answer
from launcher.core.transport import Command

_SCRIPT = "grep ^Tcp: /proc/net/snmp && { ss -tinH 2>/dev/null || true; }"
_ADDRESS = re.compile(r"\[?(?:::ffff:)?([0-9a-fA-F.:]+?)(?:%[\w.-]+)?\]?:\d+")
_AGAIN = re.compile(r"\sretrans:\d+/(\d+)")
Ends = tuple[str, str]
# Segments that were sent again: by node, with all that it sent, and from one node to another.
Retransmits = tuple[Mapping[str, tuple[int, int]], Mapping[Ends, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What one node's kernel has counted; its connections by local and remote address and port."""

    sent: int
    again: int
    connections: Mapping[Ends, int]


def ask(nodes: Sequence[str]) -> list[Command]:
    """Ask hosts; nothing is changed."""
    return [Command(node=node, argv=("sh", "-c", _SCRIPT), timeout=30) for node in nodes]


def read(answers: Iterable[Answer]) -> dict[str, Counters]:
    """Read the answers of nodes that have counters."""
    return {answer.node: counters for answer in answers if (counters := _read(answer)) is not None}


def _read(answer: Answer) -> Counters | None:
    lines = answer.out.splitlines()
    try:
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counted = dict(zip(names, values, strict=True))
        sent, again = int(counted["OutSegs"]), int(counted["RetransSegs"])
    except (KeyError, ValueError):
        return None
    connections = dict[Ends, int]()
    for line, below in itertools.pairwise(lines):
        ends = [word for word in line.split() if _ADDRESS.fullmatch(word)]
        if len(ends) == 2 and below[:1].isspace():
            match = _AGAIN.search(below)
            connections[ends[0], ends[1]] = int(match[1]) if match else 0
    return Counters(sent=sent, again=again, connections=connections)


def compare(before: Mapping[str, Counters], after: Mapping[str, Counters]) -> Retransmits:
    """Return what was sent again between two answers of nodes; pairs only where there was some.

    A node has the addresses of its connections; one of several nodes, such as loopback, counts for
    none.
    """
    owners = dict[str, set[str]]()
    for node, counters in after.items():
        for local, _ in counters.connections:
            owners.setdefault(_ADDRESS.sub(r"\1", local), set()).add(node)
    nodes, pairs = dict[str, tuple[int, int]](), Counter[Ends]()
    for node, was in before.items():
        now = after.get(node)
        if now is None or now.sent < was.sent:  # not reached, or rebooted
            continue
        nodes[node] = now.again - was.again, now.sent - was.sent
        for ends, again in now.connections.items():
            targets = owners.get(_ADDRESS.sub(r"\1", ends[1]), set())
            if len(targets) == 1 and targets != {node}:
                pairs[node, min(targets)] += max(0, again - was.connections.get(ends, 0))
    return nodes, +pairs
