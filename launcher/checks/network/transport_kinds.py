"""What a link of NCCL is worth by the name of its network: TCP, RDMA, RDMA with GPUDirect, or
NVLink between nodes.

TCP are NCCL's own `Socket`, Google's `FastSocket` (google/nccl-fastsocket, sockets too), and
libfabric (aws-ofi-nccl: `AWS Libfabric`, `OFI`) over a provider that is sockets: `tcp`, `sockets`,
`udp` (libfabric's fi_provider(7)). Every other network is a plugin over RDMA, with GPUDirect where
its line says `/GDRDMA`. `GPUDirectTCPX` and `FasTrak` (TCPXO) of Google Cloud's A3 are no verbs,
but their own transports from one GPU's memory to another's: they count like RDMA, by their suffix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.model import Level
from launcher.tools import nccl
from launcher.tools.nccl import Link, Reading

Kind = Literal["TCP", "RDMA", "GPUDirect", "MNNVL"]
ORDER: tuple[Kind, ...] = ("TCP", "RDMA", "GPUDirect", "MNNVL")  # worst first
WORTH: dict[Kind, Level] = {"TCP": "any", "RDMA": "rdma", "GPUDirect": "gdrdma", "MNNVL": "gdrdma"}
_SOCKET = re.compile(r"(?:fast)?socket", re.IGNORECASE)
_LIBFABRIC = re.compile(r"(?:aws[ _-]?)?(?:libfabric|ofi)\b.*", re.IGNORECASE)
_OVER_SOCKETS = ("tcp", "sockets", "udp", "net")
# rdma_rxe and siw emulate RDMA in the kernel; `rdma link add` leaves the name to the user, and
# these are the usual ones.
_EMULATED = re.compile(r"(?:rxe|siw)[\w-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The worst inter-node network of a log: its name, whether it is GPUDirect, the level it is
    worth, and its links.
    """

    network: str
    gpudirect: bool
    level: Level
    links: tuple[Link, ...]

    @property
    def title(self) -> str:
        """Its name as in NCCL's own lines: `NET/IB/GDRDMA`, `P2P/MNNVL`."""
        return (
            "P2P/MNNVL"
            if self.network == "MNNVL"
            else f"NET/{self.network}" + "/GDRDMA" * self.gpudirect
        )


def is_tcp(network: str, providers: Iterable[str] = ()) -> bool:
    """Return whether a network of that name is TCP, or over sockets anyway; `providers` are
    libfabric's.
    """
    if _SOCKET.fullmatch(network):
        return True
    return _LIBFABRIC.fullmatch(network) is not None and any(
        name.split(";")[0] in _OVER_SOCKETS for name in providers
    )


def over_tcp(transport: str) -> bool:
    """Return whether a transport is TCP by its name, such as `NET/Socket`, `NET/FastSocket` or
    `Gloo/TCP`.
    """
    return transport.endswith("/TCP") or is_tcp(
        transport.removeprefix("NET/").removesuffix("/GDRDMA")
    )


def between_nodes(reading: Reading) -> tuple[Link, ...]:
    """Return the links between nodes: all but those of which both ends are in one host."""
    near = nccl.inside(reading)
    return tuple(link for link in reading.links if link not in near)


def worst(reading: Reading) -> Worst | None:
    """Return the worst network: TCP before RDMA, RDMA before GPUDirect, that before MNNVL; `None`
    without inter-node links.
    """
    everywhere = [name for names in reading.providers.values() for name in names]
    sorts: dict[Kind, list[Link]] = {}
    for link in between_nodes(reading):
        sorts.setdefault(_kind(link, reading.providers.get(link.host, everywhere)), []).append(link)
    kind = min(sorts, key=ORDER.index, default=None)
    if kind is None:
        return None
    links = tuple(sorts[kind])
    return Worst(
        network=links[0].network, gpudirect=kind == "GPUDirect", level=WORTH[kind], links=links
    )


def emulated(reading: Reading) -> dict[str, list[str]]:
    """Return the hosts whose links between nodes use RDMA that is made in software, with the names
    of those devices.
    """
    found: dict[str, list[str]] = {}
    for link in between_nodes(reading):
        name = (
            reading.devices.get(link.host, {}).get(link.device, "")
            if link.device is not None
            else ""
        )
        name = name.partition(":")[0]
        if (
            _EMULATED.fullmatch(name)
            and not is_tcp(link.network)
            and name not in found.setdefault(link.host, [])
        ):
            found[link.host].append(name)
    return {host: names for host, names in found.items() if names}


def _kind(link: Link, providers: Iterable[str]) -> Kind:
    if link.network == "MNNVL":
        return "MNNVL"
    if is_tcp(link.network, providers):
        return "TCP"
    return "GPUDirect" if link.gpudirect else "RDMA"
