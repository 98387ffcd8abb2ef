"""The network and level of a path in NCCL's log (`via …`).

Pure; standard library only. The launcher reads logs with it, and the gate of an exported group the
log of its own probe (`network_gate.py`). NCCL 2.4 to 2.30, RCCL: src/transport/net.cc, p2p.cc.

TCP are NCCL's own `Socket`, Google's `FastSocket` (google/nccl-fastsocket, sockets too), and
libfabric (aws-ofi-nccl: `AWS Libfabric`, `OFI`) over a provider that is sockets: `tcp`, `sockets`,
`udp` (libfabric's fi_provider(7)). Every other network is a plugin over RDMA, with GPUDirect where
its line says `/GDRDMA`. `GPUDirectTCPX` and `FasTrak` (TCPXO) of Google Cloud's A3 are no verbs,
but their own transports from one GPU's memory to another's: they count like RDMA, by their suffix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from launcher import upstream

Kind = Literal["TCP", "RDMA", "GPUDirect", "MNNVL"]
KINDS: tuple[Kind, ...] = ("TCP", "RDMA", "GPUDirect", "MNNVL")  # worst first
KIND_LEVELS: dict[Kind, Literal["any", "rdma", "gdrdma"]] = {
    "TCP": "any",
    "RDMA": "rdma",
    "GPUDirect": "gdrdma",
    "MNNVL": "gdrdma",
}
# Device, `(rank of the proxy)`, `/GDRDMA`, `(PCI)`, `/Shared`. A plugin's name may hold spaces, a
# device is always a number.
_NET = re.compile(upstream.text("nccl.path-network"))
_NET_BARE = re.compile(upstream.text("nccl.path-network-bare"))
_LOCAL = re.compile(upstream.text("nccl.path-local"))
_SOCKET = re.compile(r"(?:fast)?socket", re.IGNORECASE)
_LIBFABRIC = re.compile(r"(?:aws[ _-]?)?(?:libfabric|ofi)\b.*", re.IGNORECASE)
_OVER_SOCKETS = ("tcp", "sockets", "udp", "net")


@lru_cache(maxsize=1024)
def parse_path(path: str) -> tuple[str, int | None, bool, str]:
    """Return the network, device, GPUDirect, and the kind of a link inside a node."""
    if (net := _NET.match(path)) is not None:
        return net[1].strip(), int(net[2]), net[3] is not None, ""
    if path.startswith(upstream.text("nccl.path-mnnvl")):
        return "MNNVL", None, False, ""
    if (near := _LOCAL.match(path)) is not None:
        return "", None, False, near[1] or "SHM"
    if (net := _NET_BARE.match(path)) is not None:
        return net[1], None, net[2] is not None, ""
    return "", None, False, ""


def is_tcp(network: str, providers: Iterable[str] = ()) -> bool:
    """True if a network of this name is TCP, or runs over sockets; `providers` are libfabric's."""
    if _SOCKET.fullmatch(network):
        return True
    return _LIBFABRIC.fullmatch(network) is not None and any(
        name.split(";")[0] in _OVER_SOCKETS for name in providers
    )


def link_kind(network: str, gpudirect: bool, providers: Iterable[str] = ()) -> Kind:
    """Return the kind of a network, one of `KINDS`."""
    if network == "MNNVL":
        return "MNNVL"
    if is_tcp(network, providers):
        return "TCP"
    return "GPUDirect" if gpudirect else "RDMA"
