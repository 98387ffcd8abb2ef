"""Which split of a model a cluster should run, and why.

Pure. The rules are data: each has a name, its source, and a sentence; `options` gives the splits in
the order in which they are preferred, `choose` takes the first that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.planner.architecture import Architecture
from launcher.planner.cluster import Cluster
from launcher.planner.estimate import Engine, Estimate, Gpu, Range, estimate
from launcher.planner.flags import Flags
from launcher.planner.kv_cache import copies, partition
from launcher.planner.measured import Started, measured
from launcher.planner.versions import TODAY

Verdict = Literal["fits", "tight", "does-not-fit"]

_MOST_NODES = 64
_WORSE: tuple[Verdict, ...] = ("fits", "tight", "does-not-fit")
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
        """Where the rule comes from."""
        return RULES[self.rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What the model is to be able to do: so many requests of so many tokens at once."""

    context: int
    requests: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A split, and why it is considered.

    `dp` replicas are behind one endpoint, and are `coupled` when they share a mixture's experts;
    `servers` of them are started beside each other. `exact` is one that was asked for: no replica
    is added to it.
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
    def each(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def whole(self) -> int:
        """GPUs of what cannot be taken apart: a replica, or several that share experts."""
        return self.each * (self.dp if self.coupled else 1)

    @property
    def replicas(self) -> int:
        """Replicas of all servers."""
        return self.dp * self.servers

    @property
    def words(self) -> str:
        """Name the split for people."""
        sizes = (("DP", self.dp), ("TP", self.tp), ("PP", self.pp))
        shown = [f"{name} {size}" for name, size in sizes if size > 1 or name == "TP"]
        split = " × ".join(shown) + (", experts over all of them" if self.experts else "")
        return f"{self.servers} servers, each {split}" if self.servers > 1 else split


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An option with its figures: `requests` is how many of the wanted length all replicas hold."""

    option: Option
    estimate: Estimate
    verdict: Verdict
    placement: tuple[tuple[str, int], ...]

    def requests(self, which: str) -> float:
        """Return how many requests of the wanted length fit: `low`, `likely` or `high`."""
        found = self.estimate.concurrency
        return getattr(found, which) * self.option.replicas if found else 0.0


def refused(model: Architecture, tp: int, *, expert_parallel: bool = False) -> Reason | None:
    """Return why vLLM refuses this TP; None when it does not."""
    if model.heads % tp:
        return Reason("heads", f"{model.heads} attention heads cannot be divided by TP {tp}")
    state, experts = model.recurrent, model.experts
    if state and (state.heads % tp or (state.channels % tp)):
        return Reason(
            "recurrent-heads", f"{state.heads} linear attention heads cannot be divided by TP {tp}"
        )
    fp8 = model.quantization.startswith("fp8")
    if fp8 and experts and not expert_parallel and experts.width // tp % 128 and tp > 1:
        return Reason(
            "fp8-blocks",
            f"experts {experts.width} wide over TP {tp} are no multiple of a block of 128",
        )
    return None


def options(model: Architecture, cluster: Cluster) -> Iterator[Option]:
    """Return the splits that can run here, the preferred ones first."""
    each = cluster.each
    sizes = [tp for tp in range(1, each + 1) if each % tp == 0]
    for tp in sizes:
        yield from _in_node(model, cluster, tp)
    widest = max(tp for tp in sizes if tp == 1 or not refused(model, tp, expert_parallel=True))
    wrong = refused(model, each, expert_parallel=True)
    if wrong and len(model.layers) >= each // widest:
        text = f"{wrong.text}: TP {widest}, and pipeline stages for the rest"
        yield Option(
            tp=widest,
            pp=each // widest,
            experts=refused(model, widest) is not None,
            reasons=(Reason("uneven", text),),
        )
    if _copied(model, each):
        text = "each GPU attends for itself, so that KV is not copied, and experts are shared"
        yield Option(
            tp=1, dp=each, experts=True, coupled=True, reasons=(Reason("dp-attention", text),)
        )
    yield from _over_nodes(model, cluster, widest)


def _copied(model: Architecture, gpus: int) -> bool:
    """Tell whether a mixture of experts would have its KV cache copied over a node's GPUs."""
    return gpus > 1 and model.experts is not None and copies(model, gpus) > 1


def _in_node(model: Architecture, cluster: Cluster, tp: int) -> Iterator[Option]:
    """Return the splits over so many GPUs of one node."""
    wrong = refused(model, tp)
    slow = tp > 1 and cluster.link.nvlink is False and tp <= len(model.layers)
    if slow:
        text = "no NVLink in a node: pipeline stages pass less over PCIe"
        yield Option(tp=1, pp=tp, reasons=(Reason("no-nvlink", text),))
    if wrong is None:
        what = "one GPU" if tp == 1 else f"{tp} GPUs of a node"
        reason = Reason("one-gpu" if tp == 1 else "node", f"the model fits {what}")
        yield Option(tp=tp, reasons=(reason,))
    elif wrong.rule == "fp8-blocks":
        whole = Reason("expert-parallel", "so each GPU has whole experts")
        yield Option(tp=tp, experts=True, reasons=(wrong, whole))


def _over_nodes(model: Architecture, cluster: Cluster, widest: int) -> Iterator[Option]:
    """Return splits of one replica over nodes."""
    count, stages = len(cluster.hosts), cluster.each // widest
    experts = refused(model, widest) is not None
    over = widest * count
    wide = count > 1 and not refused(model, over)
    if wide and cluster.each == 1 and cluster.link.rdma:
        text = "one GPU a node, and RDMA between them: TP over nodes"
        yield Option(tp=over, reasons=(Reason("rdma-of-single-gpus", text),))
    for nodes in range(2, count + 1):
        if nodes * stages > len(model.layers):
            break
        reason = Reason(
            "nodes", f"the model needs {nodes} nodes: TP inside, pipeline stages between them"
        )
        yield Option(tp=widest, pp=nodes * stages, experts=experts, reasons=(reason,))
    if count > 1 and model.experts and cluster.link.rdma:
        text = "RDMA between nodes: each GPU attends for itself, and experts are over all of them"
        yield Option(
            tp=1,
            dp=cluster.each * count,
            experts=True,
            coupled=True,
            reasons=(Reason("expert-parallel", text),),
        )
    if wide and cluster.link.carries_tp:
        text = "the link between nodes was measured fast enough for TP"
        yield Option(tp=over, reasons=(Reason("tp-over-nodes", text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a plan depends on; `starts` are servers of this model that have answered
    here, the newest first.
    """

    model: Architecture
    weight_bytes: int
    cluster: Cluster
    want: Want
    flags: Flags = field(default_factory=Flags)
    version: tuple[int, int] = TODAY
    starts: tuple[Started, ...] = ()

    def judged(self, option: Option, flags: Flags | None = None) -> Planned:
        """Work an option out with as many replicas as the GPUs give, and judge it."""
        whole = replicated(option, self.model, self.cluster)
        flags = flags or self.flags
        found = self._estimated(whole, flags)
        verdict = verdict_of(found, -(-self.want.requests // whole.replicas))
        if whole.coupled and not option.coupled:  # each is to fit without the others' help, too
            verdict = max(verdict, verdict_of(self._estimated(option, flags)), key=_WORSE.index)
        placement = place(whole, self.cluster)
        placed = placement[: whole.dp] if whole.exact and not whole.coupled else placement
        return Planned(option=whole, estimate=found, verdict=verdict, placement=placed)

    def stage_gpus(self, option: Option) -> tuple[Gpu, ...]:
        """Return the GPU of each pipeline stage: stages fill one node after the other."""
        cluster = self.cluster
        if option.whole <= cluster.each or option.coupled or option.servers > 1:
            return (cluster.smallest,) * option.pp
        here = max(1, cluster.each // option.tp)
        last = len(cluster.hosts) - 1
        return tuple(cluster.hosts[min(at // here, last)].gpu for at in range(option.pp))

    def _estimated(self, option: Option, flags: Flags) -> Estimate:
        engine = Engine(
            gpus=self.stage_gpus(option),
            tp=option.tp,
            dp=option.dp if option.coupled else 1,
            nodes=-(-option.whole // self.cluster.each),
            flags=replace(
                flags,
                length=flags.length or self.want.context,
                expert_parallel=flags.expert_parallel or option.experts,
            ),
            version=self.version,
        )
        found = estimate(self.model, self.weight_bytes, engine)
        return measured(self.model, engine, found, self.starts)


def replicated(option: Option, model: Architecture, cluster: Cluster) -> Option:
    """Return an option with as many replicas as there are GPUs for.

    Those of a mixture share its experts in every layer, so that they are behind one endpoint inside
    a node, and each node has a server of its own.
    """
    if option.exact:
        return replace(option, coupled=option.dp > 1 and model.experts is not None)
    if not option.coupled and model.experts is None:
        return replace(option, dp=len(place(option, cluster)) or 1)
    if not option.coupled and (here := cluster.each // option.each) > 1:
        option = replace(option, dp=here, coupled=True, experts=True)
    return replace(option, servers=len(place(option, cluster)) or 1)


def verdict_of(found: Estimate, need: int = 1) -> Verdict:
    """Judge one replica that is to hold so many longest requests at once."""
    if found.cache is None and found.at is None:
        return "tight" if found.starts("likely") else "does-not-fit"
    times = found.concurrency or Range(0.0, 0.0, 0.0)
    if found.starts("low") and times.low >= need:
        return "fits"
    if found.starts("high") and times.high >= need:
        return "tight"
    return "does-not-fit"


def place(option: Option, cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """Return where each replica lies, or several that share experts: the first node, and the GPUs
    that are taken there.
    """
    whole = option.whole
    if whole <= cluster.each:
        return tuple(
            (host.name, whole) for host in cluster.hosts for _ in range(host.gpus // whole)
        )
    nodes = -(-whole // cluster.each)
    heads = cluster.hosts[: len(cluster.hosts) // nodes * nodes : nodes]
    return tuple((host.name, whole // nodes) for host in heads)


def choose(question: Question, *, one_server: bool = False) -> Planned:
    """Return the first split that fits, else the first that may, else what comes closest.

    With `one_server`, several servers beside each other are not looked at.
    """
    found = [question.judged(option) for option in options(question.model, question.cluster)]
    judged = [each for each in found if each.option.servers == 1 or not one_server] or [
        replace(each, option=replace(each.option, servers=1)) for each in found
    ]
    for verdict in ("fits", "tight"):
        for planned in judged:
            if planned.verdict == verdict:
                return planned
    best = max(judged, key=lambda each: (each.requests("likely"), each.estimate.poorest.kv.likely))
    reason = Reason("closest", "no split fits; this one comes closest")
    return replace(best, option=replace(best.option, reasons=(reason,)))


def enough(question: Question) -> Question | None:
    """Return the question with as many nodes like the first as fit; None when 64 would not."""
    first, count = question.cluster.hosts[0], len(question.cluster.hosts)
    for nodes in range(count + 1, _MOST_NODES + 1):
        hosts = tuple(replace(first, name=f"node{at}") for at in range(nodes))
        larger = replace(question, cluster=replace(question.cluster, hosts=hosts))
        if choose(larger).verdict == "fits":
            return larger
    return None


def remarks(question: Question, planned: Planned) -> tuple[Reason, ...]:
    """Return what else is to be known of a split."""
    model, option = question.model, planned.option
    found = list(option.reasons)
    found += _of_replicas(option)
    if states := planned.estimate.states():
        found.append(
            Reason(
                "states",
                f"{planned.estimate.sequences:,} sequences need a block of recurrent state each,"
                f" and there may be no more than {states:,}: add --max-num-seqs {states}",
            )
        )
    if (held := copies(model, option.tp)) > 1:
        found.append(
            Reason(
                "kv-copies",
                f"{held} GPUs hold the same KV: TP {option.tp}, {model.kv_heads} KV heads",
            )
        )
    if question.flags.drafts:
        found.append(Reason("drafts", "what the draft model takes is not counted"))
    counts = partition(len(model.layers) or 1, option.pp)
    if len(set(counts)) > 1:
        found.append(
            Reason("layers", f"{len(model.layers)} layers over {option.pp} stages: {counts}")
        )
    return tuple(found)


def _of_replicas(option: Option) -> list[Reason]:
    """Say how replicas and servers share the requests."""
    found = []
    if option.dp > 1 and option.coupled:
        text = (
            f"{option.dp} replicas share experts, behind one endpoint; inside a node that is quick"
        )
        found.append(Reason("shared-experts", text))
    elif option.dp > 1:
        text = f"{option.dp} replicas share the requests behind one endpoint"
        found.append(Reason("replicas", text))
    if option.servers > 1:
        text = "each server has its own endpoint: experts that are shared over nodes need RDMA"
        found.append(Reason("shared-experts", text))
    return found
