"""Steps of `down`, their order, and the gate that verifies the removal."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cluster.down_plan import plan_down
from launcher.core.domain import Answer, Inventory, Secret
from launcher.core.errors import GateError
from launcher.core.plan import Plan
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import parse_answers, probe_commands, probe_nodes
from launcher.tools.site import Site
from tests import plan_case as case
from tests.fakes import FakeTransport
from tests.simulated import World

Load = Callable[..., Inventory]
SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}


@pytest.fixture
def world(load: Load) -> World:
    """A running cluster of two nodes."""
    world = World(load())
    case.bring_up(world.inventory, world, SECRETS)
    world.changes.clear()
    return world


def plan(world: World, *without: str) -> Plan:
    facts = probe_nodes(world.inventory, FakeTransport(world.answer), [])
    return plan_down(
        Site(
            world.inventory,
            {name: node_facts for name, node_facts in facts.items() if name not in without},
        )
    )


def test_workers_are_removed_first_then_the_head_then_files(world: World) -> None:
    """Otherwise workers would try to reconnect."""
    case.drain(plan(world), FakeTransport(world.answer))

    assert world.verbs() == ["gpu02: rm", "gpu01: rm", "gpu01: clear", "gpu02: clear"]
    assert all(not machine.containers and not machine.files for machine in world.machines.values())


def test_ranks_on_the_head_are_removed_with_the_workers(world: World) -> None:
    """Containers are removed by label, under any name."""
    world.machines["gpu01"].containers["odd"] = {
        **world.container("gpu01"),
        "Id": "odd1",
        "Name": "/odd",
    }
    world.machines["gpu01"].containers["odd"]["Config"] = {
        "Labels": {"vlaunch.cluster": "c", "vlaunch.role": "rank"}
    }
    stages = {stage.id: [step.title for step in stage.steps] for stage in plan(world).stages}

    assert stages["workers"] == ["removing the worker container", "removing container odd"]
    assert stages["head"] == ["removing the head container"]


def test_a_second_down_only_verifies(world: World) -> None:
    """`down` is safe to repeat."""
    case.drain(plan(world), FakeTransport(world.answer))
    world.changes.clear()
    again = plan(world)
    case.drain(again, FakeTransport(world.answer))

    assert again.steps == ()
    assert [stage.id for stage in again.stages] == ["absent"]
    assert world.changes == []


def test_an_unreachable_node_is_omitted(world: World) -> None:
    """The others are cleaned all the same."""
    case.drain(plan(world, "gpu02"), FakeTransport(world.answer))

    assert {command.node for command in world.changes} == {"gpu01"}
    assert plan(world, "gpu01", "gpu02").stages == ()


def test_remains_are_named(world: World) -> None:
    """`docker rm` may claim success."""
    down = plan(world)
    handler = world.answer

    def stubborn(command):  # type: ignore[no-untyped-def]
        return (
            Answer(node=command.node, code=0)
            if command.node == "gpu02" and "rm" in command.argv
            else handler(command)
        )

    with pytest.raises(GateError) as caught:
        case.drain(down, FakeTransport(stubborn))

    assert caught.value.message.startswith("timed out after 20s: gpu02: still has container ")
    assert "run `vlaunch down` again" in caught.value.hint


def test_a_node_without_an_answer_does_not_count_as_clean(world: World) -> None:
    """Absence is verified, not assumed."""
    handler = world.answer

    def lost(command):  # type: ignore[no-untyped-def]
        if command.node == "gpu02" and "ps" in command.argv:
            return Answer(node="gpu02", code=255, err="connection lost")
        return handler(command)

    with pytest.raises(GateError, match="gpu02: cannot be checked for leftovers"):
        case.drain(plan(world), FakeTransport(lost))


def test_files_alone_are_removed_too(world: World) -> None:
    """As after a run that was killed before it started containers."""
    for machine in world.machines.values():
        machine.containers.clear()

    assert [step.title for step in plan(world).steps] == ["removing node programs and secrets"] * 2


def test_the_compile_cache_is_removed_on_request(world: World) -> None:
    """If it exists or might, after the containers that may still write to it."""
    world.machines["gpu01"].compiled = "ext4\n2048"
    transport = FakeTransport(world.answer)
    commands = probe_commands(world.inventory, [world.inventory.image], compiled=True)
    site = Site(world.inventory, parse_answers(transport.run(commands))[0])
    purge = plan_down(site, purge=True)
    titles = [stage.title for stage in purge.stages]
    (step,) = [purged for purged in purge.steps if purged.command.argv[3:4] == ("purge",)]

    assert titles.index("Remove the head") < titles.index("Remove the compile cache")
    assert step.command.node == "gpu01"
    assert step.command.argv[4:] == (
        "/root/.vlaunch/cache/c",
        "/root/.vlaunch/cache",
        "vllm/vllm-openai:v0.32.0",
        "docker",
    )
    assert "purge" not in {purged.command.argv[3] for purged in plan_down(site).steps}


def test_secrets_alone_are_removed_too(world: World) -> None:
    """With all other files missing."""
    for machine in world.machines.values():
        machine.containers.clear()
        machine.files = {"secrets/HF_TOKEN": b"x"}

    assert len(plan(world).steps) == 2


@pytest.mark.parametrize(
    ("extra", "code", "remaining"),
    [
        (None, 0, []),
        ("c/mine.txt", 1, ["c", "c/mine.txt"]),
        ("d/mine.txt", 0, ["d", "d/mine.txt"]),
        ("cache/c/0123/k", 0, ["cache", "cache/c", "cache/c/0123", "cache/c/0123/k"]),
    ],
)
def test_only_files_of_vlaunch_are_removed(
    extra: str | None, code: int, remaining: list[str], load: Load, tmp_path: Path
) -> None:
    """A foreign file stays and is a failure; another cluster's directory stays, and so does a
    compile cache, but not its empty folder. The script runs locally.
    """
    state = tmp_path / "state"
    inventory = load(f"state_dir: {state}")
    world = World(inventory)
    case.bring_up(inventory, world, SECRETS)
    for name in (
        "payload/batch.pyz",
        "secrets/RAY_AUTH_TOKEN",
        "network.json",
        ".network.json.77",
        "server/default/desired.json",
    ):
        (state / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (state / "c" / name).write_text("x")
    (state / "cache/c/4567").mkdir(parents=True)
    if extra:
        (state / extra).parent.mkdir(parents=True, exist_ok=True)
        (state / extra).write_text("mine")
    clear = next(
        step.command.argv for step in plan(world).steps if step.command.argv[3:4] == ("clear",)
    )
    done = subprocess.run(clear, capture_output=True, check=False)

    assert done.returncode == code
    assert (
        sorted(str(path.relative_to(state)) for path in state.rglob("*")) == remaining
        if state.exists()
        else remaining == []
    )


def test_the_query_for_remains_detects_both(load: Load, tmp_path: Path) -> None:
    """The script runs locally with a fake docker; a failing one is not an empty answer."""
    inventory = load(
        f"state_dir: {tmp_path}\ndocker: [fake]", "nodes: [{host: gpu01, ip: 10.0.0.1, gpus: 1}]"
    )
    world = World(inventory)
    gate = plan(world).stages[-1].gates[0]
    fake = tmp_path / "bin" / "fake"
    fake.parent.mkdir()
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin"}

    def run_script(body: str) -> tuple[int, str]:
        fake.write_text(f"#!/bin/sh\n{body}\n")
        fake.chmod(0o755)
        done = subprocess.run(
            gate.queries[0].argv, env=env, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert run_script("exit 0") == (0, "")
    (tmp_path / "c").mkdir()
    assert run_script("echo 0123456789abcdef; echo fedcba9876543210") == (
        0,
        f"container 0123456789ab\ncontainer fedcba987654\ndirectory {tmp_path}/c\n",
    )
    assert run_script("exit 1")[0] == 1


def test_secrets_in_memory_are_removed_everywhere(load: Load) -> None:
    """The folder may have changed since they were written, or be unavailable now."""
    inventory = load()
    folders = ("/run/user/1000/vlaunch-ops/c", "/dev/shm/vlaunch-ops/c")
    facts = {
        node.name: HostFacts(docker_version="28", memory_dir="", folders=folders)
        for node in inventory.nodes
    }

    assert [step.command.argv[3:] for step in plan_down(Site(inventory, facts)).steps] == [
        ("forget", folder) for folder in folders
    ] * 2


def test_remains_in_memory_are_detected(load: Load, tmp_path: Path) -> None:
    """The script checks all folders, whatever the probe reported."""
    inventory = load(
        f"state_dir: {tmp_path}\ndocker: [fake]", "nodes: [{host: gpu01, ip: 10.0.0.1, gpus: 1}]"
    )
    gate = plan(World(inventory)).stages[-1].gates[0]
    (tmp_path / "fake").write_text("#!/bin/sh\n")
    (tmp_path / "id").write_text(f"#!/bin/sh\necho test-{os.getpid()}\n")
    for name in ("fake", "id"):
        (tmp_path / name).chmod(0o755)
    place = Path(f"/dev/shm/vlaunch-test-{os.getpid()}")
    (place / "c").mkdir(parents=True)
    try:
        done = subprocess.run(
            gate.queries[0].argv,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(place)

    assert (done.returncode, done.stdout) == (0, f"directory {place}/c\n")


def test_a_directory_without_our_files_is_removed_too(load: Load) -> None:
    """Docker creates the missing source of a bind mount; `down` must remove it."""
    inventory = load()
    facts = {
        node.name: HostFacts(docker_version="28", has_directory=True) for node in inventory.nodes
    }
    gone = {node.name: HostFacts(docker_version="28") for node in inventory.nodes}

    assert [step.command.argv[3] for step in plan_down(Site(inventory, facts)).steps] == [
        "clear",
        "clear",
    ]
    assert plan_down(Site(inventory, gone)).steps == ()
