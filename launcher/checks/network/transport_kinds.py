"""What a link of NCCL is worth by the name of its network: TCP, RDMA, RDMA with GPUDirect, or
NVLink between nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.model import Level
from launcher.payload.network_links import KINDS, WORTH, Kind, is_tcp, kind
from launcher.tools import nccl
from launcher.tools.nccl import Link, Reading

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
        providers = reading.providers.get(link.host, everywhere)
        sorts.setdefault(kind(link.network, link.gpudirect, providers), []).append(link)
    found = min(sorts, key=KINDS.index, default=None)
    if found is None:
        return None
    links = tuple(sorts[found])
    return Worst(
        network=links[0].network, gpudirect=found == "GPUDirect", level=WORTH[found], links=links
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
