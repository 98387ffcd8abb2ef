"""The planner's forecast in `vlaunch serve`, and the layout that it chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.choice import Demand, Layout, PlanQuestion
from launcher.planner.cluster import Cluster as Gpus
from launcher.planner.cluster import PlanHost
from launcher.planner.estimate import GpuModel
from launcher.planner.flags import EngineFlags
from launcher.planner.measurement import MeasuredStart
from launcher.planner.weights import GIB
from launcher.serving.serve_forecast import ServePlan, compare_tokens, describe_extra_node
from tests.command_line import Cluster
from tests.planner import models

SERVE = ("serve", "--skip-network-check", "--no-wait", "--model", "meta/llama")
LENGTH = ("--", "--max-model-len", "8192")


@pytest.fixture
def llama(cluster: Cluster) -> Cluster:
    """A running cluster of sixteen GPUs with a model of 15 GiB."""
    put(cluster, models.LLAMA_8B, 16_060_556_376)
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    return cluster


def put(cluster: Cluster, config: dict[str, Any], size: int) -> None:
    """Store a model on all nodes."""
    for machine in cluster.world.machines.values():
        machine.config = config
        machine.model = {"model.safetensors": size, "config.json": 700}


def read_spec(cluster: Cluster) -> dict[str, Any]:
    """Return the spec of the default server."""
    files = cluster.world.machines["gpu01"].files
    original: dict[str, Any] = json.loads(files["server/default/desired.json"])["asked_for"]
    return original


def test_the_forecast_is_reported_before_the_start(llama: Cluster) -> None:
    """The output names the expected capacity of the cache and a better layout."""
    ran = llama.run(*SERVE, *LENGTH)

    assert ran.code == 0, ran.err
    assert "estimate: the KV cache holds" in ran.err
    assert "(estimate)" in ran.err
    assert "the planner prefers DP 16 × TP 1 (`--tp 1 --pp 1 --dp 16`)" in ran.err
    assert (read_spec(llama)["tp"], read_spec(llama)["pp"]) == (8, 2)


def test_an_equal_layout_is_not_called_better(llama: Cluster) -> None:
    """For example with a fixed cache size: the plan has other reasons then."""
    ran = llama.run(*SERVE, *LENGTH, "--kv-cache-memory-bytes", str(GIB), "--max-num-seqs", "8")

    assert "the planner prefers" in ran.err
    assert "requests of full length at once, as with this layout; use it with" in ran.err


def test_an_explicit_layout_is_not_questioned(llama: Cluster) -> None:
    """Only its expected capacity is reported."""
    ran = llama.run(*SERVE, "--tp", "8", "--pp", "2", *LENGTH)

    assert "estimate: the KV cache holds" in ran.err
    assert "the planner prefers" not in ran.err


@pytest.mark.parametrize("by", ["flag", "inventory"])
def test_the_plan_chooses(llama: Cluster, by: str) -> None:
    """With `--plan auto`, or by the inventory; the same command then attaches."""
    flag = ("--plan", "auto") if by == "flag" else ()
    if by == "inventory":
        llama.write(llama.path.read_text() + "serve: {plan: auto}\n")
    ran = llama.run(*SERVE, *flag, *LENGTH)

    assert ran.code == 0, ran.err
    assert [read_spec(llama)[key] for key in ("tp", "pp", "dp")] == [1, 1, 16]
    llama.world.changes.clear()
    for machine in llama.world.machines.values():
        machine.model = None  # the plan would not be the same
    again = llama.run(*SERVE, *flag, *LENGTH)
    assert (again.code, llama.world.verbs()) == (0, []), again.err


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_the_plan_chooses_for_replicas(llama: Cluster, backend: str) -> None:
    """Each gets its share of the cluster; the same command then attaches."""
    options = ("--plan", "auto", "--replicas", "2", "--backend", backend)
    ran = llama.run(*SERVE, *options, *LENGTH)

    assert ran.code == 0, ran.err
    specs = [server["desired"] for server in llama.world.servers()]
    assert {sum(spec["places"].values()) for spec in specs} == {8}
    assert len({tuple(spec["places"]) for spec in specs}) == (2 if backend == "mp" else 1)
    llama.world.changes.clear()
    again = llama.run(*SERVE, *options, *LENGTH)
    assert (again.code, llama.world.verbs()) == (0, []), again.err
    for machine in llama.world.machines.values():
        machine.model = machine.config = None  # there is nothing to plan with
    for more in ((), ("--fetch",)):
        again = llama.run(*SERVE, *options, *more, *LENGTH)
        assert (again.code, llama.world.verbs()) == (0, []), again.err


def test_experts_follow_the_plan(llama: Cluster) -> None:
    """As one server, with the plan's arguments."""
    put(llama, models.QWEN_235B, 236_000_000_000)
    ran = llama.run(*SERVE, "--plan", "auto", *LENGTH)

    assert ran.code == 0, ran.err
    assert [read_spec(llama)[key] for key in ("tp", "pp", "dp")] == [8, 2, 1]
    assert read_spec(llama)["args"][-1] == "--enable-expert-parallel"
    llama.world.changes.clear()
    assert llama.run(*SERVE, "--plan", "auto", *LENGTH).code == 0
    assert llama.world.verbs() == []


