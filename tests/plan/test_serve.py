"""Plans that ask for a server: what they write down, when they attach, and what they refuse."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.shape import Finding
from launcher.errors import PlacementError, RequestError
from launcher.model import Inventory
from launcher.payload.agent.desired import Policy, read
from launcher.placement import choose, narrow
from launcher.plan.request import Request
from launcher.plan.script import script
from launcher.plan.serve import Start, ask_model, plan_files
from launcher.site import Site
from launcher.state.snapshot import ClusterSnapshot
from launcher.tools.host import HostFacts
from tests.golden import check
from tests.plan import served
from tests.plan.served import (
    BARE,
    INVENTORY,
    NODES,
    container,
    desired,
    kept,
    planned,
    request,
    seen,
)

GOLDEN = Path(__file__).parent / "golden"


def judged(start: Start, gate: str) -> list[Finding]:
    (found,) = [each for stage in start.plan.stages for each in stage.gates if each.id == gate]
    return [each for each in found.judge({}) if each.status != "pass"]


def gates(start: Start) -> list[str]:
    return [gate.id for stage in start.plan.stages for gate in stage.gates]


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_the_script(backend: str) -> None:
    """Every word that is sent: one file on the head's own disk, whatever the backend."""
    start = planned(seen(), request(backend, args=("--chat-template", "it's")))

    check(GOLDEN / f"serve-{backend}.sh", script(INVENTORY, [start.plan]))


def test_the_script_writes_what_the_run_does(tmp_path: Path) -> None:
    """But for the time, which is that of the writing; the file is whole, and of the login's."""
    start = planned(seen(), request(args=("--chat-template", "it's $HOME")))
    (step,) = start.plan.steps
    assert step.command.stdin is not None
    argv = [str(tmp_path / "default") if "/server/" in word else word for word in step.command.argv]
    subprocess.run(argv, input=step.command.stdin(), check=True, timeout=10)
    shown = subprocess.run(
        ["bash", "-c", step.command.shown_stdin], check=True, timeout=10, capture_output=True
    ).stdout

    assert [path.name for path in (tmp_path / "default").iterdir()] == ["desired.json"]
    assert read(json.loads((tmp_path / "default" / "desired.json").read_text())) == start.desired
    assert replace(read(json.loads(shown)), asked=7.0) == start.desired
    assert read(json.loads(shown)).asked > 1e9
    assert (step.command.node, step.command.argv[-2:]) == (
        "n1",
        ("/root/.vlaunch/c/server/default", "desired.json"),
    )


def test_a_ray_server() -> None:
    """One process on the head, with all that the keeper and a rollback need."""
    asked = request(args=("--gpu-memory-utilization=0.5",))
    wanted = desired(asked, there=seen(), policy=Policy(start_timeout=7200.0))
    (process,) = wanted.processes

    assert (process.node, process.argv, process.gpus, process.replicas) == (
        "n1",
        asked.argv,
        None,
        (0, 1),
    )
    assert process.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
    assert process.env["NCCL_DEBUG_FILE"] == f"/tmp/vlaunch-nccl.default-{asked.digest}.%h.%p.log"
    assert (wanted.places, wanted.tp, wanted.replicas, wanted.memory_share) == (
        {"n1": 8, "n2": 8},
        8,
        1,
        0.5,
    )
    assert (wanted.visible, wanted.image, wanted.asked, wanted.api_node) == (
        "CUDA_VISIBLE_DEVICES",
        "1",
        7.0,
        "n1",
    )
    assert wanted.addresses == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert wanted.ray is not None
    assert (wanted.ray.gpus, wanted.ray.reserve, wanted.ray.dashboard) == (16, False, 8265)


def test_an_mp_server() -> None:
    """One process a node with its rank, and no API but on the first; with Ray, its GPUs are set
    aside there.
    """
    wanted = desired(request("mp"))
    one, two = (process.argv for process in wanted.processes)

    assert [process.node for process in wanted.processes] == ["n1", "n2"]
    assert [option(argv, "--node-rank") for argv in (one, two)] == ["0", "1"]
    assert {
        option(argv, "--master-addr") + ":" + option(argv, "--master-port") for argv in (one, two)
    } == {"10.0.0.1:29501"}
    assert ("--headless" in one, "--headless" in two) == (False, True)
    assert wanted.ray is not None
    assert (wanted.ray.reserve, desired(request("mp"), BARE).ray) == (True, None)


