"""`vlaunch image` on simulated nodes: programs run in this process, with a script as Docker;
test_coordinator.py covers copies by real programs.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.distribute import chain, copy_session
from launcher.distribute.members import CopyResult, MemberProgress, MemberSpec
from launcher.distribute.node.main import main
from tests.command_line import Cluster, FakeBackgroundCommand
from tests.image_tars import LAYERS, NAME, classic, sha
from tests.simulated import image_json

DIFFS = [f"sha256:{sha(layer)}" for layer in LAYERS]


def json_of(name: str, layers: list[str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return an image's `docker image inspect`."""
    inspection = image_json(name, labels=labels or {})
    return {**inspection, "RepoTags": [name], "RootFS": {"Layers": layers}, "Size": 2**30}


class Nodes:
    """Simulated nodes, with their Docker's images and failures."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.simulated = cluster.world.answer
        self.images: dict[str, list[dict[str, Any]]] = {"gpu01": [], "gpu02": []}
        self.trouble: dict[str, str] = {}
        self.unfinished: dict[str, int] = {}
        self.requests: list[dict[str, Any]] = []
        self.docker: list[tuple[str, ...]] = []
        self.saved = classic()
        self.loads = True
        self.user = "0"
        self.differently: dict[str, Any] = {}

    def answer(self, command: Command) -> Answer | None:
        argv = command.argv
        if argv[3:4] == ("images",):
            return Answer(node=command.node, code=0, out=self.image_output(command.node))
        if argv == chain.node_runtime(self.cluster.world.inventory).argv:
            return self._program(command)
        if argv[0] == "docker" and argv[1] in ("pull", "tag"):
            self.docker.append((command.node, *argv[1:]))
            self.has(command.node, argv[-1])
            return Answer(node=command.node, code=0)
        return self.simulated(command)

    def has(self, node: str, name: str) -> None:
        """Add the image to a node."""
        self.images[node] = [{**json_of(name, DIFFS), **self.differently}]
        self.cluster.world.machines[node].images[name] = json_of(name, DIFFS)

    def image_output(self, node: str) -> str:
        """Return the output of a node's image query."""
        trouble = self.trouble.get(node, "")
        parts = {
            "user": self.user,
            "python": "3.11",
            "disk": f"/dev/a 1 1 {100 * 2**20} 1% /",
            "device": "1",
            "unfinished": f"{self.unfinished.get(node, 0)} /x",
            "docker": trouble or '{"Version": "26.1.5"}',
            "info": '{"ServerVersion": "26.1.5"}',
            "images": json.dumps(self.images[node]),
            "dockerdisk": f"/dev/b 1 1 {100 * 2**20} 1% /",
            "dockerdevice": "2",
            "end": "",
        }
        for name in ("info", "images") if trouble else ():
            del parts[name]
        failed = {"docker"} if trouble else set()
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {int(name in failed)}\n"
            for name, text in parts.items()
        )

    def _program(self, command: Command) -> Answer:
        assert command.stdin is not None
        request = json.loads(command.stdin())["request"]
        self.requests.append({"node": command.node, **request})
        saved = self.folder / "saved"
        saved.write_bytes(self.saved)
        prefix = str(self.folder)
        request = {**request, "save": ["cat", str(saved)]}
        request |= {key: prefix + request[key] for key in ("root", "top") if key in request}
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main(request)
        return Answer(node=command.node, code=code, out=output.getvalue())


