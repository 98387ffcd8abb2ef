"""The choice of parallelism: every rule decides in one example."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from launcher.planner.advice import list_alternatives
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.choice import (
    RULES,
    Demand,
    Layout,
    PlannedLayout,
    PlanQuestion,
    Reason,
    candidate_layouts,
    choose_layout,
    explain_layout,
    tp_objection,
)
from launcher.planner.cluster import Cluster, ClusterLink, PlanHost
from launcher.planner.estimate import GpuModel
from launcher.planner.flags import EngineFlags
from launcher.planner.plan_view import plan_rows
from launcher.planner.weights import GIB
from launcher.tools.model import shape_of
from launcher.tools.site import placement
from tests.planner import models
from tests.tools.site.test_placement import cluster as inventory

H100 = GpuModel(name="H100", memory_gib=79.18)
L40S = GpuModel(name="L40S", memory_gib=44.4)
PRO_6000 = GpuModel(name="RTX PRO 6000", memory_gib=94.97)
GB10 = GpuModel(name="GB10", memory_gib=119.63)


PHI_4 = {
    **models.LLAMA_8B,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "hidden_size": 5120,
    "intermediate_size": 17920,
}


def cluster(nodes: int, gpus: int, gpu: GpuModel = H100, **link: Any) -> Cluster:
    hosts = tuple(PlanHost(name=f"node{at}", gpus=gpus, gpu=gpu) for at in range(nodes))
    return Cluster(hosts=hosts, link=ClusterLink(**link))


def question(
    config: dict[str, Any], gib: float, on: Cluster, *, context: int = 8192, requests: int = 1
) -> PlanQuestion:
    return PlanQuestion(
        model=parse_architecture(config),
        weight_bytes=int(gib * GIB),
        cluster=on,
        demand=Demand(context=context, requests=requests),
    )


# model, GiB of weights, cluster, requests of 8,192 tokens → layout, and the deciding rules
_GOLDEN: dict[str, tuple[dict[str, Any], float, Cluster, int, str, tuple[str, ...]]] = {
    "one GPU is enough: replicas": (
        models.LLAMA_8B,
        14.96,
        cluster(1, 8),
        8,
        "DP 8 × TP 1",
        ("one-gpu", "replicas"),
    ),
    "a node is enough, and the other one is a replica": (
        {**models.LLAMA_8B, "num_hidden_layers": 320},
        131.4,
        cluster(2, 8, nvlink=True),
        4,
        "DP 4 × TP 4",
        ("node", "replicas"),
    ),
    "too large for a node": (
        models.DEEPSEEK_V3,
        641.0,
        cluster(2, 8, nvlink=True, rdma=True),
        4,
        "TP 8 × PP 2",
        ("nodes", "kv-copies", "layers"),
    ),
    "GPUs that do not divide the heads": (
        {**models.LLAMA_8B, "num_hidden_layers": 320},
        131.4,
        cluster(1, 6, L40S, nvlink=True),
        1,
        "TP 2 × PP 3",
        ("uneven", "layers"),
    ),
    "no NVLink in a node": (
        {**models.LLAMA_8B, "num_hidden_layers": 160},
        66.0,
        cluster(1, 4, L40S, nvlink=False),
        1,
        "TP 1 × PP 4",
        ("no-nvlink",),
    ),
    "experts that a TP would cut through": (
        models.QWEN_235B,
        219.8,
        cluster(1, 8, nvlink=True),
        90,
        "DP 2 × TP 4, experts sharded over all of them",
        ("node", "shared-experts"),
    ),
    "experts that a TP would cut through, and too long requests for less": (
        models.QWEN_235B,
        219.8,
        cluster(1, 8, GpuModel(name="RTX", memory_gib=47.5), nvlink=True),
        1,
        "TP 8, experts sharded over all of them",
        ("fp8-blocks", "expert-parallel", "kv-copies"),
    ),
    "a mixture on two nodes: a server on each": (
        models.QWEN_235B,
        219.8,
        cluster(2, 8, nvlink=True),
        90,
        "2 servers, each DP 2 × TP 4, experts sharded over all of them",
        ("node", "shared-experts", "shared-experts"),
    ),
    "one GPU a node, and RDMA": (
        {**models.LLAMA_8B, "num_hidden_layers": 320},
        131.4,
        cluster(2, 1, GB10, rdma=True),
        1,
        "TP 2",
        ("rdma-of-single-gpus",),
    ),
}


@pytest.mark.parametrize("name", _GOLDEN)
def test_golden(name: str) -> None:
    """Every cluster gets the layout of its rules."""
    config, gib, on, requests, description, rules = _GOLDEN[name]
    problem = question(config, gib, on, requests=requests)
    planned = choose_layout(problem)
    assert planned.layout.description == description
    assert tuple(reason.rule for reason in explain_layout(problem, planned)) == rules
    assert planned.verdict != "does-not-fit"


def test_every_rule_has_a_source() -> None:
    """To look up its reason."""
    assert all(Reason(rule, "").source for rule in RULES)
    decided = {rule for *_, rules in _GOLDEN.values() for rule in rules}
    others = {
        "tp-over-nodes",
        "dp-attention",
        "heads",
        "recurrent-heads",
        "widths",
        "asked",
        "closest",
        "drafts",
        "states",
    }
    assert decided | others == set(RULES)


def test_a_hybrid_model_has_a_limit_of_sequences() -> None:
    """One block of recurrent state per sequence, or vLLM 0.32 exits while it captures graphs; with
    the named flag it fits, and more nodes are not suggested.
    """
    problem = question(models.QWEN_NEXT, 51.75, cluster(1, 1, PRO_6000), context=32768)
    planned = choose_layout(problem)
    assert planned.verdict == "does-not-fit"
    states = planned.estimate.state_limit()
    assert states
    assert (
        f"1,024 sequences need a block of recurrent state each, and at most"
        f" {states} are available: add --max-num-seqs {states}"
        in [why.text for why in explain_layout(problem, planned)]
    )
    others = {
        alternative.change: alternative.planned.verdict
        for alternative in list_alternatives(problem, planned)
    }
    assert others[f"--max-num-seqs {states}"] == "fits"
    assert not any(change.startswith("--nodes") for change in others)

    short = choose_layout(
        replace(problem, weight_bytes=int(65 * GIB), demand=Demand(context=2_000_000))
    )
    assert short.verdict == "does-not-fit"
    assert (
        short.estimate.state_limit() is None
    )  # a request does not fit, for any number of sequences

    for starts in (
        EngineFlags(sequences=states),
        EngineFlags(eager=True),
        EngineFlags(full_graphs=False),
    ):
        assert choose_layout(replace(problem, flags=starts)).verdict == "fits"
    assert choose_layout(replace(problem, version=(0, 19))).verdict == "fits"


@pytest.mark.parametrize(
    ("link", "carries"),
    [
        ({"rdma": True, "gbps": 46.0, "latency_us": 6.0}, True),
        ({"rdma": True, "gbps": 12.5, "latency_us": 6.0}, False),
        ({"rdma": True, "gbps": 46.0, "latency_us": 30.0}, False),
        ({"rdma": True}, False),
        ({"gbps": 46.0, "latency_us": 6.0}, False),
        ({"mnnvl": True}, True),
    ],
)
def test_tp_crosses_nodes_only_over_a_measured_link(link: dict[str, Any], carries: bool) -> None:
    """RDMA, 40 GB/s per GPU and 10 µs, or multi-node NVLink."""
    layouts = list(candidate_layouts(parse_architecture(models.LLAMA_8B), cluster(2, 8, **link)))
    over = [layout for layout in layouts if layout.tp > 8]
    assert bool(over) is carries
    assert all(layout.reasons[0].rule == "tp-over-nodes" for layout in over)


def test_dp_attention_is_offered_to_mixtures() -> None:
    """If TP would copy the KV cache, DP attention with expert parallelism is a candidate."""
    layouts = list(candidate_layouts(parse_architecture(models.DEEPSEEK_V3), cluster(1, 8)))
    own = [layout for layout in layouts if layout.coupled]
    assert [(layout.tp, layout.dp, layout.experts) for layout in own] == [(1, 8, True)]
    assert not any(
        layout.coupled
        for layout in candidate_layouts(parse_architecture(models.LLAMA_8B), cluster(1, 8))
    )


@pytest.mark.parametrize(
    ("config", "tp", "rule"),
    [
        (models.LLAMA_8B, 3, "heads"),
        (models.QWEN_NEXT, 16, "heads"),
        (PHI_4, 4, "heads"),
        (PHI_4, 5, None),
        (PHI_4, 20, None),
        (
            {
                **models.LLAMA_8B,
                "intermediate_size": 8960,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
            },
            6,
            "widths",
        ),
        (
            {**models.QWEN_235B, "quantization_config": {}, "moe_intermediate_size": 1000},
            16,
            "widths",
        ),
        ({**models.DEEPSEEK_V3, "intermediate_size": 18440}, 16, "widths"),
        (models.DEEPSEEK_V3, 64, "fp8-blocks"),
        ({**models.NEMOTRON_H, "mamba_num_heads": 90}, 4, "recurrent-heads"),
        (models.QWEN_235B, 8, "fp8-blocks"),
        (models.QWEN_235B, 4, None),
    ],
)
def test_layouts_that_vllm_rejects(config: dict[str, Any], tp: int, rule: str | None) -> None:
    """A layout that cannot start is never chosen."""
    objection = tp_objection(parse_architecture(config), tp)
    assert (objection.rule if objection else None) == rule


def test_many_requests_take_larger_replicas() -> None:
    """The smallest TP with the required KV cache, not the smallest that starts."""
    config = {**models.LLAMA_8B, "num_hidden_layers": 160}
    few = choose_layout(question(config, 66.0, cluster(1, 8, nvlink=True), requests=2))
    many = choose_layout(question(config, 66.0, cluster(1, 8, nvlink=True), requests=60))
    assert few.layout.tp < many.layout.tp


def test_a_model_that_fits_nowhere() -> None:
    """The best option is shown with its verdict."""
    planned = choose_layout(question(models.DEEPSEEK_V3, 641.0, cluster(1, 4)))
    assert planned.verdict == "does-not-fit"


@pytest.mark.parametrize("name", _GOLDEN)
def test_alternatives_exist(name: str) -> None:
    """At least three, with their own figures, none of them the choice."""
    config, gib, on, requests, _, _ = _GOLDEN[name]
    problem = question(config, gib, on, requests=requests)
    planned = choose_layout(problem)
    others = list_alternatives(problem, planned)
    assert len(others) >= 3
    assert len({alternative.change for alternative in others}) == len(others)
    for alternative in others:
        assert alternative.better
        assert alternative.planned.estimate.poorest is not None


def test_unequal_gpus_take_unequal_layers() -> None:
    """The smallest stage limits all: layers in proportion to memory hold more tokens."""
    hosts = (PlanHost(name="large", gpus=8, gpu=H100), PlanHost(name="small", gpus=8, gpu=L40S))
    problem = replace(
        question({**models.LLAMA_8B, "num_hidden_layers": 320}, 131.4, cluster(1, 1)),
        cluster=Cluster(hosts=hosts),
    )
    planned = problem.judge_layout(Layout(tp=8, pp=2, exact=True))
    first = list_alternatives(problem, planned)[0]
    assert first.change.startswith('env: {VLLM_PP_LAYER_PARTITION: "')
    layers = [int(count) for count in first.change.split('"')[1].split(",")]
    assert sum(layers) == 320
    assert layers[0] > layers[1]
    assert first.planned.requests("likely") > planned.requests("likely")
    equal = replace(problem, cluster=cluster(2, 8))
    assert (
        "PARTITION"
        not in list_alternatives(equal, equal.judge_layout(Layout(tp=8, pp=2)))[0].change
    )


def _splits(planned: PlannedLayout) -> int:
    layout = planned.layout
    return layout.gpus_per_replica * layout.replicas


@pytest.mark.parametrize(
    ("config", "nodes", "gpus", "gpu"),
    list(
        product([*models.ALL.values(), PHI_4], [1, 2, 3], [1, 4, 6, 8], [H100]),
    ),
)
def test_any_cluster_and_model(
    config: dict[str, Any], nodes: int, gpus: int, gpu: GpuModel
) -> None:
    """GPUs suffice, vLLM and `serve` accept the layout, every replica has a placement."""
    problem = question(config, 60.0, cluster(nodes, gpus, gpu, nvlink=True, rdma=True))
    planned = choose_layout(problem)
    layout = planned.layout
    assert _splits(planned) <= nodes * gpus
    assert layout.pp <= len(problem.model.layers)
    shape = shape_of(config)
    assert not placement.explain_heads(shape.heads, shape.kv_heads, layout.tp)
    assert tp_objection(problem.model, layout.tp, expert_parallel=layout.experts) is None
    assert len(planned.placement) == layout.replicas // (layout.dp if layout.coupled else 1)
    assert {name for name, _ in planned.placement} <= {host.name for host in problem.cluster.hosts}


def test_drafts_are_noted_as_not_counted() -> None:
    """Unmodelled memory is mentioned."""
    problem = question(models.LLAMA_8B, 14.96, cluster(1, 1))
    drafting = replace(problem, flags=EngineFlags(drafts=True))
    rules = [reason.rule for reason in explain_layout(drafting, choose_layout(drafting))]
    assert "drafts" in rules
    assert "drafts" not in [
        reason.rule for reason in explain_layout(problem, choose_layout(problem))
    ]


def test_the_name_of_an_option() -> None:
    """For users."""
    assert Layout(tp=8, pp=2).description == "TP 8 × PP 2"
    assert (
        Layout(tp=1, dp=8, experts=True).description
        == "DP 8 × TP 1, experts sharded over all of them"
    )


def test_an_explicit_length_counts() -> None:
    """`--max-model-len` limits a request, or `--context` without it."""
    problem = question(models.LLAMA_8B, 14.96, cluster(1, 1), context=4096)
    longer = replace(problem, flags=EngineFlags(length=65536))
    assert problem.judge_layout(Layout(tp=1)).estimate.length == 4096
    assert longer.judge_layout(Layout(tp=1)).estimate.length == 65536


UNEVEN = [
    *((4, 2), (8, 4, 4), (8, 4), (2, 4), (8, 6), (4, 4, 2), (8, 2), (6, 4), (2, 2, 4, 4)),
    *((8, 8, 4), (4, 8, 8), (1, 2)),
]


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_uneven_nodes_are_used_completely(counts: tuple[int, ...]) -> None:
    """By `plan`, for a model that needs all of them, and by `serve`, which chooses the same."""
    config = {**models.LLAMA_8B, "num_hidden_layers": 80}
    hosts = tuple(PlanHost(name=f"n{at}", gpus=gpus, gpu=L40S) for at, gpus in enumerate(counts))
    asked = question(config, sum(counts) * 34.0, Cluster(hosts=hosts))
    plan = choose_layout(asked)
    served = placement.choose_placement(inventory(*counts), None, None, config)

    assert (plan.layout.tp, plan.layout.pp) == (served.tp, served.pp)
    assert plan.layout.gpus_per_replica == sum(counts) == served.tp * served.pp
    assert plan.verdict != "does-not-fit"
    smaller = replace(plan.layout, pp=plan.layout.pp - 1, exact=True)
    assert asked.judge_layout(smaller).requests("likely") < plan.requests("likely")


def test_a_small_model_has_replicas_on_all_uneven_nodes() -> None:
    """Not only as many on each node as the smallest one has room for."""
    hosts = tuple(PlanHost(name=f"n{at}", gpus=gpus, gpu=H100) for at, gpus in enumerate((4, 2)))
    plan = choose_layout(question(models.LLAMA_8B, 15.0, Cluster(hosts=hosts)))

    assert (plan.layout.tp, plan.layout.dp) == (1, 6)
    assert [name for name, _ in plan.placement] == ["n0"] * 4 + ["n1"] * 2


def test_uneven_nodes_are_described_as_they_are() -> None:
    """Not as the smallest one, times the number of nodes."""
    hosts = tuple(PlanHost(name=f"n{at}", gpus=gpus, gpu=H100) for at, gpus in enumerate((8, 4, 4)))
    asked = question(models.LLAMA_8B, 15.0, Cluster(hosts=hosts))
    text = "\n".join(plan_rows("m", asked, choose_layout(asked), ()))

    assert "16 × H100 (79.2 GiB): 8 on n0, 4 on n[1-2]" in text