def test_a_server_on_cpus() -> None:
    """No variable hides GPUs, nobody looks at their memory, and NCCL has no log."""
    cpu = replace(INVENTORY, accelerator="cpu")
    wanted = desired(request(inventory=cpu), cpu)

    assert (wanted.visible, wanted.memory_share) == ("", None)
    assert list(wanted.processes[0].env) == ["VLLM_ENGINE_READY_TIMEOUT_S"]


def test_what_the_user_sets_stays() -> None:
    """A variable of the inventory is in the container already."""
    own = {
        "VLLM_ENGINE_READY_TIMEOUT_S": "9",
        "NCCL_DEBUG": "WARN",
        "VLLM_RAY_DP_PACK_STRATEGY": "fill",
    }
    inventory = replace(INVENTORY, nodes=(replace(NODES[0], env=own), NODES[1]))
    (process,) = desired(request(tp=4, pp=None, dp=4), inventory).processes

    assert not own.keys() & process.env.keys()
    assert process.env["VLLM_RAY_DP_PLACEMENT_NODE_IPS"] == "10.0.0.1,10.0.0.2"


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1] if name in argv else ""


def test_replicas_of_mp() -> None:
    """Each node runs its own, numbered on from the first's, which alone has an API."""
    wanted = desired(request("mp", tp=4, pp=None, dp=4))
    one, two = (process.argv for process in wanted.processes)

    assert [process.replicas for process in wanted.processes] == [(0, 2), (2, 2)]
    for argv in (one, two):
        assert option(argv, "--data-parallel-size") == "4"
        assert option(argv, "--data-parallel-size-local") == "2"
        assert option(argv, "--data-parallel-address") == "10.0.0.1"
        assert option(argv, "--data-parallel-rpc-port") == "29550"
        assert "--nnodes" not in argv
    assert ("--headless" in one, option(one, "--data-parallel-start-rank")) == (False, "")
    assert ("--headless" in two, option(two, "--data-parallel-start-rank")) == (True, "2")


def uneven(*gpus: int) -> Inventory:
    nodes = [
        replace(NODES[0], name=f"n{i + 1}", ip=f"10.0.0.{i + 1}", gpus=g, head=i == 0)
        for i, g in enumerate(gpus)
    ]
    return replace(INVENTORY, nodes=tuple(nodes))


def test_uneven_nodes_hold_what_they_can() -> None:
    """The first node's share begins at nothing, the next where it ends."""
    inventory = uneven(4, 2, 8)
    wanted = desired(request("mp", tp=2, pp=None, dp=7, inventory=inventory), inventory)

    assert [(each.node, each.replicas) for each in wanted.processes] == [
        ("n1", (0, 2)),
        ("n3", (2, 4)),
        ("n2", (6, 1)),
    ]


@pytest.mark.parametrize(
    ("gpus", "dp", "local", "strategy"),
    [((8, 8), 4, "2", "strict"), ((8, 4), 3, "2", "fill"), ((4, 4, 4, 4), 2, "", "span")],
)
def test_replicas_in_ray(gpus: tuple[int, ...], dp: int, local: str, strategy: str) -> None:
    """One process on the head; where the replicas belong is in its environment."""
    inventory = uneven(*gpus)
    wanted = desired(request(tp=None, pp=None, dp=dp, inventory=inventory), inventory)
    (process,) = wanted.processes

    assert (option(process.argv, "--data-parallel-size"), process.replicas) == (str(dp), (0, dp))
    assert option(process.argv, "--data-parallel-backend") == "ray"
    assert option(process.argv, "--data-parallel-size-local") == local
    assert process.env["VLLM_RAY_DP_PACK_STRATEGY"] == strategy
    assert process.env["VLLM_RAY_DP_PLACEMENT_NODE_IPS"] == ",".join(
        node.ip for node in inventory.nodes
    )


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_replicas_are_told(backend: str) -> None:
    """Where they will be, and how they answer."""
    notes = planned(seen(), request(backend, tp=None, pp=None, dp=4)).plan.notes

    assert notes[0].startswith("DP 4 × TP 4 × PP 1 (each replica gets 4 of 16 GPUs as TP)")
    assert notes[1].startswith("4 replicas (2 on n1, 2 on n2) answer behind one endpoint")


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_the_same_request_attaches(backend: str) -> None:
    """A server that runs already is watched, whatever it is doing, and nothing is sent."""
    for state in ("waiting", "ready", "pausing"):
        start = planned(seen(kept(request(backend), state)), request(backend), asked=8.0)

        assert (start.attached, start.plan.steps, start.desired.asked) == (True, (), 7.0)


FIGURES = "restarts unlimited and not 7, canary 5 and not 2.5, stuck 300 and not 60"


