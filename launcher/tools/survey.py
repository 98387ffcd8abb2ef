"""What a node is made of: network cards, RDMA devices, GPUs, Docker and the kernel, asked in the
same round trip as the probe.

The script only reads, and prints parts as the probe does (`launcher.tools.host`). Where a value
cannot be had, its field is `None` (or empty) and the words of the tool are in `HostFacts.said`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface.

    `speed` is in Mbit/s; `physical`: a device stands behind it; `addresses` are `ip/prefix`.
    """

    name: str
    up: bool
    mtu: int
    speed: int | None = None
    physical: bool = False
    driver: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of an RDMA port's GID table that is not zero; `kind` as the kernel says it, such as
    `RoCE v2`.
    """

    index: int
    value: str
    kind: str = ""
    netdev: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device.

    `state` such as `ACTIVE`, `link_layer` `InfiniBand` or `Ethernet`, `rate` in Gbit/s.
    """

    number: int
    state: str
    physical: str = ""
    rate: float = 0.0
    link_layer: str = ""
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """A device below /sys/class/infiniband; `model` is its `hca_type` (or board id), `netdevs` the
    interfaces it has.
    """

    name: str
    ports: tuple[RdmaPort, ...] = ()
    model: str = ""
    numa: int | None = None
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What a GPU says of itself besides `HostFacts.gpus`: whether it drives a display, and whether
    it is split into instances (MIG); `affinity` names for each RDMA device how near it is (PIX …
    SYS), `peers` for each GPU (`GPU1`) what leads there (NV18 for eighteen NVLinks).
    """

    index: int
    ecc_errors: int | None = None
    display: bool = False
    mig: bool = False
    affinity: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkFabric:
    """NVLink's fabric as far as it shows: the number of NVSwitches, what each GPU says of its
    registration (`Completed`; nothing where a GPU has no such state), and systemd's word for
    Fabric Manager.
    """

    switches: int = 0
    states: tuple[str, ...] = ()
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds GPU memory (MiB): whose it is, and the container it runs in (id, empty
    when in none).
    """

    gpu: str
    pid: int
    name: str
    memory: int
    user: str = ""
    container: str = ""

    def runs_in(self, containers: Collection[str]) -> bool:
        """True when it runs in one of these containers (ids)."""
        return bool(self.container) and any(
            each.startswith(self.container) for each in containers if each
        )


LOOKUP_DEADLINE = 5  # seconds, as `shell/survey_names.sh` has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A name that was looked up: that of an address (`reverse`), the address of a name (`forward`),
    or what the node's own name resolves to (`own`).

    `seconds` is how long it took; `answered` is false where the deadline ended it.
    """

    kind: Literal["reverse", "forward", "own"]
    what: str
    seconds: float
    answered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A node as it was when it was asked.

    `skew` is the node's clock minus the launcher's in seconds (positive: the node is ahead),
    `synced` whether a time daemon says so; `own_names` are the addresses that the node's own host
    name resolves to; `lookups` are of the cluster's addresses, `asks` whom the node asks for names,
    as its configuration says it; `memory`, `shm` and `shm_free` are bytes; `port_range` has the
    first and the last port that the kernel gives to programs that ask for any.
    """

    system: str = ""
    kernel: str = ""
    uid: int | None = None
    cpus: int | None = None
    numa_nodes: int | None = None
    memory: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    skew: float | None = None
    synced: bool | None = None
    own_names: tuple[str, ...] | None = None
    lookups: tuple[Lookup, ...] | None = None
    asks: tuple[str, ...] = ()
    default_nic: str = ""
    nics: tuple[Nic, ...] | None = None
    rdma: tuple[RdmaDevice, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    nvlink: NvlinkFabric | None = None
    imex: tuple[str, ...] | None = None
    xid: tuple[str, ...] | None = None
    modules: tuple[str, ...] = ()
    docker_storage: str = ""
    docker_cgroup: str = ""
    docker_root: str = ""
    remove_ipc: bool | None = None
    linger: bool | None = None
    next_kernel: str = ""
    next_kernel_has_driver: bool | None = None
    python: str = ""
    port_range: tuple[int, int] | None = None
