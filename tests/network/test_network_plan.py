"""The plan of the network check: queries, timeouts, repetitions and records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from launcher.core.domain import Answer, Secret
from launcher.network import network_plan
from launcher.network.network_shape import CheckOptions, CheckResult, Verdict, to_record
from launcher.tools.docker import Image
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site, network_verdict
from launcher.tools.site.network_verdict import NetworkRecord, ServerLinks
from tests.conftest import Load
from tests.fakes import FakeTransport
from tests.plan_case import ASK, judged, up
from tests.simulated import World

NODES = (
    "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 4, head:"
    " true}, {host: gpu03, ip: 10.0.0.13, gpus: 6}]"
)


def option_value(argv: Sequence[str], option: str) -> str:
    """Return an option's value."""
    return argv[list(argv).index(option) + 1]


def test_the_head_is_rank_0(load: Load) -> None:
    """All ranks meet at its address; the others follow in the inventory's order, with equal
    arguments.
    """
    requests = {
        command.node: command.argv
        for command in network_plan.probe_commands(Site(load(nodes=NODES)), ASK)
    }

    assert {name: option_value(argv, "--node-rank") for name, argv in requests.items()} == {
        "gpu02": "0",
        "gpu01": "1",
        "gpu03": "2",
    }
    assert {option_value(argv, "--nodes") for argv in requests.values()} == {
        "gpu02=10.0.0.12,gpu01=10.0.0.11,gpu03=10.0.0.13"
    }
    assert {option_value(argv, "--master") for argv in requests.values()} == {"10.0.0.12"}
    assert {option_value(argv, "--nonce") for argv in requests.values()} == {"f00d"}


@pytest.mark.parametrize(("requests", "item"), [(None, "4"), (2, "2")])
def test_every_node_has_as_many_ranks_as_the_smallest_has_gpus(
    load: Load, requests: int | None, item: str
) -> None:
    """Ranks of a pair exchange data one to one, so their numbers must be equal."""
    commands = network_plan.probe_commands(
        Site(load(nodes=NODES)), replace(ASK, ranks_per_node=requests)
    )

    assert {option_value(command.argv, "--ranks-per-node") for command in commands} == {item}


@pytest.mark.parametrize(
    ("ask", "nodes", "seconds"),
    [
        (ASK, 2, 300 + 25 * 3),
        (ASK, 3, 300 + 25 * 4),
        (replace(ASK, pair_timeout=5.0), 3, 300 + 10 * 4),
        (replace(ASK, deadline=30.0), 3, 30),
    ],
)
def test_every_wait_ends(load: Load, ask: CheckOptions, nodes: int, seconds: float) -> None:
    """Rounds and reduction at their slowest, and time to start; the launcher waits longer, and for
    two runs.
    """
    inventory = load(nodes=NODES if nodes == 3 else "")
    commands = network_plan.probe_commands(Site(inventory), ask)

    assert network_plan.probe_deadline(inventory, ask) == seconds
    assert {float(option_value(command.argv, "--deadline")) for command in commands} == {seconds}
    assert all(command.timeout > seconds for command in commands)
    assert network_plan.network_gate(Site(inventory), ask, CheckResult()).deadline > 2 * seconds


def test_probes_run_concurrently_and_stop_with_the_connection(load: Load) -> None:
    """Above any limit of connections; the end of standard input cancels them."""
    for command in network_plan.probe_commands(Site(load(nodes=NODES)), ASK):
        assert (command.simultaneous, command.hold_stdin) == (True, True)


def test_the_certificate_is_passed_on_standard_input_only(load: Load) -> None:
    """All nodes get the same line."""
    ask = replace(ASK, certificate=Secret("PEM"))
    for command in network_plan.probe_commands(Site(load(nodes=NODES)), ask):
        assert command.stdin is not None
        assert command.stdin() == b'{"certificate": "PEM"}\n'
        assert "PEM" not in " ".join(command.full_argv)
    assert "PEM" not in repr(ask)


@pytest.mark.parametrize(
    ("accelerator", "backend"), [("cpu", "gloo"), ("nvidia", "nccl"), ("amd", "nccl")]
)
def test_the_backend_is_the_accelerators(load: Load, accelerator: str, backend: str) -> None:
    """RCCL uses NCCL's name."""
    commands = network_plan.probe_commands(Site(load(f"accelerator: {accelerator}")), ASK)

    assert {option_value(command.argv, "--backend") for command in commands} == {backend}


@pytest.mark.parametrize("fresh", [False, True])
def test_containers_of_the_probe(load: Load, fresh: bool) -> None:
    """The running ones, else temporary ones with the same devices."""
    _, facts = up(load("network: {fabric: infiniband}\nsecrets: {HF_TOKEN: {env: X}}"))
    commands = network_plan.probe_commands(
        Site(load("network: {fabric: infiniband}"), {} if fresh else facts), ASK
    )
    argv = commands[0].argv

    assert (
        argv[3:5] == ("once", "vlaunch-c-gpu01-probe") if fresh else argv[:2] == ("docker", "exec")
    )
    if fresh:
        assert {"vlaunch.cluster=c", "/dev/infiniband", "IPC_LOCK", "memlock=-1"} <= set(argv)
        assert option_value(argv, "--gpus") == "8"
        assert "secrets" not in " ".join(argv)