@pytest.mark.parametrize(
    ("runs", "asked", "said"),
    [
        (Policy(), Policy(start_timeout=60), ""),
        (Policy(restarts=0), Policy(restarts=0), ""),
        (
            Policy(restarts=0),
            Policy(),
            "nobody supervises it: it stays dead when a rank, a node or the engine dies",
        ),
        (Policy(), Policy(restarts=0), "it is supervised"),
        (Policy(), Policy(restarts=7, canary=2.5, stuck=60), f"it was started with {FIGURES}"),
    ],
)
def test_the_same_server_kept_otherwise(runs: Policy, asked: Policy, said: str) -> None:
    """It is watched as it is, and what differs is told; `--replace` starts it anew, which it does
    not when nothing differs.
    """
    there = seen(kept(desired(request(), policy=runs)))
    start = planned(there, request(), policy=asked)
    anew = planned(there, request(), policy=asked, replace_other=True)

    assert start.attached
    assert start.plan.notes == ((f"{said}; `--replace` starts it anew as asked",) if said else ())
    assert anew.attached is not bool(said)
    assert [stage.id for stage in anew.plan.stages] == (["preflight", "server"] if said else [])


def test_a_flag_that_the_running_server_contradicts() -> None:
    """`--no-supervise` is not forgotten silently; it is no contradiction where nobody
    supervises.
    """
    bare = Policy(restarts=0)
    with pytest.raises(
        RequestError, match=r"org/m runs already \(server `default`\), and it is supervised"
    ) as refused:
        planned(seen(kept(request())), request(), policy=bare, insist=True)

    assert "`--replace`" in refused.value.hint
    assert planned(
        seen(kept(desired(request(), policy=bare))), request(), policy=bare, insist=True
    ).attached


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"port": 8001},
        {"args": ("--seed", "1")},
        {"tp": 4, "pp": 4},
        {"backend": "mp"},
    ],
)
def test_another_server_is_not_pushed_aside(change: dict[str, Any]) -> None:
    """Whatever differs makes another server; it is refused under the same name, unless it is to
    take the place.
    """
    there, asked = seen(kept(request())), request(**change)
    with pytest.raises(RequestError, match="server `default` runs org/m") as refused:
        planned(there, asked)
    start = planned(there, asked, replace_other=True)

    assert "`--name`" in refused.value.hint
    assert "`--replace`" in refused.value.hint
    assert [stage.id for stage in start.plan.stages] == ["preflight", "server"]
    assert start.plan.notes[0] == "server `default` (org/m) is stopped to make room"


def test_places_make_another_server() -> None:
    """So does what it is told to keep to, though it would be placed there anyway."""
    digests = {request("mp", **more).digest for more in ({}, {"nodes": ("n1", "n2")}, {"gpus": 8})}

    assert len(digests) == 3


@pytest.mark.parametrize("state", ["failed", "gave-up"])
def test_a_server_that_is_over_makes_room(state: str) -> None:
    """Nobody has to be told to replace what is dead."""
    start = planned(seen(kept(request(model="org/other"), state)), request())

    assert (start.attached, len(start.plan.steps)) == (False, 1)


def test_one_that_is_being_stopped_is_not_attached_to() -> None:
    """Somebody wants it no more; the keeper ends it before it starts the next one."""
    stopping = {**kept(request(), "stopping"), "desired": None}

    assert not planned(seen(stopping), request()).attached


def test_preflight() -> None:
    """What would make vLLM wait or fail later is looked at first."""
    assert gates(planned(seen(), request())) == ["cluster", "agents", "model", "room"]
    assert gates(planned(seen(), request("mp"))) == ["agents", "model", "room"]


