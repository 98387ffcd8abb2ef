"""What `status` says, from what was observed and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Inventory, Secret
from launcher.placement import choose
from launcher.plan import ranks, running, status, verdict
from launcher.plan.observe import observe
from launcher.plan.serve import Request, Seen
from launcher.plan.status import ClusterStatus
from launcher.tools import docker
from launcher.tools.docker import parse_image
from launcher.transport import Command
from tests.fakes import FakeTransport
from tests.plan import case
from tests.simulated import World

Load = Callable[..., Inventory]
SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}
OPEN = "ray: {token_auth: false}"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "ray"


@pytest.fixture
def world(load: Load) -> World:
    """A cluster of two that is up, without a server."""
    made = World(load())
    case.bring_up(made.inventory, made, SECRETS)
    return made


def look(world: World, *missing: str, inventory: Inventory | None = None) -> ClusterStatus:
    """Observe as the command does."""
    inventory = inventory or world.inventory
    transport = FakeTransport(world.answer)
    facts = {name: each for name, each in observe(inventory, transport, [inventory.image]).items() if name not in missing}
    said = status.Said()
    if asked := status.ask_ray(inventory, facts):
        answer, kept = transport.run(asked)
        said = status.Said(ray=status.hear(answer), network=verdict.parse_record(kept))
    for server in running.find(inventory, facts, said.ray)[:1]:
        about, completion = transport.run(status.ask_server(inventory, server))
        said = dataclasses.replace(said, server=status.hear(about), completion=status.hear(completion))
    return status.read(inventory, facts, said, {name: f"{name}: no route" for name in missing})


def job(state: str, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"submission_id": "serve-1", "status": state, "metadata": {"vlaunch.model": model}, **more}


def jobs(world: World, *listed: dict[str, Any], **server: Any) -> None:
    world.said["jobs"] = {
        "jobs": list(listed),
        "nodes": world.ray_table(),
        "actors": {"data": {"result": {"result": []}}},
    }
    world.said["server"] = {"health": 0, **server}


def test_a_cluster_that_is_up_is_whole(world: World) -> None:
    """Every node in Ray with its GPUs; no server yet."""
    seen = look(world)

    assert seen.whole
    assert [(each.node, each.role, each.container, each.ray, each.gpus, each.drift) for each in seen.nodes] == [
        ("gpu01", "head", "running", "alive", "8/8", ()),
        ("gpu02", "worker", "running", "alive", "8/8", ()),
    ]
    assert (seen.server.state, seen.endpoint) == ("none", "http://10.0.0.11:8000/v1")


def test_a_node_that_ray_has_not_missed_yet_is_dead(world: World) -> None:
    """Its raylet's port is closed, whatever Ray's table says for some seconds more; the head is asked to knock."""
    jobs(world)
    asked = status.ask_ray(world.inventory, observe(world.inventory, FakeTransport(world.answer), [world.inventory.image]))
    address = f"10.0.0.12:{world.inventory.ports.node_manager}"
    world.said["jobs"]["unreachable"] = [address]
    seen = look(world)

    assert address in asked[0].argv
    assert [each.ray for each in seen.nodes] == ["alive", "dead"]
    assert not seen.whole


def test_the_endpoint_is_where_the_server_listens(world: World) -> None:
    """Its own address and port, not the inventory's."""
    labels = {"vlaunch.model": "m", "vlaunch.host": "10.0.0.99", "vlaunch.port": "9000"}
    jobs(world, {"submission_id": "serve-1", "status": "RUNNING", "metadata": labels})
    inventory = dataclasses.replace(world.inventory, serve=dataclasses.replace(world.inventory.serve, bind="127.0.0.1"))

    assert look(world).endpoint == "http://10.0.0.99:9000/v1"
    jobs(world)
    assert look(world, inventory=inventory).endpoint == "http://127.0.0.1:8000/v1"


