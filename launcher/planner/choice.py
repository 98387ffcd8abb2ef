"""Choice of a model's parallel layout on a cluster, with reasons.

Pure. The rules are data: each has a name, a source and a sentence. `candidate_layouts` yields
layouts in the order of preference; `choose_layout` takes the first that fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.planner.architecture import Architecture
from launcher.planner.cluster import Cluster, PlanHost
from launcher.planner.estimate import Estimate, GpuModel, PlannedEngine, Range, estimate_replica
from launcher.planner.flags import EngineFlags
from launcher.planner.kv_cache import count_kv_copies, partition_layers
from launcher.planner.measurement import MeasuredStart, apply_measurement
from launcher.planner.versions import CURRENT
from launcher.tools.site.placement import explain_heads, split_evenly

Verdict = Literal["fits", "tight", "does-not-fit"]

_MOST_NODES = 64
_VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "does-not-fit")
_DOCS = "https://docs.vllm.ai/en/latest/serving/"
RULES = {
    "one-gpu": _DOCS + "parallelism_scaling/",
    "node": _DOCS + "parallelism_scaling/",
    "nodes": _DOCS + "parallelism_scaling/",
    "uneven": _DOCS + "parallelism_scaling/",
    "no-nvlink": _DOCS + "parallelism_scaling/",
    "tp-over-nodes": "AIConfigurator 0.12, Llama-405B on 16 H100 (docs/explanation/planning.md)",
    "rdma-of-single-gpus": "https://github.com/eugr/spark-vllm-docker",
    "dp-attention": _DOCS + "data_parallel_deployment/",
    "expert-parallel": _DOCS + "expert_parallel_deployment/",
    "kv-copies": _DOCS + "context_parallel_deployment/",
    "heads": "vllm/config/model.py, verify_with_parallel_config (0.32)",
    "fp8-blocks": "vllm/model_executor/layers/quantization/fp8.py (0.32)",
    "widths": "vllm/distributed/utils.py, divide (0.32)",
    "recurrent-heads": "vllm/model_executor/layers/mamba/mamba_utils.py (0.32)",
    "layers": "vllm/distributed/utils.py, get_pp_indices (0.32)",
    "replicas": _DOCS + "data_parallel_deployment/",
    "shared-experts": "vllm/model_executor/layers/fused_moe/config.py,"
    " flatten_tp_across_dp_and_pcp (0.32)",
    "asked": "the command line",
    "drafts": "docs/explanation/planning.md",
    "states": "vllm/config/compilation.py, exceeds available Mamba cache blocks (0.20 to 0.32)",
    "closest": "vllm/v1/worker/gpu_worker.py, determine_available_memory (0.32)",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule that decided, in a sentence."""

    rule: str
    text: str

    @property
    def source(self) -> str:
        """Source of the rule."""
        return RULES[self.rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Required capacity: concurrent requests, each of `context` tokens."""

    context: int
    requests: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A parallel layout, with the reasons to consider it.

    `dp` replicas share one endpoint; they are `coupled` if they share a mixture's experts.
    `servers` of them run beside each other. `exact` means that the user chose the layout: no
    replica is added.
    """

    tp: int
    pp: int = 1
    dp: int = 1
    experts: bool = False
    coupled: bool = False
    servers: int = 1
    exact: bool = False
    reasons: tuple[Reason, ...] = ()

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def gpus_per_unit(self) -> int:
        """GPUs that must stay together: a replica, or all replicas that share experts."""
        return self.gpus_per_replica * (self.dp if self.coupled else 1)

    @property
    def replicas(self) -> int:
        """Replicas of all servers."""
        return self.dp * self.servers

    @property
    def description(self) -> str:
        """The layout as text."""
        sizes = (("DP", self.dp), ("TP", self.tp), ("PP", self.pp))
        parts = [f"{name} {size}" for name, size in sizes if size > 1 or name == "TP"]
        split = " × ".join(parts) + (", experts sharded over all of them" if self.experts else "")
        return f"{self.servers} servers, each {split}" if self.servers > 1 else split


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout with its figures and verdict."""

    layout: Layout
    estimate: Estimate
    verdict: Verdict
    placement: tuple[tuple[str, int], ...]

    def requests(self, bound: str) -> float:
        """Return the requests of full length on all replicas: `low`, `likely` or `high`."""
        concurrency = self.estimate.concurrency
        return getattr(concurrency, bound) * self.layout.replicas if concurrency else 0.0


def tp_objection(model: Architecture, tp: int, *, expert_parallel: bool = False) -> Reason | None:
    """Return vLLM's reason to refuse this TP; None if it accepts it."""
    for layer in model.layers[:1] if model.latent else model.layers:
        kv_heads = None if model.latent else layer.kv_heads or None
        if text := explain_heads(model.heads, kv_heads, tp):
            return Reason("heads", text)
    state = model.recurrent
    if state and (state.heads % tp or state.channels % tp):
        return Reason(
            "recurrent-heads", f"{state.heads} linear attention heads cannot be divided by TP {tp}"
        )
    return _width_objection(model, tp, expert_parallel=expert_parallel)


def _width_objection(model: Architecture, tp: int, *, expert_parallel: bool) -> Reason | None:
    """Return the reason why MLPs cannot be split; with expert parallelism experts stay whole."""
    dense = any(layer.mlp and not layer.moe for layer in model.layers)
    shared = model.experts.shared if model.experts else 0
    split_experts = model.experts.width if model.experts and not expert_parallel else 0
    widths = (model.width if dense else 0, shared, split_experts)
    if indivisible := next((width for width in widths if width % tp), None):
        return Reason("widths", f"an MLP {indivisible} wide cannot be divided by TP {tp}")
    if model.quantization.startswith("fp8") and tp > 1 and split_experts // tp % 128:
        return Reason(
            "fp8-blocks",
            f"experts {split_experts} wide over TP {tp} are not a multiple of the block of 128",
        )
    return None


def candidate_layouts(model: Architecture, cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts that can run on the cluster, preferred ones first."""
    gpus = cluster.gpus_per_node
    sizes = [tp for tp in range(1, gpus + 1) if gpus % tp == 0]
    for tp in sizes:
        yield from _node_layouts(model, cluster, tp)
    widest = _widest_tp(model, gpus)
    objection = tp_objection(model, gpus, expert_parallel=True)
    if objection and len(model.layers) >= gpus // widest:
        text = f"{objection.text}: TP {widest}, and pipeline stages for the rest"
        yield Layout(
            tp=widest,
            pp=gpus // widest,
            experts=tp_objection(model, widest) is not None,
            reasons=(Reason("uneven", text),),
        )
    if _copies_kv_cache(model, gpus):
        text = "each GPU runs its own attention, without copies of KV, and experts are shared"
        reasons = (Reason("dp-attention", text),)
        yield Layout(tp=1, dp=gpus, experts=True, coupled=True, reasons=reasons)
    yield from _multi_node_layouts(model, cluster)


def _widest_tp(model: Architecture, gpus: int) -> int:
    """Return the largest TP that the model allows and that divides a number of GPUs."""
    return max(
        tp
        for tp in range(1, gpus + 1)
        if gpus % tp == 0 and (tp == 1 or not tp_objection(model, tp, expert_parallel=True))
    )


def _copies_kv_cache(model: Architecture, gpus: int) -> bool:
    """True if a mixture of experts would have its KV cache copied over a node's GPUs."""
    return gpus > 1 and model.experts is not None and count_kv_copies(model, gpus) > 1


def _node_layouts(model: Architecture, cluster: Cluster, tp: int) -> Iterator[Layout]:
    objection = tp_objection(model, tp)
    lacks_nvlink = tp > 1 and cluster.link.nvlink is False and tp <= len(model.layers)
    if lacks_nvlink:
        text = "no NVLink in a node: pipeline stages send less over PCIe"
        yield Layout(tp=1, pp=tp, reasons=(Reason("no-nvlink", text),))
    if objection is None:
        gpus = "one GPU" if tp == 1 else f"{tp} GPUs of a node"
        reason = Reason("one-gpu" if tp == 1 else "node", f"the model fits {gpus}")
        yield Layout(tp=tp, reasons=(reason,))
    elif not tp_objection(model, tp, expert_parallel=True):
        whole_experts = Reason("expert-parallel", "so each GPU has complete experts")
        yield Layout(tp=tp, experts=True, reasons=(objection, whole_experts))


def _multi_node_layouts(model: Architecture, cluster: Cluster) -> Iterator[Layout]:
    count = len(cluster.hosts)
    widest = _widest_tp(model, split_evenly([host.gpus for host in cluster.hosts])[0])
    experts = tp_objection(model, widest) is not None
    total_tp = widest * count
    can_span = count > 1 and not tp_objection(model, total_tp)
    if can_span and cluster.gpus_per_node == 1 and cluster.link.rdma:
        text = "one GPU a node, and RDMA between them: TP over nodes"
        yield Layout(tp=total_tp, reasons=(Reason("rdma-of-single-gpus", text),))
    for nodes in range(2, count + 1):
        stages = sum(host.gpus // widest for host in cluster.hosts[:nodes])
        if stages > len(model.layers):
            break
        reason = Reason(
            "nodes", f"the model needs {nodes} nodes: TP inside, pipeline stages between them"
        )
        yield Layout(tp=widest, pp=stages, experts=experts, reasons=(reason,))
    if count > 1 and model.experts and cluster.link.rdma:
        text = "RDMA between nodes: each GPU runs its own attention, experts are sharded"
        yield Layout(
            tp=1,
            dp=cluster.gpus_per_node * count,
            experts=True,
            coupled=True,
            reasons=(Reason("expert-parallel", text),),
        )
    if can_span and cluster.link.carries_tp:
        text = "the link between nodes was measured fast enough for TP"
        yield Layout(tp=total_tp, reasons=(Reason("tp-over-nodes", text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Everything that a plan depends on; `starts` are servers of this model that have answered on
    the cluster, the newest first.
    """

    model: Architecture
    weight_bytes: int
    cluster: Cluster
    demand: Demand
    flags: EngineFlags = field(default_factory=EngineFlags)
    version: tuple[int, int] = CURRENT
    starts: tuple[MeasuredStart, ...] = ()

    def judge_layout(self, base: Layout, flags: EngineFlags | None = None) -> PlannedLayout:
        """Estimate and judge a layout with as many replicas as the GPUs allow."""
        layout = add_replicas(base, self.model, self.cluster)
        flags = flags or self.flags
        estimate = self._estimate_layout(layout, flags)
        verdict = judge_estimate(estimate, -(-self.demand.requests // layout.replicas))
        if layout.coupled and not base.coupled:  # a replica must also fit without the others
            single = judge_estimate(self._estimate_layout(base, flags))
            verdict = max(verdict, single, key=_VERDICTS.index)
        placement = place_replicas(layout, self.cluster)
        placed = placement[: layout.dp] if layout.exact and not layout.coupled else placement
        return PlannedLayout(layout=layout, estimate=estimate, verdict=verdict, placement=placed)

    def stage_gpus(self, layout: Layout) -> tuple[GpuModel, ...]:
        """Return the GPU of each pipeline stage: stages fill one node after the other."""
        cluster = self.cluster
        if layout.gpus_per_unit <= cluster.gpus_per_node or layout.coupled or layout.servers > 1:
            return (cluster.smallest,) * layout.pp
        gpus = [host.gpu for host in cluster.hosts for _ in range(max(1, host.gpus // layout.tp))]
        return tuple(gpus[min(at, len(gpus) - 1)] for at in range(layout.pp))

    def _estimate_layout(self, layout: Layout, flags: EngineFlags) -> Estimate:
        engine = PlannedEngine(
            gpus=self.stage_gpus(layout),
            tp=layout.tp,
            dp=layout.dp if layout.coupled else 1,
            nodes=len(next(_node_groups(layout, self.cluster), self.cluster.hosts)),
            flags=replace(
                flags,
                length=flags.length or self.demand.context,
                expert_parallel=flags.expert_parallel or layout.experts,
            ),
            version=self.version,
        )
        estimated = estimate_replica(self.model, self.weight_bytes, engine)
        return apply_measurement(self.model, engine, estimated, self.starts)


def add_replicas(layout: Layout, model: Architecture, cluster: Cluster) -> Layout:
    """Return a layout with as many replicas as there are GPUs for.

    Replicas of a mixture share its experts in every layer, so they share one endpoint inside a
    node, and each node has its own server.
    """
    if layout.exact:
        return replace(layout, coupled=layout.dp > 1 and model.experts is not None)
    if not layout.coupled and model.experts is None:
        return replace(layout, dp=len(place_replicas(layout, cluster)) or 1)
    if (
        not layout.coupled
        and (replicas_per_node := cluster.gpus_per_node // layout.gpus_per_replica) > 1
    ):
        layout = replace(layout, dp=replicas_per_node, coupled=True, experts=True)
    return replace(layout, servers=len(place_replicas(layout, cluster)) or 1)


def judge_estimate(estimate: Estimate, requests: int = 1) -> Verdict:
    """Judge one replica against a number of concurrent requests of the longest length."""
    if estimate.cache is None and estimate.measured_at is None:
        return "tight" if estimate.can_start("likely") else "does-not-fit"
    concurrency = estimate.concurrency or Range(0.0, 0.0, 0.0)
    if estimate.can_start("low") and concurrency.low >= requests:
        return "fits"
    if estimate.can_start("high") and concurrency.high >= requests:
        return "tight"
    return "does-not-fit"


def place_replicas(layout: Layout, cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """Return the first node of each unit (`Layout.gpus_per_unit`) and its GPUs there."""
    gpus = layout.gpus_per_unit
    if gpus <= cluster.gpus_per_node:
        return tuple((host.name, gpus) for host in cluster.hosts for _ in range(host.gpus // gpus))
    groups = _node_groups(layout, cluster)
    return tuple((hosts[0].name, min(gpus, hosts[0].gpus)) for hosts in groups)


def _node_groups(layout: Layout, cluster: Cluster) -> Iterator[tuple[PlanHost, ...]]:
    """Yield the nodes of each unit: one after the other, as many as it needs."""
    group: list[PlanHost] = []
    for host in cluster.hosts:
        group.append(host)
        if sum(member.gpus for member in group) >= layout.gpus_per_unit:
            yield tuple(group)
            group = []


def choose_layout(question: PlanQuestion, *, single_server: bool = False) -> PlannedLayout:
    """Return the first layout that fits, else the first tight one, else the closest.

    With `single_server`, layouts of several servers are left out.
    """
    layouts = candidate_layouts(question.model, question.cluster)
    plans = [question.judge_layout(layout) for layout in layouts]
    candidates = [plan for plan in plans if plan.layout.servers == 1 or not single_server] or [
        replace(plan, layout=replace(plan.layout, servers=1)) for plan in plans
    ]
    for verdict in ("fits", "tight"):
        for plan in candidates:
            if plan.verdict == verdict:
                return plan
    best = max(candidates, key=lambda p: (p.requests("likely"), p.estimate.poorest.kv.likely))
    reason = Reason("closest", "no layout fits; this is the closest")
    return replace(best, layout=replace(best.layout, reasons=(reason,)))


def add_nodes_until_fit(question: PlanQuestion) -> PlanQuestion | None:
    """Return the question with the fewest nodes like the first that fit; None above 64."""
    first, node_count = question.cluster.hosts[0], len(question.cluster.hosts)
    for nodes in range(node_count + 1, _MOST_NODES + 1):
        hosts = tuple(replace(first, name=f"node{index}") for index in range(nodes))
        larger = replace(question, cluster=replace(question.cluster, hosts=hosts))
        if choose_layout(larger).verdict == "fits":
            return larger
    return None


def explain_layout(question: PlanQuestion, plan: PlannedLayout) -> tuple[Reason, ...]:
    """Return the reasons and remarks about a layout."""
    model, layout = question.model, plan.layout
    reasons = list(layout.reasons)
    reasons += _replica_reasons(layout)
    if states := plan.estimate.state_limit():
        reasons.append(
            Reason(
                "states",
                f"{plan.estimate.sequences:,} sequences need a block of recurrent state each,"
                f" and at most {states:,} are available: add --max-num-seqs {states}",
            )
        )
    if (kv_copies := count_kv_copies(model, layout.tp)) > 1:
        reasons.append(
            Reason(
                "kv-copies",
                f"{kv_copies} GPUs hold the same KV: TP {layout.tp}, {model.kv_heads} KV heads",
            )
        )
    if question.flags.drafts:
        reasons.append(Reason("drafts", "the draft model's memory is not counted"))
    counts = partition_layers(len(model.layers) or 1, layout.pp)
    if len(set(counts)) > 1:
        reasons.append(
            Reason("layers", f"{len(model.layers)} layers over {layout.pp} stages: {counts}")
        )
    return tuple(reasons)


def _replica_reasons(layout: Layout) -> list[Reason]:
    reasons = []
    if layout.dp > 1 and layout.coupled:
        text = f"{layout.dp} replicas share experts, behind one endpoint; fast inside a node"
        reasons.append(Reason("shared-experts", text))
    elif layout.dp > 1:
        text = f"{layout.dp} replicas share the requests behind one endpoint"
        reasons.append(Reason("replicas", text))
    if layout.servers > 1:
        text = "each server has its own endpoint: sharing experts between nodes needs RDMA"
        reasons.append(Reason("shared-experts", text))
    return reasons