@pytest.mark.parametrize(
    ("own", "members", "text", "fix"),
    [
        (
            container("n2", argv=("entry.sh", "ray", "start")),
            {"n2": 1.0},
            "was started by an older vlaunch",
            "`vlaunch up`",
        ),
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


def chat(**more: Any) -> Request:
    return request(**{"name": "chat", "backend": "mp", "tp": 4, "pp": 1, "nodes": ("n1",), **more})


def test_a_second_server_takes_what_the_first_leaves() -> None:
    """GPUs, ports, and the ports where ranks meet."""
    first = desired(request("mp", tp=4, pp=2, gpus=4), BARE)
    second = planned(
        seen(kept(first)), request("mp", name="embed", tp=4, pp=2, gpus=4, port=8001), BARE
    )

    assert [process.gpus for process in first.processes] == [(0, 1, 2, 3)] * 2
    assert [process.gpus for process in second.desired.processes] == [(4, 5, 6, 7)] * 2
    assert [
        option(start.processes[0].argv, "--master-port") for start in (first, second.desired)
    ] == ["29501", "29502"]
    assert judged(second, "room") == []


def test_where_ray_hands_out_gpus_nobody_else_numbers_them() -> None:
    """The keeper learns them from Ray; all GPUs of a node need no numbers."""
    assert [process.gpus for process in desired(chat()).processes] == [None]
    assert [
        found.partial for asked in (chat(), chat(tp=8), request()) if (found := desired(asked).ray)
    ] == [True, False, False]
    assert [process.gpus for process in desired(chat(tp=8), BARE).processes] == [None]
    assert [process.gpus for process in desired(chat(), BARE).processes] == [(0, 1, 2, 3)]


def test_a_port_where_somebody_listens_is_no_meeting_place() -> None:
    """The next one is; it is no part of what makes a server the same."""
    there = seen()
    facts = {
        **there.site.facts,
        "n1": replace(there.site.facts["n1"], listening=frozenset({("0.0.0.0", 29501)})),
    }
    wanted = desired(request("mp"), there=replace(there, site=Site(INVENTORY, facts)))

    assert option(wanted.processes[1].argv, "--master-port") == "29502"
    assert wanted.id == desired(request("mp")).id


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
    there = seen(
        kept(chat()), groups=served.table(served.group("10.0.0.1", 4), served.group("10.0.0.2", 1))
    )
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
        groups=served.table(served.group("10.0.0.1", 8), served.group("10.0.0.2", 8)),
    )
    found = judged(planned(there, request(backend), replace_other=True), "room")

    assert bool(found) is refused
    assert all("`vlaunch stop b`" in each.fix for each in found)


def test_mp_is_refused_while_ray_does_not_say_what_it_holds() -> None:
    """A dashboard that hangs has not said that the GPUs are free; without Ray there is none to
    ask.
    """
    there = seen(error="timed out")
    there = replace(there, said={key: value for key, value in there.said.items() if key != "jobs"})
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


def test_the_api_is_on_the_first_node_of_an_mp_server() -> None:
    """The head need not be among them."""
    wanted = desired(request("mp", tp=8, pp=1, nodes=("n2",)))

    assert (wanted.api_node, wanted.places, [each.node for each in wanted.processes]) == (
        "n2",
        {"n2": 8},
        ["n2"],
    )


def test_the_note_and_the_model_gate_of_mp_name_the_nodes_that_get_ranks() -> None:
    """A node in between that is too small is left out."""
    inventory = uneven(2, 1, 2)
    wanted = planned(
        ClusterSnapshot(site=Site(inventory)),
        request("mp", tp=2, pp=2, inventory=inventory),
        inventory,
    )

    assert any("ranks expected 2 on n1, 2 on n3" in note for note in wanted.plan.notes)
    assert [each.node for each in wanted.desired.processes] == ["n1", "n3"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "said"),
    [(("n3",), None, "no node `n3`"), (("n1",), 9, "n1 has 8 GPUs, not 9")],
)
def test_places_that_are_not_there(nodes: tuple[str, ...], gpus: int | None, said: str) -> None:
    """Refused with what there is."""
    with pytest.raises(PlacementError, match=said) as refused:
        narrow(INVENTORY, nodes, gpus)

    assert "`--" in refused.value.hint


def test_narrowing_keeps_the_head_where_it_is_among_them() -> None:
    """Else the first node stands in for it: ranks meet there."""
    assert [node.name for node in narrow(INVENTORY, ("n2", "n1")).nodes if node.head] == ["n1"]
    assert narrow(INVENTORY, ("n2",)).head.name == "n2"
    assert narrow(INVENTORY, gpus=2).gpus == 4
    assert choose(narrow(INVENTORY, ("n2",)), None, None, backend="mp").nodes == (("n2", 8),)


def test_the_model_is_asked_for_in_the_running_containers() -> None:
    """They have the mounts; where none runs, nobody is asked."""
    there = seen()
    stopped = {**there.site.facts, "n2": HostFacts(images=there.site.facts["n2"].images)}

    assert [each.argv[:3] for each in ask_model(Site(INVENTORY, stopped), "/m")] == [
        ("docker", "exec", "vlaunch-c-n1")
    ]


def test_helper_files_of_running_containers_are_brought_up_to_date() -> None:
    """A newer vlaunch asks questions that an older helper program does not understand."""
    assert len(plan_files(seen().site).steps) == 2
    assert plan_files(Site(INVENTORY)).steps == ()
