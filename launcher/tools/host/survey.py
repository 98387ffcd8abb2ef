"""Survey of a node's hardware and configuration: network cards, RDMA devices, GPUs, Docker, kernel.

It is part of the probe (`launcher.tools.host`). Unavailable values are `None` or empty, with the
messages of tools in `HostFacts.part_errors`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """Network interface; `speed` in Mbit/s, `physical` if it has a device, `addresses` as
    `ip/prefix`.
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
    """Non-zero entry of an RDMA port's GID table; `kind` is the kernel's, such as `RoCE v2`."""

    index: int
    value: str
    kind: str = ""
    netdev: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """Port of an RDMA device; `state` such as `ACTIVE`, `link_layer` `InfiniBand` or `Ethernet`,
    `rate` in Gbit/s.
    """

    number: int
    state: str
    physical: str = ""
    rate: float = 0.0
    link_layer: str = ""
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """Device below /sys/class/infiniband; `model` is its `hca_type` or board id, `netdevs` its
    interfaces.
    """

    name: str
    ports: tuple[RdmaPort, ...] = ()
    model: str = ""
    numa: int | None = None
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of a GPU in addition to `HostFacts.gpus`: whether it drives a display or is divided
    into instances (MIG), and its connections to RDMA devices (`affinity`, PIX … SYS) and to GPUs
    such as `GPU1` (`peers`, NV18 for eighteen NVLinks).
    """

    index: int
    ecc_errors: int | None = None
    display: bool = False
    mig: bool = False
    affinity: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkFabric:
    """Fabric between GPUs: number of NVSwitches, registration state of each GPU that has one
    (`Completed`), systemd's state of Fabric Manager, the types of the GPUs' IOMMU groups
    (`identity`, `DMA`, `DMA-FQ`), and the number of PCIe bridges that redirect peer access.
    """

    switches: int = 0
    states: tuple[str, ...] = ()
    service: str = ""
    iommu: tuple[str, ...] = ()
    redirects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """Process that uses GPU memory (MiB), its user and the id of its container, if any."""

    gpu: str
    pid: int
    name: str
    memory: int
    user: str = ""
    container: str = ""

    def runs_in(self, containers: Collection[str]) -> bool:
        """Return True if it runs in one of these containers (ids)."""
        return bool(self.container) and any(
            container_id.startswith(self.container) for container_id in containers if container_id
        )


LOOKUP_DEADLINE = 5  # seconds, as in `shell/survey_names.sh`


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Name lookup: of an address (`reverse`), of a name (`forward`), or of the node's own name
    (`own`); `answered` is false if it timed out.
    """

    kind: Literal["reverse", "forward", "own"]
    subject: str
    seconds: float
    answered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Hardware and configuration of a node.

    `skew` is the node's clock minus the launcher's in seconds; `synced` is the report of a time
    daemon; `own_names` are the addresses of the node's own host name; `lookups` are those of the
    cluster's addresses, `resolver_lines` the resolver's configuration; `memory`, `shm` and
    `shm_free` are in bytes, as is `driver_memory`, which is in no process and no cache;
    `port_range` has the first and last ephemeral port.
    """

    system: str = ""
    machine: str = ""
    kernel: str = ""
    uid: int | None = None
    cpus: int | None = None
    numa_nodes: int | None = None
    memory: int | None = None
    driver_memory: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    skew: float | None = None
    synced: bool | None = None
    own_names: tuple[str, ...] | None = None
    lookups: tuple[Lookup, ...] | None = None
    resolver_lines: tuple[str, ...] = ()
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