def test_nothing_there_is_absent_and_not_whole(load: Load) -> None:
    """And nobody is asked about a server."""
    world = World(load())
    seen = look(world)

    assert not seen.whole
    assert [(each.container, each.ray, each.gpus) for each in seen.nodes] == [("absent", "absent", "-/8")] * 2
    assert seen.server.state == "none"
    assert status.ask_ray(world.inventory, observe(world.inventory, FakeTransport(world.answer), [])) == []


def test_a_worker_that_is_not_in_ray_is_seen(world: World) -> None:
    """Though its container runs."""
    world.machines["gpu02"].joins = False
    seen = look(world)

    assert (seen.nodes[1].container, seen.nodes[1].ray, seen.nodes[1].gpus, seen.whole) == ("running", "absent", "-/8", False)


def test_a_container_that_has_ended_is_seen(world: World) -> None:
    """With Docker's word."""
    world.stop("gpu02")
    seen = look(world)

    assert (seen.nodes[1].container, seen.whole) == ("exited", False)


def test_a_node_that_cannot_be_reached_is_unknown_and_says_why(world: World) -> None:
    """Its container is not called absent."""
    seen = look(world, "gpu02")

    assert (seen.nodes[1].container, seen.nodes[1].trouble, seen.whole) == ("unknown", "gpu02: no route", False)
    assert seen.nodes[0].ray == "alive"


def test_without_the_head_the_server_is_unknown(world: World) -> None:
    """Not `none`."""
    seen = look(world, "gpu01")

    assert (seen.server.state, seen.nodes[1].container) == ("unknown", "running")


def test_a_docker_that_does_not_answer_is_trouble(world: World) -> None:
    """And the node is not whole."""
    world.machines["gpu02"].docker_error = "permission denied"
    world.machines["gpu02"].containers.clear()
    seen = look(world)

    assert (seen.nodes[1].trouble, seen.whole) == ("permission denied", False)


FAULT = {
    "at": 1000.5, "what": "a rank is dead", "node": "10.0.0.12", "rank": "PP1", "evidence": "10.0.0.12: killed\n\nmore",
    "in_flight": 4, "ready_again_after": 71.2, "phases": {"stopped": 0.4, "whole": 2, "started": "soon", "x": 1},
}  # fmt: skip


def supervised(world: World, state: str, *listed: dict[str, Any], **more: Any) -> None:
    """Make the head say that a server is supervised."""
    jobs(world, *listed)
    said = {"id": "d1", "state": state, "model": "m", "restarts_left": 2, "faults": [FAULT], "wanted": True, "age": 1, **more}
    world.said["jobs"]["supervised"] = said


def of_job(state: str = "RUNNING") -> dict[str, Any]:
    return {"submission_id": "serve-d1-1", "status": state, "metadata": {"vlaunch.model": "m", "vlaunch.args": "d1"}}


def test_the_last_fault_is_told(world: World) -> None:
    """An answer is an answer; what happened before stands beside it, with nodes' names in the place of addresses."""
    supervised(world, "ready", of_job())
    world.said["complete"] = {"status": 200, "model": "m", "seconds": 0.1}
    seen = look(world)
    kept = seen.server.supervision
    assert kept is not None
    assert kept.fault is not None

    assert (seen.server.state, seen.whole, kept.restarts_left) == ("answering", True, 2)
    assert (kept.fault.node, kept.fault.rank, kept.fault.lost) == ("gpu02", "PP1", 4)
    assert (kept.fault.evidence, kept.fault.ready_again_after) == (("gpu02: killed", "more"), 71.2)
    assert kept.fault.phases == {"stopped": 0.4, "whole": 2.0}


