"""What is known of a log of NCCL: its links, and what it said besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One `Channel … via …` line of a network, or of NVLink between nodes.

    `source` and `target` are ranks; `network` is what follows `NET/` (`IB`, `Socket`, `AWS
    Libfabric`, …) or `MNNVL`; `device` is NCCL's index of the network device; `host` is the host
    that wrote the line (empty where no prefix says it).
    """

    source: int
    target: int
    channel: str
    direction: str
    network: str
    device: int | None = None
    gpudirect: bool = False
    host: str = ""

    @property
    def writer(self) -> int:
        """The rank that wrote the line."""
        return self.target if self.direction == "receive" else self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a log says.

    `local` counts the links inside nodes by kind (`P2P`, `SHM`); `using` are the networks it
    announced.

    `links` has each link once, `network_links` counts the lines. `devices` has the network devices
    by NCCL's index where a `NET/IB : Using` line names them (`mlx5_0:1/RoCE`), per host;
    `gdr_disabled` are the HCAs for which GPUDirect RDMA was said to be off; `warnings` are WARN and
    telling INFO lines, each once, `alarms` those that NCCL itself calls WARN, and `told_by` the
    hosts that wrote each; `ranks` is the host of each rank that announced itself in a communicator
    (`commId`), and `sizes` how many ranks it has. `providers` are libfabric's, per host; `collnet`
    counts CollNet's lines, which are of no link; `nodes` is the most nodes that a communicator was
    said to have. `truncated`: the log ends within a line; `overflow`: it has more links than are
    kept.
    """

    links: tuple[Link, ...] = ()
    network_links: int = 0
    local: Mapping[str, int] = field(default_factory=dict)
    using: tuple[str, ...] = ()
    devices: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    gdr_disabled: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    lines: int = 0
    truncated: bool = False
    told_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overflow: bool = False
    alarms: tuple[str, ...] = ()
    providers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    collnet: int = 0
    nodes: int = 0
    ranks: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def mnnvl(self) -> bool:
        """True when a link is multi-node NVLink."""
        return any(link.network == "MNNVL" for link in self.links)
