"""Gates before a server starts, and the users of its GPUs and ports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.domain import Inventory
from launcher.serving.serve_plan import StartPlan
from launcher.serving.serve_request import ServeRequest
from launcher.tools.host import Gpu
from launcher.tools.host.survey import GpuProcess
from launcher.tools.site import Site
from tests.ray_rows import group, table
from tests.served import (
    BARE,
    INVENTORY,
    chat,
    container,
    judge_gate,
    make_snapshot,
    make_spec,
    plan_start,
    request,
    server_row,
)


def gates(start: StartPlan) -> list[str]:
    return [gate.id for stage in start.plan.stages for gate in stage.gates]


def test_preflight() -> None:
    """Conditions that would make vLLM wait or fail later are checked first."""
    assert gates(plan_start(make_snapshot(), request())) == [
        "cluster",
        "agents",
        "accelerator",
        "model",
        "room",
        "gpu-memory",
        "engine-flags",
    ]
    assert gates(plan_start(make_snapshot(), request("mp"))) == [
        "agents",
        "accelerator",
        "model",
        "room",
        "gpu-memory",
        "engine-flags",
    ]


@pytest.mark.parametrize(
    ("own", "members", "text", "fix"),
    [
        (
            container("n2", status="exited"),
            {"n2": 1.0},
            "its container is not running (exited)",
            "`vlaunch up`",
        ),
        (None, {"n2": 1.0}, "has no container of this cluster", "run `vlaunch up` first"),
        (container("n2"), {}, "its agent never reported", "`vlaunch logs n2`"),
        (container("n2"), {"n2": 61}, "its agent last reported 61s ago", "`vlaunch logs n2`"),
    ],
)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_cluster_that_is_not_up(
    backend: str, own: Any, members: dict[str, float], text: str, fix: str
) -> None:
    """`serve` creates no container; nodes without a usable one are named."""
    snapshot = make_snapshot(members=members)
    facts = {
        **snapshot.site.facts,
        "n2": replace(snapshot.site.facts["n2"], containers=(own,) if own else ()),
    }
    (finding,) = judge_gate(
        plan_start(replace(snapshot, site=Site(INVENTORY, facts)), request(backend)), "agents"
    )

    assert (finding.node, text in finding.text, fix in finding.fix) == ("n2", True, True)


def test_nodes_unused_by_an_mp_server_may_be_unreachable() -> None:
    """Except for the head with its supervisor."""
    candidate = request("mp", tp=8, pp=1, nodes=("n1",))

    assert judge_gate(plan_start(make_snapshot(members={}), candidate), "agents") == []
    assert [
        finding.node
        for finding in judge_gate(plan_start(make_snapshot(agent=None), candidate), "agents")
    ] == ["n1"]


def test_a_server_on_a_lost_gpu_is_rejected() -> None:
    """Only the server's nodes count, if their driver reports the loss."""
    snapshot = make_snapshot()
    lost = replace(snapshot.site.facts["n2"], lost_gpus=("GPU3: 0000:61:00.0: Unknown Error",))
    facts = {**snapshot.site.facts, "n2": lost}
    broken = replace(snapshot, site=Site(INVENTORY, facts))
    (finding,) = judge_gate(plan_start(broken, request()), "accelerator")

    assert (finding.node, finding.text) == ("n2", "the driver has lost a GPU")
    assert judge_gate(plan_start(broken, chat()), "accelerator") == []


@pytest.mark.parametrize("inventory", [INVENTORY, BARE])
def test_the_user_of_the_gpus_is_named(inventory: Inventory) -> None:
    """The hint has the command that stops it, and an alternative."""
    (finding,) = judge_gate(
        plan_start(
            make_snapshot(server_row(chat(tp=6))),
            request("mp", tp=4, pp=2, gpus=4, port=8001),
            inventory,
        ),
        "room",
    )

    assert (finding.node, finding.text) == (
        "n1",
        "2 of 8 GPUs are free, the server needs 4: server `chat` uses 6",
    )
    assert "`vlaunch stop chat`" in finding.fix
    assert "`--nodes`" in finding.fix


def test_the_user_of_the_gpus_of_a_ray_server_is_named() -> None:
    """A server of either backend, and batch jobs; Ray would let vLLM wait silently."""
    (finding,) = judge_gate(
        plan_start(make_snapshot(server_row(chat())), request(port=8001)), "room"
    )

    assert (
        finding.text == "12 of 16 GPUs are free in Ray, TP 8 × PP 2 needs 16: server `chat` uses 4"
    )
    assert "`vlaunch stop chat`" in finding.fix


def test_ranks_placed_elsewhere_by_ray() -> None:
    """The supervisor's record counts, not the plan."""
    moved = server_row(request(name="chat", tp=2, pp=1), ranks={"n2": ["TP0", "TP1"]})
    (finding,) = judge_gate(
        plan_start(make_snapshot(moved), request("mp", tp=8, pp=2, port=8001)), "room"
    )

    assert (finding.node, "server `chat` uses 2" in finding.text) == ("n2", True)