@pytest.mark.parametrize("listed", [[of_job()], []], ids=["its job runs", "before Ray has its job"])
def test_a_server_that_recovers_is_red(world: World, listed: list[dict[str, Any]]) -> None:
    """And what is waited for is said."""
    more = {"doing": "waiting for 10.0.0.12 to be in Ray again", "metadata": of_job()["metadata"], "backend": "ray"}
    supervised(world, "recovering", *listed, **more)
    seen = look(world)

    assert (seen.server.state, seen.server.detail) == ("recovering", "waiting for gpu02 to be in Ray again")
    assert not seen.whole


def test_a_server_whose_supervisor_has_just_died_is_there(world: World) -> None:
    """The watcher brings it back within seconds: whoever stops it now must not be told that there is nothing to stop."""
    supervised(world, "ready", of_job("FAILED"), metadata=of_job()["metadata"], backend="ray")

    assert look(world).server.state == "silent"


def test_a_server_that_was_given_up_is_red(world: World) -> None:
    """With the reason, not only Ray's exit code."""
    supervised(world, "gave-up", of_job("FAILED"), doing="no restart is left of 3 in 1 h", restarts_left=0)
    seen = look(world)

    assert (seen.server.state, seen.server.detail, seen.whole) == ("gave-up", "no restart is left of 3 in 1 h", False)


def test_a_server_that_has_answered_and_does_not_is_red(world: World) -> None:
    """It is not `starting`, though its supervisor has not noticed yet, or only doubts it."""
    supervised(world, "ready", of_job())
    seen = look(world)
    supervised(world, "ready", of_job(), doing="no completion came back for 9s")

    assert (seen.server.state, seen.whole) == ("silent", False)
    assert look(world).server.detail.endswith("its supervisor: no completion came back for 9s")


def test_the_record_of_another_server_is_not_its_own(world: World) -> None:
    """Somebody has just started another one."""
    supervised(world, "recovering", of_job(), id="d2")

    assert look(world).server.state == "starting"


@pytest.mark.parametrize(
    "said",
    [
        [], "x", {"id": 1, "state": "ready"}, {"id": "d1"}, {"id": "d1", "state": []},
        {"id": "d1", "state": "ready", "faults": 3, "age": "old", "restarts_left": None},
        {"id": "d1", "state": "ready", "faults": [None, {"at": "x", "in_flight": "y", "evidence": 3}]},
    ],
)  # fmt: skip
def test_a_record_may_be_anything(world: World, said: Any) -> None:
    """Nodes answer what they like."""
    jobs(world, of_job())
    world.said["jobs"]["supervised"] = said

    assert look(world).server.state in ("starting", "silent")


@pytest.mark.parametrize("at", [-1, 253402300800, 1e300])
def test_a_fault_at_no_date_can_be_shown(world: World, at: float) -> None:
    """A number that is no moment would end the command, where it is turned into one."""
    supervised(world, "ready", of_job(), faults=[{**FAULT, "at": at}])
    kept = look(world).server.supervision

    assert kept is not None and kept.fault is not None
    assert datetime.fromtimestamp(kept.fault.at, timezone.utc).year == 1970


def test_drift_is_said_in_words(world: World, load: Load) -> None:
    """The inventory has another environment than the container."""
    changed = load("env: {A: '1'}")
    seen = look(world, inventory=changed)

    assert seen.nodes[0].drift == ("env A: unset → 1",)
    assert not seen.whole


@pytest.mark.parametrize(("more", "token"), [("", SECRETS), (OPEN, {})], ids=["token", "no token"])
def test_values_of_secrets_are_not_needed_to_see_that_nothing_drifted(load: Load, more: str, token: dict[str, Secret]) -> None:
    """`status` fetches none: the fingerprint on the container stands in for them, or follows from their names."""
    inventory = load(f"{more}\nsecrets: {{HF_TOKEN: {{env: HF_TOKEN}}}}")
    world = World(inventory)
    case.bring_up(inventory, world, {**token, "HF_TOKEN": Secret("hf")})

    assert [each.drift for each in look(world).nodes] == [(), ()]


