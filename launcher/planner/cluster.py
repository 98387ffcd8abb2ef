"""The hardware of a plan: nodes with their GPUs, and the link between nodes. Pure."""

from dataclasses import dataclass

from launcher.planner.estimate import GpuModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHost:
    """A node: its name, and the number and model of its GPUs."""

    name: str
    gpus: int
    gpu: GpuModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """Links between GPUs: `nvlink` inside a node (None: unknown); between nodes the measured GB/s
    per GPU and microseconds, or None; `rdma` as the inventory's fabric promises; `mnnvl` is NVLink
    across nodes.
    """

    nvlink: bool | None = None
    gbps: float | None = None
    latency_us: float | None = None
    rdma: bool = False
    mnnvl: bool = False

    @property
    def carries_tp(self) -> bool:
        """True if TP may cross nodes: with NVLink between them, or with RDMA measured at 40 GB/s
        per GPU or more and at most 10 µs. Below that, TP across nodes costs most of the speed:
        Llama-405B on 16 H100 with TP 16 gives 142 tokens/s at 50 GB/s per GPU and 5 at 1.25, TP 8 ×
        PP 2 gives 469 and 443 (AIConfigurator 0.12).
        """
        fast = self.gbps is not None and self.gbps >= 40
        quick = self.latency_us is not None and self.latency_us <= 10
        return self.mnnvl or (self.rdma and fast and quick)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and their link."""

    hosts: tuple[PlanHost, ...]
    link: ClusterLink = ClusterLink()

    @property
    def gpus_per_node(self) -> int:
        """GPUs that every node has."""
        return min(host.gpus for host in self.hosts)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(host.gpus for host in self.hosts)

    @property
    def smallest(self) -> GpuModel:
        """The GPU with the least memory."""
        return min((host.gpu for host in self.hosts), key=lambda gpu: gpu.memory_gib)