def test_gpus_used_by_ray_block_mp() -> None:
    """Nodes are judged separately; a server's own GPUs count once."""
    snapshot = make_snapshot(
        server_row(chat()), groups=table(group(4, ip="10.0.0.1"), group(1, ip="10.0.0.2"))
    )
    room = judge_gate(plan_start(snapshot, request("mp", tp=4, pp=2, gpus=4, port=8001)), "room")
    (full,) = judge_gate(plan_start(snapshot, request("mp", tp=8, pp=1, nodes=("n2",))), "room")

    assert room == []
    assert (full.node, full.text) == (
        "n2",
        "7 of 8 GPUs are free, the server needs 8: work in Ray uses 1",
    )


def batch(gpus: str) -> dict[str, Any]:
    return {
        "submission_id": "b-1",
        "status": "RUNNING",
        "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": gpus},
    }


@pytest.mark.parametrize("backend", ["ray", "mp"])
@pytest.mark.parametrize(("theirs", "refused"), [("12", True), ("0", False)])
def test_a_server_is_not_replaced_without_enough_gpus(
    backend: Any, theirs: str, refused: bool
) -> None:
    """GPUs of the old server count as free, a batch job's do not; the hint tells how to stop the
    job.
    """
    old = server_row(request(model="org/other"), ranks={"n1": ["x"] * 8, "n2": ["x"] * 8})
    snapshot = make_snapshot(
        old,
        jobs=[batch(theirs)],
        groups=table(group(8, ip="10.0.0.1"), group(8, ip="10.0.0.2")),
    )
    findings = judge_gate(plan_start(snapshot, request(backend), replace_other=True), "room")

    assert bool(findings) is refused
    assert all("`vlaunch stop b`" in finding.fix for finding in findings)


def test_mp_is_rejected_while_ray_is_silent() -> None:
    """A hanging dashboard does not report free GPUs; without Ray there is no dashboard."""
    snapshot = make_snapshot(error="timed out")
    snapshot = replace(
        snapshot, payload={key: value for key, value in snapshot.payload.items() if key != "jobs"}
    )
    (finding,) = judge_gate(plan_start(snapshot, request("mp")), "room")

    assert (finding.node, "timed out" in finding.text) == ("n1", True)
    assert judge_gate(plan_start(snapshot, request("mp"), BARE), "room") == []


def test_the_user_of_the_port_is_named() -> None:
    """On its node, with a free port, beside missing GPUs; the same port of another node does not
    matter.
    """
    snapshot = make_snapshot(
        server_row(chat()), server_row(make_spec(chat(name="embed", port=8001)))
    )
    gpus, finding = judge_gate(plan_start(snapshot, request("mp", tp=4, pp=2)), "room")

    assert "GPUs are free" in gpus.text
    assert (finding.node, finding.text) == ("n1", "port 8000 on n1 is in use by server `chat`")
    assert finding.fix == "choose another port: `--port 8002`"
    assert judge_gate(plan_start(snapshot, chat(name="other", nodes=("n2",))), "room") == []


def test_every_endpoint_needs_its_port() -> None:
    """Each node with an endpoint needs it; any endpoint of another server may use it."""
    apart: dict[str, Any] = {"tp": 4, "pp": None, "dp": 2, "gpus": 4, "args": ("-dph",)}
    snapshot = make_snapshot(server_row(chat(nodes=("n2",))))
    (finding,) = judge_gate(plan_start(snapshot, request("mp", **apart)), "room")
    assert (finding.node, finding.text) == ("n2", "port 8000 on n2 is in use by server `chat`")

    snapshot = make_snapshot(server_row(request("mp", name="apart", **apart)))
    (finding,) = judge_gate(plan_start(snapshot, chat(nodes=("n2",))), "room")
    assert (finding.node, finding.text) == ("n2", "port 8000 on n2 is in use by server `apart`")


def test_a_replaced_servers_port_is_free() -> None:
    """Its listener stops with the server; any other one blocks the start."""
    snapshot = make_snapshot(server_row(request(model="org/other")))
    facts = {
        **snapshot.site.facts,
        "n1": replace(
            snapshot.site.facts["n1"], listening=frozenset({("0.0.0.0", 8000), ("0.0.0.0", 8001)})
        ),
    }
    snapshot = replace(snapshot, site=Site(INVENTORY, facts))

    assert judge_gate(plan_start(snapshot, request(), replace_other=True), "room") == []
    (finding,) = judge_gate(plan_start(snapshot, request(port=8001), replace_other=True), "room")
    assert "port 8001 (vLLM API) is already in use" in finding.text


@pytest.mark.parametrize(
    ("candidate", "status"),
    [(request(tp=1, pp=1), "warn"), (request(), "fail"), (request("mp"), "fail")],
)
def test_used_gpu_memory(candidate: ServeRequest, status: str) -> None:
    """A warning, as Ray may choose another GPU; a failure if the server needs all."""
    gpus = tuple(
        Gpu(index=at, name="", memory_total=80000, memory_used=0, driver="1", uuid=f"GPU-{at}")
        for at in range(8)
    )
    ada = GpuProcess(gpu="GPU-2", pid=7, name="python3", memory=70000, user="ada")
    snapshot = make_snapshot()
    facts = replace(snapshot.site.facts["n1"], gpus=gpus, gpu_processes=(ada,))
    full = replace(snapshot, site=Site(INVENTORY, {**snapshot.site.facts, "n1": facts}))

    findings = [
        finding
        for finding in judge_gate(plan_start(full, candidate), "gpu-memory")
        if finding.node == "n1"
    ]
    assert [
        (finding.status, "used by ada (1 process)" in finding.text) for finding in findings
    ] == [(status, True)]
