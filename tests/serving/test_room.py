"""What must hold before a server is asked for, and who is in its way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.domain import Inventory
from launcher.serving.serve_plan import StartPlan
from launcher.serving.serve_request import ServeRequest
from launcher.tools.host import Gpu
from launcher.tools.site import Site
from launcher.tools.survey import GpuProcess
from tests.ray_rows import group, table
from tests.served import (
    BARE,
    INVENTORY,
    chat,
    container,
    desired,
    judged,
    kept,
    planned,
    request,
    seen,
)


def gates(start: StartPlan) -> list[str]:
    return [gate.id for stage in start.plan.stages for gate in stage.gates]


def test_preflight() -> None:
    """What would make vLLM wait or fail later is looked at first."""
    assert gates(planned(seen(), request())) == [
        "cluster",
        "agents",
        "accelerator",
        "model",
        "room",
        "gpu-memory",
    ]
    assert gates(planned(seen(), request("mp"))) == [
        "agents",
        "accelerator",
        "model",
        "room",
        "gpu-memory",
    ]


@pytest.mark.parametrize(
    ("own", "members", "text", "fix"),
    [
        (container("n2", status="exited"), {"n2": 1.0}, "its container is exited", "`vlaunch up`"),
        (None, {"n2": 1.0}, "has no container of this cluster", "run `vlaunch up` first"),
        (container("n2"), {}, "its agent was never heard", "`vlaunch logs n2`"),
        (container("n2"), {"n2": 61}, "its agent was last heard 61s ago", "`vlaunch logs n2`"),
    ],
)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_cluster_that_is_not_up(
    backend: str, own: Any, members: dict[str, float], text: str, fix: str
) -> None:
    """No container is made here; who has none that a keeper can use is named."""
    there = seen(members=members)
    facts = {
        **there.site.facts,
        "n2": replace(there.site.facts["n2"], containers=(own,) if own else ()),
    }
    (found,) = judged(
        planned(replace(there, site=Site(INVENTORY, facts)), request(backend)), "agents"
    )

    assert (found.node, text in found.text, fix in found.fix) == ("n2", True, True)


def test_nodes_that_an_mp_server_does_not_use_may_be_away() -> None:
    """But for the head, whose agent starts everything."""
    asked = request("mp", tp=8, pp=1, nodes=("n1",))

    assert judged(planned(seen(members={}), asked), "agents") == []
    assert [each.node for each in judged(planned(seen(agent=None), asked), "agents")] == ["n1"]


def test_a_server_on_a_lost_gpu_is_refused() -> None:
    """Where a driver says so; who says nothing, and who is not used, is not in the way."""
    there = seen()
    lost = replace(there.site.facts["n2"], lost_gpus=("GPU3: 0000:61:00.0: Unknown Error",))
    facts = {**there.site.facts, "n2": lost}
    broken = replace(there, site=Site(INVENTORY, facts))
    (found,) = judged(planned(broken, request()), "accelerator")

    assert (found.node, found.text) == ("n2", "the driver has lost a GPU")
    assert judged(planned(broken, chat()), "accelerator") == []


@pytest.mark.parametrize("inventory", [INVENTORY, BARE])
def test_who_holds_the_gpus_is_named(inventory: Inventory) -> None:
    """With what ends it, and the way around."""
    (found,) = judged(
        planned(seen(kept(chat(tp=6))), request("mp", tp=4, pp=2, gpus=4, port=8001), inventory),
        "room",
    )

    assert (found.node, found.text) == (
        "n1",
        "2 of 8 GPUs are free, the server needs 4: server `chat` holds 6",
    )
    assert "`vlaunch stop chat`" in found.fix
    assert "`--nodes`" in found.fix


def test_who_holds_the_gpus_of_a_ray_server_is_named() -> None:
    """A server of either backend, and batch jobs; Ray would let vLLM wait without a word."""
    (found,) = judged(planned(seen(kept(chat())), request(port=8001)), "room")

    assert (
        found.text == "12 of 16 GPUs are free in Ray, TP 8 × PP 2 needs 16: server `chat` holds 4"
    )
    assert "`vlaunch stop chat`" in found.fix


def test_ranks_that_ray_has_put_elsewhere() -> None:
    """What its keeper sees counts, not what was expected."""
    moved = kept(request(name="chat", tp=2, pp=1), ranks={"n2": ["TP0", "TP1"]})
    (found,) = judged(planned(seen(moved), request("mp", tp=8, pp=2, port=8001)), "room")

    assert (found.node, "server `chat` holds 2" in found.text) == ("n2", True)


def test_work_in_ray_is_in_the_way_of_mp() -> None:
    """On the node where it is; what a server of ours has there is counted once."""
    there = seen(kept(chat()), groups=table(group(4, ip="10.0.0.1"), group(1, ip="10.0.0.2")))
    room = judged(planned(there, request("mp", tp=4, pp=2, gpus=4, port=8001)), "room")
    (full,) = judged(planned(there, request("mp", tp=8, pp=1, nodes=("n2",))), "room")

    assert room == []
    assert (full.node, full.text) == (
        "n2",
        "7 of 8 GPUs are free, the server needs 8: work in Ray holds 1",
    )


def batch(gpus: str) -> dict[str, Any]:
    return {
        "submission_id": "b-1",
        "status": "RUNNING",
        "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": gpus},
    }


@pytest.mark.parametrize("backend", ["ray", "mp"])
@pytest.mark.parametrize(("theirs", "refused"), [("12", True), ("0", False)])
def test_a_server_is_not_replaced_by_one_that_lacks_room(
    backend: Any, theirs: str, refused: bool
) -> None:
    """What the old one holds is counted as free, what a batch job needs is not; how to end that is
    told.
    """
    old = kept(request(model="org/other"), ranks={"n1": ["x"] * 8, "n2": ["x"] * 8})
    there = seen(
        old,
        jobs=[batch(theirs)],
        groups=table(group(8, ip="10.0.0.1"), group(8, ip="10.0.0.2")),
    )
    found = judged(planned(there, request(backend), replace_other=True), "room")

    assert bool(found) is refused
    assert all("`vlaunch stop b`" in each.fix for each in found)


def test_mp_is_refused_while_ray_does_not_say_what_it_holds() -> None:
    """A dashboard that hangs has not said that the GPUs are free; without Ray there is none to
    ask.
    """
    there = seen(error="timed out")
    there = replace(there, payload={key: value for key, value in there.payload.items() if key != "jobs"})
    (found,) = judged(planned(there, request("mp")), "room")

    assert (found.node, "timed out" in found.text) == ("n1", True)
    assert judged(planned(there, request("mp"), BARE), "room") == []


def test_who_holds_the_port_is_named() -> None:
    """On the node where it is, beside the GPUs that lack, with one that is free; the same port of
    another node is no matter.
    """
    there = seen(kept(chat()), kept(desired(chat(name="embed", port=8001))))
    gpus, found = judged(planned(there, request("mp", tp=4, pp=2)), "room")

    assert "GPUs are free" in gpus.text
    assert (found.node, found.text) == ("n1", "port 8000 on n1 is held by server `chat`")
    assert found.fix == "choose another: `--port 8002`"
    assert judged(planned(there, chat(name="other", nodes=("n2",))), "room") == []


def test_each_endpoint_needs_its_port() -> None:
    """On every node that has one; one that holds it there has it, whichever of its endpoints that
    is.
    """
    apart: dict[str, Any] = {"tp": 4, "pp": None, "dp": 2, "gpus": 4, "args": ("-dph",)}
    there = seen(kept(chat(nodes=("n2",))))
    (found,) = judged(planned(there, request("mp", **apart)), "room")
    assert (found.node, found.text) == ("n2", "port 8000 on n2 is held by server `chat`")

    there = seen(kept(request("mp", name="apart", **apart)))
    (found,) = judged(planned(there, chat(nodes=("n2",))), "room")
    assert (found.node, found.text) == ("n2", "port 8000 on n2 is held by server `apart`")


def test_a_port_that_makes_room_is_free() -> None:
    """Its listener ends with the server that is replaced; any other one is in the way."""
    there = seen(kept(request(model="org/other")))
    taken = {
        **there.site.facts,
        "n1": replace(
            there.site.facts["n1"], listening=frozenset({("0.0.0.0", 8000), ("0.0.0.0", 8001)})
        ),
    }
    there = replace(there, site=Site(INVENTORY, taken))

    assert judged(planned(there, request(), replace_other=True), "room") == []
    (found,) = judged(planned(there, request(port=8001), replace_other=True), "room")
    assert "port 8001 (vLLM API) is taken" in found.text


@pytest.mark.parametrize(
    ("asked", "status"),
    [(request(tp=1, pp=1), "warn"), (request(), "fail"), (request("mp"), "fail")],
)
def test_gpu_memory_that_others_hold(asked: ServeRequest, status: str) -> None:
    """Ray may choose such a GPU or another one: that is warned of. Where the server takes all, it
    cannot start.
    """
    gpus = tuple(
        Gpu(index=at, name="", memory_total=80000, memory_used=0, driver="1", uuid=f"GPU-{at}")
        for at in range(8)
    )
    ada = GpuProcess(gpu="GPU-2", pid=7, name="python3", memory=70000, user="ada")
    there = seen()
    facts = replace(there.site.facts["n1"], gpus=gpus, gpu_processes=(ada,))
    held = replace(there, site=Site(INVENTORY, {**there.site.facts, "n1": facts}))

    found = [each for each in judged(planned(held, asked), "gpu-memory") if each.node == "n1"]
    assert [(each.status, "held by ada (1 process)" in each.text) for each in found] == [
        (status, True)
    ]
