"""TCP retransmits in the nodes' kernels: per node, and per pair of nodes.

A pair counts the connections that are still open at the end: the kernel forgets the others. NCCL
traffic over RDMA is in none of these counts.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.core.domain import Answer
from launcher.core.transport import Command

_SCRIPT = "grep ^Tcp: /proc/net/snmp && { ss -tinH 2>/dev/null || true; }"
_ADDRESS = re.compile(r"\[?(?:::ffff:)?([0-9a-fA-F.:]+?)(?:%[\w.-]+)?\]?:\d+")
_RETRANSMITTED = re.compile(r"\sretrans:\d+/(\d+)")
AddressPair = tuple[str, str]
# (retransmitted, sent) segments by node, and retransmitted ones from node to node.
Retransmits = tuple[Mapping[str, tuple[int, int]], Mapping[AddressPair, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpCounters:
    """Counters of one node's kernel, and its connections by local and remote address and port."""

    sent: int
    retransmitted: int
    connections: Mapping[AddressPair, int]


def query_counters(nodes: Sequence[str]) -> list[Command]:
    """Return the query of each host; it changes nothing."""
    return [Command(node=node, argv=("sh", "-c", _SCRIPT), timeout=30) for node in nodes]


def parse_counters(answers: Iterable[Answer]) -> dict[str, TcpCounters]:
    """Parse the answers of nodes that have counters."""
    return {a.node: counters for a in answers if (counters := _parse_answer(a)) is not None}


def _parse_answer(answer: Answer) -> TcpCounters | None:
    lines = answer.out.splitlines()
    try:
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counters = dict(zip(names, values, strict=True))
        sent, retransmitted = int(counters["OutSegs"]), int(counters["RetransSegs"])
    except (KeyError, ValueError):
        return None
    connections = dict[AddressPair, int]()
    for line, details in itertools.pairwise(lines):
        ends = [field for field in line.split() if _ADDRESS.fullmatch(field)]
        if len(ends) == 2 and details[:1].isspace():
            match = _RETRANSMITTED.search(details)
            connections[ends[0], ends[1]] = int(match[1]) if match else 0
    return TcpCounters(sent=sent, retransmitted=retransmitted, connections=connections)


def compare_counters(
    before: Mapping[str, TcpCounters], after: Mapping[str, TcpCounters]
) -> Retransmits:
    """Return the retransmits between two answers of nodes; only pairs with some.

    An address belongs to the node whose connections use it; one used on several nodes, such as
    loopback, is ignored.
    """
    owners = dict[str, set[str]]()
    for node, counters in after.items():
        for local, _ in counters.connections:
            owners.setdefault(_ADDRESS.sub(r"\1", local), set()).add(node)
    nodes, pairs = dict[str, tuple[int, int]](), Counter[AddressPair]()
    for node, old in before.items():
        new = after.get(node)
        if new is None or new.sent < old.sent:  # not reached, or rebooted
            continue
        nodes[node] = new.retransmitted - old.retransmitted, new.sent - old.sent
        for ends, retransmitted in new.connections.items():
            targets = owners.get(_ADDRESS.sub(r"\1", ends[1]), set())
            if len(targets) == 1 and targets != {node}:
                pairs[node, min(targets)] += max(0, retransmitted - old.connections.get(ends, 0))
    return nodes, +pairs