@pytest.fixture
def nodes(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    simulated = Nodes(cluster, tmp_path)
    cluster.world.answer = simulated.answer  # type: ignore[method-assign]
    monkeypatch.setattr("launcher.distribute.node.main._exit_with_input", lambda: None)
    cluster.write(cluster.path.read_text().replace("vllm/vllm-openai:v0.32.0", NAME))
    for machine in cluster.world.machines.values():
        machine.images = {NAME: json_of(NAME, DIFFS)}
    return simulated


@pytest.fixture
def chains(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[list[MemberSpec]]:
    """Replace copies: record their specs, and add the image to all targets if `loads` is true."""
    called: list[list[MemberSpec]] = []

    def fake(
        specs: list[MemberSpec], connections: Any, *, total: int
    ) -> Generator[Event, None, CopyResult]:
        called.append(list(specs))
        connections.check()
        yield Event(kind="wait", stage="copy", text="moving")
        program = FakeBackgroundCommand([])
        members = {spec.name: MemberProgress(program=program, received=total) for spec in specs}  # type: ignore[arg-type]
        for spec in specs[1:]:
            if nodes.loads:
                nodes.has(spec.name, NAME)
        return CopyResult(seconds=2.0, members=members)

    monkeypatch.setattr(copy_session, "coordinate_copy", fake)
    return called


def requests(specs: list[MemberSpec]) -> list[dict[str, Any]]:
    """Return the programs' requests."""
    return [json.loads(spec.command.stdin())["request"] for spec in specs if spec.command.stdin]


def test_the_list_of_images(nodes: Nodes) -> None:
    """Different images of one name have two lines; as a table and as JSON."""
    nodes.images["gpu01"] = [json_of(NAME, DIFFS), json_of("x:1", ["sha256:0"])]
    nodes.images["gpu02"] = [json_of(NAME, DIFFS), json_of("x:1", ["sha256:1"])]
    nodes.unfinished["gpu02"] = 3 * 2**10
    ran = nodes.cluster.run("image", "list")

    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    where = [(row[0], row[-1]) for row in rows if row[-1].startswith("gpu")]
    assert [cells for cells in where if cells[0] == NAME] == [(NAME, "gpu[01-02]")]
    assert [cells for cells in where if cells[0] == "x:1"] == [("x:1", "gpu01"), ("x:1", "gpu02")]
    assert "x:1 differs between nodes" in ran.out
    assert "gpu02: 3 MiB of incomplete copies" in ran.out
    payload = json.loads(nodes.cluster.run("image", "list", "--json").out)
    assert payload["nodes"]["gpu01"]["images"][0]["layers"] == DIFFS
    assert payload["nodes"]["gpu01"]["store"] == "classic"


def test_an_unreachable_node_s_images_are_unknown(nodes: Nodes) -> None:
    """A missing node, and a Docker without an answer; the exit code is 1."""
    nodes.images["gpu01"] = [json_of(NAME, DIFFS)]
    nodes.cluster.missing["gpu02"] = ConnectError("gpu02", "no route to host")
    nodes.trouble["gpu01"] = "Cannot connect to the Docker daemon"
    ran = nodes.cluster.run("image", "list")

    assert ran.code == 1
    assert "gpu02: no route to host" in ran.out
    assert "gpu01: Docker: Cannot connect" in ran.out


def test_a_dry_run_prints_the_plan(nodes: Nodes) -> None:
    """Without a lock."""
    nodes.images["gpu02"] = [json_of(NAME, DIFFS)]
    nodes.images["gpu01"] = [json_of("base:1", DIFFS[:3])]
    ran = nodes.cluster.run("image", "copy", "--dry-run")

    assert ran.out.splitlines() == [
        f"{NAME}: 1.0 GiB in 4 layers, from gpu02",
        "  gpu01 would get 1 layer, from gpu02",
    ]
    assert nodes.cluster.background_commands == []


def test_an_image_is_copied_along_the_chain(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """Only missing files are sent; the source exports blobs to its own folder, which is removed."""
    nodes.images["gpu02"] = [json_of(NAME, DIFFS)]
    nodes.images["gpu01"] = [json_of("base:1", DIFFS[:2])]
    ran = nodes.cluster.run("image", "copy", "--rate", "10MB", "--json")

    assert ran.code == 0
    ((source, target),) = [requests(parts) for parts in chains]
    assert [spec.name for spec in chains[0]] == ["gpu02", "gpu01"]
    assert source["source"]
    assert "load" not in source
    names = {row[0] for row in target["manifest"]["files"]}
    assert {"manifest.json", "id2/layer.tar", "id3/layer.tar"} < names
    assert not names & {"id0/layer.tar", "id1/layer.tar"}
    assert target["load"] == ["docker", "load", "--quiet"]
    assert nodes.requests[0]["save"] == ["docker", "save", NAME]
    assert target["root"].startswith("/var/tmp/vlaunch-0/c/gpu01/")
    assert target["rate"] == 10_000_000
    assert source["certificate"] == target["certificate"]
    assert f"copying {NAME}" in " ".join(chains[0][1].command.preamble)
    assert [request["verb"] for request in nodes.requests] == ["export", "drop"]
    assert not (nodes.folder / "var").joinpath("tmp", "vlaunch-0").exists()
    done = ran.events[-1]["data"]
    assert (done["nodes"], done["changed"]) == (["gpu01", "gpu02"], 1)
    assert nodes.cluster.trace[-1] == "free"


def test_docker_loads_another_image(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """Loaded images are compared, whatever Docker's exit code."""
    nodes.images["gpu01"] = [json_of(NAME, DIFFS)]
    nodes.loads = False
    ran = nodes.cluster.run("image", "copy")

    assert ran.code == 1
    assert f"gpu02: does not have {NAME}" in ran.err


def test_nothing_to_copy(nodes: Nodes) -> None:
    """All nodes have it."""
    for name in ("gpu01", "gpu02"):
        nodes.images[name] = [json_of(NAME, DIFFS)]
    ran = nodes.cluster.run("image", "copy", "--json")

    assert (ran.code, ran.events[-1]["data"]) == (0, {"changed": 0})
    assert nodes.requests == []


def test_an_invalid_export(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """No data are sent."""
    nodes.images["gpu01"] = [json_of(NAME, DIFFS)]
    nodes.saved = b"something else"
    ran = nodes.cluster.run("image", "copy")

    assert ran.code == 1
    assert "gpu01: the image cannot be exported" in ran.err
    assert "`docker save` failed" in ran.err
    assert chains == []


def test_one_node_pulls(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """The head by default; the others copy it."""
    ran = nodes.cluster.run("image", "pull")

    assert ran.code == 0
    assert nodes.docker == [("gpu01", "pull", "--quiet", NAME)]
    assert [[spec.name for spec in specs] for specs in chains] == [["gpu01", "gpu02"]]
    dry = nodes.cluster.run("image", "pull", "--on", "gpu02", "--dry-run")
    assert dry.out.splitlines() == [f"gpu02 would pull {NAME}", "  gpu01 would get it"]


def test_invalid_arguments(nodes: Nodes) -> None:
    """They are rejected before any query."""
    both = nodes.cluster.run("image", "copy", "--from", "gpu01", "--local")
    assert (both.code, "exclude each other" in both.err) == (2, True)
    assert nodes.cluster.run("image", "copy", "--scratch", "here").code == 2
    assert nodes.cluster.commands == []


def test_another_name_of_the_same_image(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """A node with the image gets only the name."""
    nodes.images["gpu01"] = [json_of(NAME, DIFFS)]
    nodes.images["gpu02"] = [json_of("mirror/b:1", DIFFS)]
    dry = nodes.cluster.run("image", "copy", "--dry-run")
    assert "gpu02 has it under another name" in dry.out
    ran = nodes.cluster.run("image", "copy", "--json")

    assert ran.code == 0
    assert nodes.docker == [("gpu02", "tag", json_of("mirror/b:1", DIFFS)["Id"], NAME)]
    assert (chains, nodes.requests) == ([], [])


def test_up_copies_images_between_nodes(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """No node pulls an image that another one has; a dry run notes the limits of its script."""
    cluster = nodes.cluster
    cluster.write(cluster.path.read_text() + "image_source: nodes\n")
    del cluster.world.machines["gpu02"].images[NAME]
    nodes.images["gpu01"] = [json_of(NAME, DIFFS)]
    dry = cluster.run("up", "--dry-run")
    assert "# note: the image is copied to gpu02 from another node" in dry.out
    assert "docker pull" not in dry.out
    assert chains == []
    ran = cluster.run("up", "--json")

    assert [[spec.name for spec in specs] for specs in chains] == [["gpu01", "gpu02"]]
    assert ran.code == 0, ran.err
    assert [spec["kind"] for spec in ran.events].count("done") == 1


def test_up_has_the_head_pull_for_all(nodes: Nodes, chains: list[list[MemberSpec]]) -> None:
    """If no node has the image."""
    cluster = nodes.cluster
    cluster.write(cluster.path.read_text() + "image_source: nodes\n")
    for machine in cluster.world.machines.values():
        machine.images.clear()
    cluster.run("up")

    assert nodes.docker == [("gpu01", "pull", "--quiet", NAME)]
    assert [[spec.name for spec in specs] for specs in chains] == [["gpu01", "gpu02"]]