def test_an_explicit_layout_overrides_the_inventory(llama: Cluster) -> None:
    """Even `plan: auto`."""
    llama.write(llama.path.read_text() + "serve: {plan: auto}\n")
    assert llama.run(*SERVE, "--tp", "4", "--pp", "4", *LENGTH).code == 0
    assert (read_spec(llama)["tp"], read_spec(llama)["pp"]) == (4, 4)


def test_a_model_that_does_not_fit_is_a_warning(llama: Cluster) -> None:
    """It is started all the same, as a plan may be wrong; `plan: auto` fails."""
    put(llama, models.LLAMA_8B, 1_700 * GIB)
    ran = llama.run(*SERVE, *LENGTH)
    assert ran.code == 0
    assert "estimate: DOES NOT FIT: weights" in ran.err

    llama.unwant()
    refused = llama.run(*SERVE, "--plan", "auto", *LENGTH)
    assert refused.code == 2
    assert "no layout of meta/llama fits this cluster" in refused.err
    assert "`vlaunch plan --model meta/llama`" in refused.err


def test_too_many_sequences_for_recurrent_states(llama: Cluster) -> None:
    """A warning with the flag that fits."""
    put(llama, models.QWEN_NEXT, 51 * GIB)
    ran = llama.run(*SERVE, *LENGTH, "--max-num-seqs", "4000", "--gpu-memory-utilization", "0.3")
    assert ran.code == 0
    assert "DOES NOT FIT: too many sequences at once (4,000); set `-- --max-num-seqs " in ran.err


def test_an_unknown_model_is_not_planned(llama: Cluster) -> None:
    """Without a note; an explicit plan is rejected."""
    for machine in llama.world.machines.values():
        machine.config = None
    ran = llama.run(*SERVE, *LENGTH)
    assert (ran.code, "plan" in ran.err) == (0, False)

    llama.unwant()
    refused = llama.run(*SERVE, "--plan", "auto", *LENGTH)
    assert refused.code == 2
    assert "no node has the configuration of meta/llama" in refused.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--plan", "auto", "--tp", "8"), "--plan auto cannot be combined with --tp, --pp or --dp"),
        (("--plan", "auto", "--dry-run", "--offline"), "`vlaunch plan --no-nodes`"),
    ],
)
def test_conflicting_options(cluster: Cluster, args: tuple[str, ...], message: str) -> None:
    """Before any contact with a node."""
    ran = cluster.run("serve", "--model", "org/m", *args)
    assert ran.code == 2
    assert message in ran.err


