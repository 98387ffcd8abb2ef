"""Plan of `up`: only necessary steps, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.up_plan import plan_image, plan_up
from launcher.core.domain import Answer, Inventory, Secret
from launcher.core.errors import GateError
from launcher.core.plan import Plan
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site
from tests import plan_case as case
from tests.fakes import FakeTransport
from tests.simulated import World, image_json

Load = Callable[..., Inventory]
SECRETS = {"RAY_AUTH_TOKEN": Secret("tok"), "VLLM_API_KEY": Secret("key")}
KEY = "secrets: {VLLM_API_KEY: {env: X}}\n"


def three(load: Load, extra: str = "", *own: str) -> Inventory:
    """Load an inventory of three nodes with their own keys."""
    nodes = (
        f"{{host: n{n}, ip: 10.0.0.{n}, gpus: 8, {fields}}}"
        for n, fields in enumerate((*own, "", "", "")[:3], start=1)
    )
    return load(KEY + extra, f"nodes: [{', '.join(nodes)}]")


def plan(inventory: Inventory, world: World, secrets: Mapping[str, Secret] = SECRETS) -> Plan:
    facts = probe_nodes(inventory, FakeTransport(world.answer), [inventory.image])
    return plan_up(Site(inventory, facts), secrets, case.ray_image(inventory))


def started(up: Plan) -> list[str]:
    """Return the nodes that get a new container, in order."""
    return [step.command.node for step in up.steps if "--detach" in step.command.argv]


def removed(up: Plan) -> list[str]:
    return [step.command.node for step in up.steps if "rm" in step.command.argv]


@pytest.fixture
def world(load: Load) -> World:
    """Three running nodes."""
    world = World(three(load))
    case.bring_up(world.inventory, world, SECRETS)
    world.changes.clear()
    return world


def test_a_first_up_writes_files_then_starts_the_head_then_the_workers(load: Load) -> None:
    """The head listens before a worker connects, and all nodes must join."""
    world = World(three(load))
    up = plan(world.inventory, world)

    assert stage_ids(up) == [
        "same-image",
        "gpus",
        "files",
        "head",
        "workers",
        "ray",
        "agents",
    ]
    assert started(up) == ["n1", "n2", "n3"]
    assert removed(up) == []
    gates = {stage.id: [gate.id for gate in stage.gates] for stage in up.stages}
    assert (gates["head"], gates["ray"], gates["agents"]) == (["head"], ["ray-nodes"], ["agents"])


def test_a_cluster_without_ray_is_its_agents(load: Load) -> None:
    """The inventory's own image is enough; all agents connect to the head's."""
    world = World(three(load, "ray: none"))
    up = plan(world.inventory, world)
    case.bring_up(world.inventory, world, SECRETS)

    assert stage_ids(up) == [
        "same-image",
        "gpus",
        "files",
        "head",
        "workers",
        "agents",
    ]
    assert not any("ray" in step.command.argv for step in up.steps)
    assert plan(world.inventory, world).steps == ()


def test_a_second_up_has_no_steps_and_no_notes(load: Load, world: World) -> None:
    """Only queries are left."""
    up = plan(world.inventory, world)

    assert (up.steps, up.notes) == ((), ())
    case.bring_up(world.inventory, world, SECRETS)
    assert world.changes == []


def test_an_agent_of_another_version_keeps_running(load: Load, world: World) -> None:
    """A restart of its container would stop its servers: `up` only replaces its files, and notes
    it.
    """
    for node in ("n2", "n3"):
        machine = world.machines[node]
        path = next(path for path in machine.files if path.endswith("payload/agent.pyz"))
        machine.files[path] = b"of another version"
    other = next(path for path in world.machines["n1"].files if path.endswith("payload/batch.pyz"))
    world.machines["n1"].files[other] = b"of another version"
    up = plan(world.inventory, world)

    (note,) = up.notes
    assert note == (
        "n[2-3]: the agent runs another version of vlaunch; to replace it, run `vlaunch down`, then"
        " `vlaunch up`: this stops all servers"
    )
    assert (started(up), removed(up)) == ([], [])
    case.bring_up(world.inventory, world, SECRETS)
    assert plan(world.inventory, world).notes == ()


def test_a_second_up_still_verifies_the_cluster(load: Load, world: World) -> None:
    """Running containers prove nothing."""
    world.machines["n3"].joins = False
    with pytest.raises(GateError, match="n3: has not joined Ray"):
        case.bring_up(world.inventory, world, SECRETS)


def test_a_disconnected_agent_fails_up(load: Load, world: World) -> None:
    """With the port that it needs: without it no server starts."""
    world.responses["servers"] = {"servers": [], "members": {"n1": 0.0, "n2": 300.0}, "agent": 1.0}
    with pytest.raises(GateError) as caught:
        case.bring_up(world.inventory, world, SECRETS)

    text = f"{caught.value.message}\n{caught.value.evidence}"
    assert "n2: its agent is not connected to the head" in text
    assert "n3: its agent is not connected to the head" in text
    assert "n1: " not in text
    assert f"allow TCP {world.inventory.ports.group} from n2 to n1" in caught.value.hint


def test_earlier_restarts_of_a_container_do_not_count(load: Load, world: World) -> None:
    """It had no head to join, and has one now."""
    world.machines["n2"].joins = False
    world.container("n2")["RestartCount"] = 9
    (gate,) = next(
        stage.gates for stage in plan(world.inventory, world).stages if stage.id == "ray"
    )
    answers = {
        node: [
            command
            for command in FakeTransport(world.answer).run(gate.queries)
            if command.node == node
        ]
        for node in ("n1", "n2", "n3")
    }

    assert {command.status for command in gate.judge(answers) if command.node == "n2"} == {"wait"}


def test_a_changed_worker_restarts_alone(load: Load, world: World) -> None:
    """A note describes the difference."""
    changed = three(load, "", "", "env: {A: '1'}")
    up = plan(changed, world)

    assert started(up) == removed(up) == ["n2"]
    assert "n2: env A: unset → 1" in up.notes
    case.bring_up(changed, world, SECRETS)
    assert plan(changed, world).steps == ()


def stage_ids(up: Plan) -> list[str]:
    """Return the stages without empty ones, in order."""
    return [stage.id for stage in up.stages]


FRONT = "front: {node: n1}\n"


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ('{"requests": 0}', "pass", "no request is in progress"),
        ('{"requests": 3}', "warn", "requests that are still running, and will fail: 3"),
        ("405: Method Not Allowed", "warn", "may fail: n1: its agent runs another version"),
    ],
)
def test_requests_end_before_their_server_is_replaced(
    answer: str, status: str, text: str, load: Load, world: World
) -> None:
    """Only of the servers on replaced nodes; nothing stops `up`."""
    up = plan(three(load, FRONT, "", "env: {A: '1'}"), world)
    ids = stage_ids(up)

    assert ids[ids.index("drain") + 1] == "workers"
    (gate,) = up.stages[ids.index("drain")].gates
    (query,) = gate.queries
    assert query.node == "n1"
    assert query.argv[-1] == "http://agent/drain?nodes=n2"
    (finding,) = gate.judge({"n1": [Answer(node="n1", code=0, out=answer, err="")]})
    assert (finding.status, text in finding.text) == (status, True), finding


def test_nothing_is_drained_without_a_front_or_an_agent(load: Load, world: World) -> None:
    """Nor when no container is replaced."""
    assert "drain" not in stage_ids(plan(three(load, FRONT), world))
    assert "drain" not in stage_ids(plan(three(load, "", "env: {A: '1'}"), world))
    world.stop("n1")
    assert "drain" not in stage_ids(plan(three(load, FRONT), world))


def test_a_changed_head_restarts_all(load: Load, world: World) -> None:
    """The workers' session ends with the head's, and a note gives the reason."""
    up = plan(three(load, "", "env: {A: '1'}"), world)

    assert started(up) == ["n1", "n2", "n3"]
    assert {"n1: env A: unset → 1", "n[2-3]: the head is recreated"} <= set(up.notes)


@pytest.mark.parametrize(
    ("extra", "remark"),
    [
        ("env: {A: '1'}", "env A: unset → 1"),
        ("shm: 16GiB", "devices, capabilities, mounts, limits or logging"),
        ("ray: {object_store: 200MB}", "command: (nothing) → --object-store-memory 200000000"),
        ("hf_home: /models", "env HF_HOME: /data/huggingface → /models"),
        ("ports: {gcs: 7000}", "6379"),
        ("image: x:2", "image vllm/vllm-openai:v0.32.0 → x:2"),
    ],
)
def test_changes_are_described(extra: str, remark: str, load: Load, world: World) -> None:
    """Once for all nodes."""
    if extra.startswith("image"):
        changed = replace(three(load), image="x:2")
        for machine in world.machines.values():
            machine.images["x:2"] = image_json("x:2")
    else:
        changed = three(load, extra)
    up = plan(changed, world)

    assert started(up) == ["n1", "n2", "n3"]
    assert any(note.startswith("n[1-3]: ") and remark in note for note in up.notes), up.notes


def test_an_exited_container_is_replaced_alone(load: Load, world: World) -> None:
    """With its state as the reason."""
    world.stop("n2", code=137)
    up = plan(world.inventory, world)

    assert started(up) == removed(up) == ["n2"]
    assert "n2: its container is exited (exit code 137)" in up.notes


def test_an_exited_head_restarts_all(load: Load, world: World) -> None:
    """A new head does not know the old workers."""
    world.stop("n1")

    assert started(plan(world.inventory, world)) == ["n1", "n2", "n3"]


def test_a_missing_container_is_started_without_a_removal(load: Load, world: World) -> None:
    """`docker rm` of a missing one would fail."""
    world.machines["n3"].containers.clear()
    up = plan(world.inventory, world)

    assert (started(up), removed(up)) == (["n3"], [])


def test_a_changed_secret_restarts_the_containers_with_the_old_value(
    load: Load, world: World
) -> None:
    """The new one is written first; neither notes nor argv contain it."""
    up = plan(world.inventory, world, {**SECRETS, "VLLM_API_KEY": Secret("other-key")})

    assert started(up) == ["n1", "n2", "n3"]
    assert "n[1-3]: the value of a secret changed" in up.notes
    assert "other-key" not in repr(up)
    assert "writing secret VLLM_API_KEY" in [step.title for step in up.steps]


def test_an_added_node_starts_alone(load: Load) -> None:
    """The others continue."""
    two = load(KEY, "nodes: [{host: n1, ip: 10.0.0.1, gpus: 8}, {host: n2, ip: 10.0.0.2, gpus: 8}]")
    grown = three(load)
    world = World(grown)
    world.inventory = two
    case.bring_up(two, world, SECRETS)

    assert started(plan(grown, world)) == ["n3"]


def test_files_that_differ_are_written_without_a_restart(load: Load, world: World) -> None:
    """A newer vlaunch has newer node programs; the cluster continues."""
    world.machines["n2"].files["payload/batch.pyz"] = b"old"
    up = plan(world.inventory, world)

    assert [(step.command.node, step.command.argv[3]) for step in up.steps] == [("n2", "unpack")]


def test_the_end_of_servers_and_jobs_is_noted(load: Load, world: World) -> None:
    """A batch job stops with its container; a server starts again."""
    world.stop("n2")
    remark = "servers in these containers restart in the new ones; batch jobs stop"

    assert any(remark in note for note in plan(world.inventory, world).notes)
    world.machines["n2"].containers.clear()
    assert not any(remark in note for note in plan(world.inventory, world).notes)


def test_an_image_that_differs_between_nodes_stops_before_anything_is_written(load: Load) -> None:
    """The node with the other image is named."""
    world = World(three(load))
    world.machines["n2"].images[world.inventory.image] = image_json("another")
    with pytest.raises(
        GateError, match=r"n2: vllm/vllm-openai:v0.32.0 differs from the image on n\[1,3\]"
    ):
        case.bring_up(world.inventory, world, SECRETS)

    assert world.changes == []


def test_only_nodes_without_the_image_pull_it(load: Load) -> None:
    """After the preflight."""
    world = World(three(load))
    world.machines["n2"].images.clear()
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    up = plan_image(Site(world.inventory, facts))

    assert [(step.command.node, step.command.argv) for step in up.steps] == [
        ("n2", ("docker", "pull", "--quiet", world.inventory.image))
    ]
    assert stage_ids(up) == ["preflight", "image"]


def test_a_failing_preflight_changes_nothing(load: Load) -> None:
    """Not even the image is pulled."""
    world = World(three(load), image=False)
    world.machines["n2"].gpus = 7
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    with pytest.raises(GateError, match="n2: 7 GPUs visible, 8 declared"):
        case.drain(plan_image(Site(world.inventory, facts)), FakeTransport(world.answer))

    assert world.changes == []


@pytest.mark.parametrize(
    ("serve", "remark"),
    [
        ("", "no model is set, so its size is unknown"),
        ("serve: {model: org/model}", "the model's size is unknown"),
    ],
)
def test_the_preflight_checks_the_inventorys_model(load: Load, serve: str, remark: str) -> None:
    """Its size is unknown without a query of its files."""
    world = World(three(load, serve))
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    preflight = plan_image(Site(world.inventory, facts)).stages[0]
    disk = next(gate for gate in preflight.gates if gate.id == "disk")

    assert {finding.text.partition("; ")[2] for finding in disk.judge({})} == {remark}


def test_a_derived_image_is_built_only_where_it_is_missing(load: Load, tmp_path: Path) -> None:
    """Its versions are checked on the same nodes."""
    world = World(three(load))
    context = tmp_path / "context.tar"
    case.bring_up(world.inventory, world, SECRETS, context)
    world.machines["n2"].images = {world.inventory.image: image_json(world.inventory.image)}
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    up = plan_up(Site(world.inventory, facts), SECRETS, case.ray_image(world.inventory, context))

    assert [(step.command.node, step.command.argv[1]) for step in up.steps] == [("n2", "build")]
    build = next(
        gate for stage in up.stages for gate in stage.gates if gate.id == "ray-version"
    ).queries
    assert [command.node for command in build] == ["n2"]


def test_a_container_of_a_killed_run_that_was_only_created_is_replaced(
    load: Load, world: World
) -> None:
    """`docker run` may be killed between create and start."""
    world.container("n2")["State"]["Status"] = "created"

    assert started(plan(world.inventory, world)) == removed(plan(world.inventory, world)) == ["n2"]