def serve_ranks(world: World, secrets: dict[str, Secret], *, together: bool = True, **split: int) -> None:
    """Start the rank containers of a server, as `serve --backend mp` does."""
    inventory, transport = world.inventory, FakeTransport(world.answer)
    placement = choose(inventory, 8, None, backend="mp", **split)
    request = Request(model="org/m", placement=placement, backend="mp", host="0.0.0.0", port=8001, args=("--seed", "1"))
    seen = Seen(facts=observe(inventory, transport, [inventory.image]))
    made = ranks.specs(inventory, seen, request, secrets, together=together)
    commands = [Command(node=name, argv=docker.run(("docker",), spec)) for name, spec in made.items()]
    assert all(answer.ok for answer in transport.run(commands))


@pytest.mark.parametrize("together", [True, False], ids=["supervised", "not supervised"])
@pytest.mark.parametrize("split", [{}, {"dp": 2}], ids=["one model", "replicas"])
@pytest.mark.parametrize(
    ("more", "secrets"),
    [
        ("", SECRETS),
        ("env: {A: '1'}\nmounts: ['/models:/models:ro']\nsecrets: {HF_TOKEN: {env: X}}", {**SECRETS, "HF_TOKEN": Secret("hf")}),
        (f"{OPEN}\nsecrets: {{KEY: {{env: X}}}}", {"KEY": Secret("k")}),
    ],
)
def test_ranks_that_run_as_they_were_started_have_not_drifted(
    load: Load, more: str, secrets: dict[str, Secret], split: dict[str, int], together: bool
) -> None:
    """What was asked for with `serve`, and what the image brings, is no difference."""
    world = World(load(more))
    for machine in world.machines.values():
        machine.images[world.inventory.image]["Config"]["Labels"] = {"maintainer": "x", "vlaunch.base": "y"}
    serve_ranks(world, secrets, together=together, **split)
    seen = look(world)

    assert [(each.container, each.ray, each.drift) for each in seen.nodes] == [("running", "-", ())] * 2
    assert seen.whole


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "env: {A: '1'}", "env A: unset → 1"),
        ("env: {A: '1'}", "env: {A: '2'}", "env A: 1 → 2"),
        ("env: {A: '1'}", "", "env A: 1 → unset"),
        ("", "mounts: ['/models:/models:ro']", "devices, mounts or limits of its container"),
        ("", "secrets: {HF_TOKEN: {env: X}}", "env HF_TOKEN_PATH: unset → /run/vlaunch/secrets/HF_TOKEN"),
        (f"{OPEN}\nsecrets: {{A: {{env: X}}}}", f"{OPEN}\nsecrets: {{B: {{env: X}}}}", "a secret has another value"),
    ],
)
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_containers_of_both_backends_drift_in_the_same_words(
    load: Load, backend: str, before: str, after: str, said: str
) -> None:
    """Though the inventory was changed after `serve`, not after `up`."""
    world = World(load(before))
    token = SECRETS if world.inventory.ray.token_auth else {}
    secrets = {**token, **dict.fromkeys(world.inventory.secrets, Secret("x"))}
    serve_ranks(world, secrets) if backend == "mp" else case.bring_up(world.inventory, world, secrets)
    seen = look(world, inventory=load(after))

    assert [each.drift for each in seen.nodes] == [(said,)] * 2
    assert not seen.whole


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_another_image_is_said_without_the_variables_of_the_old_one(load: Load, backend: str) -> None:
    """Nobody looks at an image that is not in the inventory any more: what it brings was not taken away by anybody."""
    world = World(load("env: {A: '1'}"))
    serve_ranks(world, SECRETS) if backend == "mp" else case.bring_up(world.inventory, world, SECRETS)
    changed = dataclasses.replace(load("env: {A: '2'}"), image="other:1")

    assert look(world, inventory=changed).nodes[0].drift == ("image vllm/vllm-openai:v0.32.0 → other:1", "env A: 1 → 2")


