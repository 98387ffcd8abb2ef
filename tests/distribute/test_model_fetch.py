"""`serve --fetch` on simulated nodes with real Hugging Face homes, without transfers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.distribute import chain, copy_session
from launcher.distribute.coordinator import CopyResult, MemberProgress, MemberSpec
from launcher.distribute.node.main import main
from tests.command_line import Cluster, FakeBackgroundCommand, Ran
from tests.distribute.test_model_command import COMMIT, home, in_hub, requests

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 16}


@pytest.fixture
def nodes(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Two running nodes; gpu01 has org/m."""
    cluster.write(
        "cluster: c\nimage: x:1\nnodes:\n"
        + "".join(
            f"  - {{host: gpu0{n}, ip: 10.0.0.1{n}, gpus: 8, hf_home: {tmp_path}/gpu0{n}/hf}}\n"
            for n in (1, 2)
        )
    )
    for machine in cluster.world.machines.values():
        machine.images = {"x:1": next(iter(machine.images.values()))}
    simulated = cluster.world.answer
    bootstrap = chain.node_runtime(cluster.world.inventory).argv[2]

    def answer(command: Command) -> Answer | None:
        if bootstrap not in command.argv or command.stdin is None:
            return simulated(command)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main(json.loads(command.stdin())["request"])
        return Answer(node=command.node, code=code, out=output.getvalue())

    cluster.world.answer = answer  # type: ignore[method-assign]
    assert cluster.run("up").code == 0
    in_hub(home(tmp_path, "gpu01"))
    cluster.world.machines["gpu01"].config = CONFIG
    cluster.world.changes.clear()
    return cluster


@pytest.fixture
def parts(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[MemberSpec]:
    """Replace copies: record their specs, and add the model to all nodes."""
    called: list[MemberSpec] = []

    def fake(
        parts: list[MemberSpec], connections: Any, *, total: int
    ) -> Generator[Event, None, CopyResult]:
        called.extend(parts)
        assert nodes.world.verbs() == []  # no server starts earlier
        yield Event(kind="wait", stage="copy", text="moving")
        for machine in nodes.world.machines.values():
            machine.config = CONFIG
        program = FakeBackgroundCommand([])
        members = {spec.name: MemberProgress(program=program, received=total) for spec in parts}  # type: ignore[arg-type]
        return CopyResult(seconds=2.0, members=members)

    monkeypatch.setattr(copy_session, "coordinate_copy", fake)
    return called


def serve(nodes: Cluster, *arguments: str) -> Ran:
    command = ("serve", "--model", "org/m", "--skip-network-check", "--no-wait", *arguments)
    return nodes.run(*command)


def test_without_the_flag_nothing_is_copied(nodes: Cluster, parts: list[MemberSpec]) -> None:
    """The error names the node without the model, and the command that copies it."""
    ran = serve(nodes)

    assert (ran.code, parts) == (0, [])
    assert "gpu02: does not have org/m in its cache, and will download it, though gpu01" in ran.err


@pytest.mark.parametrize("how", ["--fetch", "models: {spread: auto}"])
def test_missing_models_are_copied_first(nodes: Cluster, parts: list[MemberSpec], how: str) -> None:
    """From a node with the model; then the server starts."""
    if how != "--fetch":
        nodes.write(nodes.path.read_text() + how + "\n")
    ran = serve(nodes, "--json", *([how] if how == "--fetch" else []))

    assert ran.code == 0, ran.err
    assert [spec.name for spec in parts] == ["gpu01", "gpu02"]
    assert [spec["source"] for spec in requests(parts)] == [True, False]
    assert nodes.world.verbs() == ["gpu01: want"]
    assert [spec["kind"] for spec in ran.events if spec.get("stage") == "copy"][-1] == "note"
    assert [spec["stage"] for spec in ran.events if spec["kind"] == "done"] == ["serve"]


def test_only_nodes_that_load_it(nodes: Cluster, parts: list[MemberSpec]) -> None:
    """A server on gpu01 alone needs no copy."""
    ran = serve(nodes, "--fetch", "--backend", "mp", "--nodes", "gpu01")

    assert (ran.code, parts) == (0, [])


def test_a_running_server_is_unaffected(nodes: Cluster, parts: list[MemberSpec]) -> None:
    """The command attaches."""
    assert serve(nodes).code == 0
    ran = serve(nodes, "--fetch")

    assert (ran.code, parts) == (0, [])
    assert "already running" in ran.err


def test_a_dry_run_names_the_nodes(nodes: Cluster, parts: list[MemberSpec]) -> None:
    """And the command with details."""
    ran = serve(nodes, "--fetch", "--dry-run")

    assert (ran.code, parts, nodes.background_commands) == (0, [], nodes.background_commands[:1])
    assert "gpu02 would get org/m: `vlaunch model copy org/m --dry-run` shows how" in ran.out


def test_an_unfinished_copy_is_rejected(
    nodes: Cluster, parts: list[MemberSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that finishes it; the flag does so itself."""
    real = type(nodes.world)._model

    def interrupted(world: Any, machine: Any, arguments: Any) -> Answer:
        unfinished = machine.node.name == "gpu02" and machine.config is None
        if unfinished:
            return Answer(node="gpu02", code=6)
        return real(world, machine, arguments)

    monkeypatch.setattr(type(nodes.world), "_model", interrupted)
    ran = serve(nodes)

    assert ran.code == 1
    assert "gpu02: its copy of org/m is incomplete" in ran.err
    assert "`vlaunch model copy org/m`, or add `--fetch`" in ran.err
    assert serve(nodes, "--fetch").code == 0
    assert parts


def test_a_model_on_no_node_is_downloaded_once(
    nodes: Cluster, parts: list[MemberSpec], tmp_path: Path
) -> None:
    """By one of its nodes; a failed download starts no server."""
    nodes.world.machines["gpu01"].config = None
    (home(tmp_path, "gpu01") / "hub" / "models--org--m").rename(tmp_path / "away")
    ran = serve(nodes, "--fetch")

    assert ran.code == 1
    assert "gpu01: cannot download org/m" in ran.err
    assert (parts, nodes.world.verbs()) == ([], [])


def test_a_folder_on_no_node(nodes: Cluster, tmp_path: Path) -> None:
    """It must be copied from this machine."""
    nodes.write(nodes.path.read_text().replace("gpu02/hf", "gpu01/hf"))
    for machine in nodes.world.machines.values():
        machine.config = None
    path = f"{home(tmp_path, 'gpu01')}/mine"
    ran = nodes.run("serve", "--model", path, "--skip-network-check", "--fetch")

    assert ran.code == 2
    assert f"no node has {path}" in ran.err
    assert COMMIT not in ran.err


@pytest.mark.parametrize("how", [(), ("--plan", "auto")])
def test_other_gates_are_checked_before_the_copy(
    nodes: Cluster, parts: list[MemberSpec], how: tuple[str, ...]
) -> None:
    """A used port is reported before hours of copying; the missing model does not count."""
    nodes.world.machines["gpu01"].listening = (22, 8000)
    ran = serve(nodes, "--fetch", *how)

    assert (ran.code, parts) == (1, [])
    assert "port 8000" in " ".join(ran.err.split())
    nodes.world.machines["gpu01"].listening = (22,)
    assert serve(nodes, "--fetch").code == 0
    assert parts