def test_the_next_plan_knows_the_measured_capacity(llama: Cluster) -> None:
    """`serve` and `plan` print the figure in the history."""
    assert llama.run(*SERVE, "--tp", "8", "--pp", "2", *LENGTH).code == 0
    original = read_spec(llama)
    llama.unwant()
    labels = {"kv_cache_size_tokens": "9830400", "kv_cache_max_concurrency": "1200.0"}
    desired = {"id": "abcd1234", "image": "", "asked_for": original}
    revisions = [{"at": 1.7e9, "desired": desired, "held": labels}]
    llama.world.machines["gpu01"].files["server/default/history.json"] = json.dumps(
        revisions
    ).encode()

    ran = llama.run(*SERVE, "--tp", "8", "--pp", "2", *LENGTH)
    assert "estimate: the KV cache holds 9,830,400 tokens (measured)" in ran.err

    again = ("plan", "--model", "meta/llama", "--tp", "8", "--pp", "2")
    planned = llama.run(*again, "--json", *LENGTH)
    plan = json.loads(planned.out)
    assert (plan["basis"], plan["measured_at"]) == ("measured", 1.7e9)
    assert plan["kv_tokens"] == {"low": 9830400, "likely": 9830400, "high": 9830400}
    shown = llama.run(*again, *LENGTH)
    assert "measured on a server with this layout, 2023-11-14 22:13 UTC" in shown.out


def plan(tp: int, pp: int, *starts: MeasuredStart) -> ServePlan:
    """A plan for two nodes of eight GPUs."""
    gpu = GpuModel(name="H100", memory_gib=79.18)
    question = PlanQuestion(
        model=parse_architecture(models.LLAMA_8B),
        weight_bytes=int(14.96 * GIB),
        cluster=Gpus(
            hosts=(PlanHost(name="a", gpus=8, gpu=gpu), PlanHost(name="b", gpus=8, gpu=gpu))
        ),
        demand=Demand(context=8192),
        flags=EngineFlags(length=8192),
        starts=starts,
    )
    return ServePlan(
        question=question, planned=question.judge_layout(Layout(tp=tp, pp=pp, exact=True))
    )


def test_the_result_is_compared_with_the_plan() -> None:
    """An estimate is a range; an unchanged measured figure is not mentioned."""
    estimated = plan(8, 2)
    tokens = estimated.tokens
    assert tokens is not None
    assert compare_tokens(estimated, 7) == f" (planned {int(tokens.low):,} to {int(tokens.high):,})"
    started = MeasuredStart(
        at=1.0, tp=8, pp=2, dp=1, flags=EngineFlags(length=8192), concurrency=1200.0
    )
    exact = plan(8, 2, started)
    assert compare_tokens(exact, 9_830_400) == " (as planned)"
    assert compare_tokens(exact, 9_700_000) == " (planned 9,830,400)"
    assert compare_tokens(None, 7) == compare_tokens(exact, None) == ""


def test_an_extra_node() -> None:
    """More stages for a replica on several nodes, more replicas for one that fits a node."""
    started = MeasuredStart(
        at=1.0, tp=8, pp=2, dp=1, flags=EngineFlags(length=8192), concurrency=1200.0
    )
    assert describe_extra_node(plan(8, 2, started), 9_830_400).endswith(" tokens more, as PP 3")
    assert describe_extra_node(plan(4, 1), 1_000) == "2,000 tokens more, as replicas of this layout"
    assert (
        describe_extra_node(plan(8, 1), 1_000) == "1,000 tokens more, as a replica of this layout"
    )
    assert describe_extra_node(None, 1_000) == describe_extra_node(plan(8, 1), None) == ""
    flat = plan(8, 2)
    deep = replace(flat.planned, layout=replace(flat.planned.layout, pp=32))
    assert describe_extra_node(replace(flat, planned=deep), 1_000) == ""