def test_a_rank_beside_ray_is_named_where_it_differs(world: World, load: Load) -> None:
    """`up` brings Ray's container up to date, and leaves the server as it is."""
    serve_ranks(world, SECRETS)
    changed = load("env: {A: '1'}")

    assert look(world, inventory=changed).nodes[1].drift == ("env A: unset → 1", "rank: env A: unset → 1")
    case.bring_up(changed, world, SECRETS)
    assert look(world, inventory=changed).nodes[1].drift == ("rank: env A: unset → 1",)


def test_a_derived_image_is_no_drift(load: Load, tmp_path: Path) -> None:
    """It is known by its base's identity; one of another base is."""
    world = World(load())
    context = tmp_path / "context.tar"
    base = world.machines["gpu01"].images[world.inventory.image]
    case.bring_up(world.inventory, world, SECRETS, context)
    made = next(name for name in world.machines["gpu01"].images if name.startswith("vlaunch/"))
    image = parse_image(json.dumps([base]))
    assert image is not None
    for machine in world.machines.values():
        machine.images[made]["Config"]["Labels"]["vlaunch.base"] = image.identity

    assert [each.drift for each in look(world).nodes] == [(), ()]
    for machine in world.machines.values():
        machine.images[made]["Config"]["Labels"]["vlaunch.base"] = "another"
    assert [each.drift for each in look(world).nodes] == [
        (f"{made} was not made from the present {world.inventory.image}",)
    ] * 2


def test_answering_needs_a_completion(world: World) -> None:
    """With what it said about itself."""
    jobs(world, job("RUNNING"), health=200, capacity={"kv_cache_size_tokens": "12345", "kv_cache_max_concurrency": "3.5"})
    world.said["complete"] = {"status": 200, "model": "m", "system_fingerprint": "vllm-0.32.0-pp2-x", "seconds": 0.25}
    server = look(world).server

    assert (server.state, server.backend, server.model, server.seconds) == ("answering", "ray", "m", 0.25)
    assert (server.fingerprint, server.kv_tokens, server.concurrency) == ("vllm-0.32.0-pp2-x", 12345, 3.5)


def test_healthy_without_a_completion_is_silent(world: World) -> None:
    """`/health` stays 200 for a minute after a node was cut off."""
    jobs(world, job("RUNNING"), health=200)
    world.said["complete"] = {"status": 500, "error": "EngineDeadError"}
    server = look(world).server

    assert (server.state, server.detail) == ("silent", "/health says 200, no completion: EngineDeadError")


def test_a_replica_that_gives_no_answer_is_silence(world: World) -> None:
    """Another one's answer proves nothing for it: a part of the requests hangs."""
    jobs(world, job("RUNNING"), health=200)
    replicas = [{"status": 200, "seconds": 0.1, "error": "", "answered": True}] * 2
    world.said["complete"] = {"status": 200, "model": "m", "replicas": replicas}
    assert look(world).server.state == "answering"

    replicas[1] = {"status": 0, "seconds": 20.0, "error": "timed out", "answered": False}
    seen = look(world)

    assert (seen.server.state, seen.whole) == ("silent", False)
    assert seen.server.detail == "replica 1 of 2 gave no completion: timed out"


@pytest.mark.parametrize(
    ("listed", "state", "detail"),
    [
        ([job("RUNNING")], "starting", ""),
        ([job("PENDING")], "starting", ""),
        ([job("FAILED", message="exit code 1", end_time=5)], "failed", "exit code 1"),
        ([job("FAILED", message="old", end_time=5), job("STOPPED", end_time=9)], "none", ""),
        ([job("STOPPED", end_time=5), job("FAILED", message="new", end_time=9)], "failed", "new"),
        ([job("FAILED", message="old", end_time=5), job("RUNNING")], "starting", ""),
        ([{"submission_id": "other", "status": "RUNNING", "metadata": None}], "none", ""),
        ([], "none", ""),
    ],
)
def test_the_job_tells_how_the_server_stands(listed: list[dict[str, Any]], state: str, detail: str, world: World) -> None:
    """The newest counts; jobs of others do not."""
    jobs(world, *listed)
    server = look(world).server

    assert (server.state, server.detail) == (state, detail)


