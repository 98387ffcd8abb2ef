"""Connection probe between nodes: TCP on fixed ports and a high one, bulk transfers, unfragmented
packets.

All nodes listen and connect simultaneously (`hosts/node/pairs.py`, standard library only).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.core import decode, untrusted
from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer
from launcher.hosts.node import program_source

PortState = Literal["open", "timed out", "refused", "no route", "error"]

# Standard input to send and keep open: its end stops the program.
HOLD = b"hold\n"

# seconds without an answer: TCP retransmits after 1 and 3 (RFC 6298, Linux's initial second)
PATIENCE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node to probe, with its TCP ports that must be open."""

    name: str
    ip: str
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProbe:
    """Connections from `source` to `target`.

    `ports` has the state of each TCP port, `bulk` whether a megabyte arrived (None: no connection),
    `largest` the size in bytes of the largest unfragmented IP packet (None: no datagram arrived),
    to compare with `mtu`; `errors` are system messages. `heard` tells whether anything from the
    target arrived, and so which direction is blocked.
    """

    source: str = ""
    target: str = ""
    ports: Mapping[int, PortState] = field(default_factory=dict)
    bulk: bool | None = None
    largest: int | None = None
    mtu: int | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    heard: bool = False


@dataclass(frozen=True, kw_only=True)
class _Report:
    mtu: int | None
    peers: Mapping[str, PortProbe]


def probe_argv(
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
    """Return the argv that listens at `ip` and connects to all peers; all nodes run it at the same
    time, with equal `high` and `nonce`.

    The program travels as an argument. Send `HOLD` on standard input and keep it open.

    Args:
        node: this node's name in the `peers` of other nodes.
        listen: TCP ports to listen on; ports in use are skipped.
        high: the TCP and UDP port of all other tests, above the ports in use.
        mtu: bytes of the IP packet that should pass unfragmented.
        nonce: an identifier of this run without spaces or `|`, to recognise foreign listeners.
        deadline: seconds until the program ends; the command needs a few more.
        patience: seconds without an answer until a port counts as `timed out`.
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
        program_source("pairs"),
        json.dumps(request, separators=(",", ":")),
    )


def parse_probes(answer: Answer) -> tuple[PortProbe, ...]:
    """Parse a node's results for each peer; raises UnreadableAnswer."""
    line = answer.out.strip().rpartition("\n")[2]
    try:
        raw = untrusted.loads(line)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise UnreadableAnswer("the connection probe did not answer", evidence=answer.tail)
    if isinstance(error := raw.get("error"), str):
        raise UnreadableAnswer(
            f"the connection probe could not start: {error}", evidence=answer.tail
        )
    report = decode.validate(_Report, raw, "the result of the connection probe")
    return tuple(
        replace(probe, source=answer.node, target=target, mtu=report.mtu)
        for target, probe in report.peers.items()
    )