def test_without_a_container_and_without_an_image_nothing_is_measured(load: Load) -> None:
    """The error has the node and the remedy."""
    inventory = load()
    world = World(inventory)
    world.machines["gpu02"].images.clear()
    facts = probe_nodes(inventory, FakeTransport(world.answer), [inventory.image])
    findings = network_plan.plan_prepare(Site(inventory, facts)).stages[0].gates[0].judge({})

    assert [(finding.node, finding.status) for finding in findings] == [
        ("gpu01", "pass"),
        ("gpu02", "fail"),
    ]
    assert "vlaunch up" in findings[1].fix


def test_a_doubtful_pair_is_measured_twice_and_the_better_figures_count(load: Load) -> None:
    """A slow one, as other traffic slows it too. The record has the shown figures."""
    world, facts = up(load(nodes=NODES))
    world.rates["gpu01", "gpu02"], world.rates["gpu03", "gpu02"] = [1e8, 2e9], [2e9, 1e8]
    proof = CheckResult()
    first, second = judged(world, facts, ASK, proof), judged(world, facts, ASK, proof)

    assert [item.status for item in first] == ["wait"]
    assert [item.status for item in second] == ["pass"]
    assert proof.verdict is not None
    assert proof.verdict.passed
    assert {cell.bandwidth for cell in proof.verdict.cells} == {2e9}


def test_a_pair_that_stays_slow_fails(load: Load) -> None:
    """Without a third measurement."""
    world, facts = up(load(nodes=NODES))
    world.rates["gpu01", "gpu02"] = world.rates["gpu02", "gpu01"] = 1e8
    proof = CheckResult()
    first, second = judged(world, facts, ASK, proof), judged(world, facts, ASK, proof)

    assert [item.status for item in first] == ["wait"]
    assert [(item.node, item.status) for item in second if item.status == "fail"] == [
        ("gpu01 ↔ gpu02", "fail")
    ]


@pytest.mark.parametrize("spoil", ["level", "missing"])
def test_certain_failures_are_not_repeated(load: Load, spoil: str) -> None:
    """A transport below the level, or no report: a repetition would show the same."""
    world, facts = up(load(nodes=NODES))
    if spoil == "missing":
        world.reports["gpu03"] = "killed"
    findings = judged(
        world, facts, replace(ASK, require="rdma" if spoil == "level" else None), CheckResult()
    )

    assert "fail" in {item.status for item in findings}
    assert "wait" not in {item.status for item in findings}


def test_a_verdict_between_some_nodes(load: Load) -> None:
    """Measured between these alone, recorded on the head, and valid for no others, in any order."""
    inventory = load("", NODES)
    _, facts = up(inventory)
    ask = replace(ASK, nodes=("gpu03", "gpu01"))
    gate, keep = network_plan.check_stages(
        Site(inventory, facts), ask, CheckResult(), measured_at="now"
    )
    passed = Verdict(backend="nccl", nodes=ask.nodes, required="any", why="", cells=(), findings=())
    proof = CheckResult(
        verdict=passed, options=ask, servers={"chat": ServerLinks(id="1", said="s")}
    )
    written = replace(to_record(Site(inventory, facts), proof, measured_at="now"), passed=True)
    saved = network_verdict.parse_record(
        Answer(node="gpu02", code=0, out=json.dumps(asdict(written)))
    )

    assert [query.node for query in gate.gates[0].queries] == ["gpu03", "gpu01"]
    assert {step.command.node for step in (*gate.steps, *keep.steps)} == {"gpu02"}
    assert network_verdict.covered_nodes(Site(inventory, facts), saved) == {"gpu01", "gpu03"}
    assert saved.servers["chat"].said == "s"
    for nodes, proven in ((("gpu01", "gpu03"), True), (("gpu02", "gpu03"), False), ((), False)):
        requests = network_verdict.is_verified(
            Site(inventory, facts), saved, require="any", collective=False, nodes=nodes
        )
        assert requests is proven


def test_verdicts_of_servers_logs_are_recorded(load: Load) -> None:
    """By the server's name, with its ID."""
    saved = NetworkRecord(servers={"chat": ServerLinks(id="1", said="NET/IB")})
    step = network_plan.record_confirmation(
        Site(load()), saved, server="embed", id="2", links="NET/Socket"
    )
    assert step.command.stdin is not None

    assert json.loads(step.command.stdin())["servers"] == {
        "chat": {"id": "1", "said": "NET/IB"},
        "embed": {"id": "2", "said": "NET/Socket"},
    }


def test_a_dry_run_records_nothing(load: Load) -> None:
    """Its step has no content."""
    inventory = load()
    step = network_plan.record_verdict(Site(inventory), CheckResult(), measured_at="today")

    assert step.command.stdin is not None
    assert json.loads(step.command.stdin()) == json.loads(json.dumps(asdict(NetworkRecord())))
    assert step.command.shown_stdin == "printf '{}'"


def test_an_image_is_sufficient(load: Load) -> None:
    """A node without a running container gets a temporary one."""
    inventory = load()
    image = Image(id="i", identity="i", digests=(), architecture="amd64", labels={})
    facts = {node.name: HostFacts(images={inventory.image: image}) for node in inventory.nodes}

    assert {
        finding.status
        for finding in network_plan.plan_prepare(Site(inventory, facts))
        .stages[0]
        .gates[0]
        .judge({})
    } == {"pass"}
