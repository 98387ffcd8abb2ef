"""The probe of connections between nodes: TCP on the cluster's ports and a high one, large
transfers, packets that must not be split.

All nodes listen and connect to each other at the same time (`hosts/node/pairs.py`, standard library
only).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.core import decode, untrusted
from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer
from launcher.tools import agent_queries

Reached = Literal["open", "timed out", "refused", "no route", "error"]

# What to send on standard input, which must then be held open: its end tells the program that
# nobody waits any more.
HOLD = b"hold\n"

# seconds of silence: TCP repeats its first packet after 1 and 3 (RFC 6298 with Linux's initial
# second)
PATIENCE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Someone to probe, and the TCP ports that must be open there."""

    name: str
    ip: str
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProbe:
    """Connections from one node to another.

    `ports` says per TCP port what became of a connection; `bulk` whether a megabyte came through
    (`None`: no connection to try it on); `largest` is the largest IP packet in bytes that passed
    unsplit (`None`: no datagram passed at all), `wanted` the one that should have (the interface's
    MTU); `errors` are the system's words.

    `heard` is whether anything of the target's arrived at the source: where nothing is answered, it
    tells which way is blocked.
    """

    source: str = ""
    target: str = ""
    ports: Mapping[int, Reached] = field(default_factory=dict)
    bulk: bool | None = None
    largest: int | None = None
    wanted: int | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    heard: bool = False


@dataclass(frozen=True, kw_only=True)
class _Report:
    mtu: int | None
    peers: Mapping[str, PortProbe]


def probe(
    *,
    node: str,
    ip: str,
    peers: Sequence[Peer],
    listen: Sequence[int],
    high: int,
    mtu: int,
    nonce: str,
    deadline: float = 15.0,
    patience: float = PATIENCE,
) -> Argv:
    """Listen at `ip` and knock at all peers; every node must run this at about the same time, with
    one `high` and one `nonce`.

    The node needs no file for it: the program travels as an argument. Send `HOLD` on standard
    input, held open.

    Args:
        node: our own name, as it is in the other nodes' `peers`.
        listen: TCP ports to hold open here; those that are in use are left to whoever has them.
        high: the port for everything that is not a plain probe of a fixed port: TCP and UDP, above
            those in use.
        mtu: bytes of the IP packet that should pass unsplit.
        nonce: a word without spaces or `|` that only this run knows, so that a stranger's listener
            is recognised.
        deadline: seconds after which it ends, whatever is still open; give the command a few more.
        patience: seconds without any answer after which a port is `timed out`.
    """
    request = {
        "node": node,
        "ip": ip,
        "port": high,
        "listen": sorted(set(listen) - {high}),
        "mtu": mtu,
        "nonce": nonce,
        "deadline": deadline,
        "patience": patience,
        "peers": [{"name": peer.name, "ip": peer.ip, "ports": list(peer.ports)} for peer in peers],
    }
    return (
        "python3",
        "-c",
        agent_queries.source("pairs"),
        json.dumps(request, separators=(",", ":")),
    )


def parse(answer: Answer) -> tuple[PortProbe, ...]:
    """Read what a node saw of each peer; raises UnreadableAnswer, with the node's own words where
    it could not begin.
    """
    line = answer.out.strip().rpartition("\n")[2]
    try:
        raw = untrusted.loads(line)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise UnreadableAnswer("the pair probe gave no answer", evidence=answer.tail)
    if isinstance(error := raw.get("error"), str):
        raise UnreadableAnswer(f"the pair probe could not begin: {error}", evidence=answer.tail)
    report = decode.fit(_Report, raw, "what the pair probe saw")
    return tuple(
        replace(probe, source=answer.node, target=target, wanted=report.mtu)
        for target, probe in report.peers.items()
    )