def test_ranks_are_shown_on_their_nodes(world: World) -> None:
    """From the names of the actors."""
    jobs(world, job("RUNNING"))
    world.said["jobs"]["actors"] = {
        "data": {"result": {"result": [{"name": "vllm_Worker_1_PP1", "state": "ALIVE", "node_id": "gpu02"}]}}
    }

    assert [each.ranks for each in look(world).nodes] == [(), ("PP1",)]


def test_recorded_answers_of_an_idle_cluster_are_read(load: Load) -> None:
    """What the payload printed on a cluster of two."""
    nodes = "nodes: [{host: node1, ip: 10.77.0.11, gpus: 1}, {host: node2, ip: 10.77.0.12, gpus: 1}]"
    world = World(load("accelerator: cpu", nodes))
    case.bring_up(world.inventory, world, SECRETS)
    world.said["jobs"] = json.loads((FIXTURES / "head-jobs.json").read_text())
    seen = look(world)

    assert [(each.ray, each.gpus) for each in seen.nodes] == [("alive", "1/1"), ("alive", "1/1")]
    assert seen.server.state == "none"


@pytest.mark.parametrize("said", ["", "Traceback", "[]", '{"error": "Connection refused"}'])
def test_a_head_that_gives_no_answer_leaves_the_server_unknown(said: str, world: World) -> None:
    """And nothing is made up about the nodes in Ray."""
    facts = observe(world.inventory, FakeTransport(world.answer), [world.inventory.image])
    heard = status.hear(Answer(node="gpu01", code=1, out=said))
    seen = status.read(world.inventory, facts, status.Said(ray=heard), {})

    assert seen.server.state == "unknown"
    assert [each.ray for each in seen.nodes] == ["absent", "absent"]
    assert not seen.whole


def test_a_table_of_another_shape_is_unreadable(world: World) -> None:
    """A node table that cannot be read is a failure, not a cluster without nodes."""
    jobs(world)
    world.said["jobs"]["nodes"] = {"data": None}
    with pytest.raises(UnreadableAnswer, match="Ray's list of nodes"):
        look(world)


def test_a_rank_container_is_the_server_of_the_mp_backend(world: World) -> None:
    """Its model is on its label; without it running the server has failed."""
    name = "vlaunch-c-gpu01-rank"
    rank = json.loads(json.dumps(world.container("gpu01")))
    rank["Config"]["Labels"] = {"vlaunch.role": "rank", "vlaunch.model": "mp-model"}
    world.machines["gpu01"].containers[name] = {**rank, "Name": f"/{name}", "Id": "rank1"}
    world.said["server"] = {"health": 0}
    starting = look(world).server
    world.machines["gpu01"].containers[name]["State"] = {"Status": "exited", "ExitCode": 1}
    failed = look(world).server

    assert (starting.state, starting.backend, starting.model) == ("starting", "mp", "mp-model")
    assert (failed.state, failed.detail) == ("failed", "rank 0 ended with exit code 1")
    assert "mp rank (exited)" in look(world).nodes[0].ranks


def test_whole_says_every_part(world: World) -> None:
    """One thing wrong with one node is enough."""
    seen = look(world)
    spoiled: list[dict[str, Any]] = [
        {"container": "exited"},
        {"ray": "dead"},
        {"ray": "absent"},
        {"drift": ("x",)},
        {"trouble": "x"},
    ]

    assert not any(
        dataclasses.replace(seen, nodes=(seen.nodes[0], dataclasses.replace(seen.nodes[1], **each))).whole for each in spoiled
    )
