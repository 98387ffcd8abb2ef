"""`vlaunch model` on simulated nodes with real folders: programs run in this process.
test_coordinator.py covers copies by real programs.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from launcher.distribute.coordinator import CopyResult, MemberProgress, MemberSpec
from launcher.distribute.node.main import main
from tests.command_line import Cluster, FakeBackgroundCommand

COMMIT = "1" * 40
FILES = {"config.json": b"{}", "m.safetensors": b"w" * 5_000_000}


@pytest.fixture
def nodes(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Two nodes without the image, with their own Hugging Face homes."""
    cluster.write(
        "cluster: c\nimage: x:1\naccelerator: cpu\nnodes:\n"
        + "".join(
            f"  - {{host: gpu0{n}, ip: 10.0.0.1{n}, gpus: 1, hf_home: {tmp_path}/gpu0{n}/hf}}\n"
            for n in (1, 2)
        )
    )
    for machine in cluster.world.machines.values():
        machine.images.clear()
    simulated = cluster.world.answer

    def answer(command: Command) -> Answer | None:
        if command.argv != chain.node_runtime(cluster.world.inventory).argv:
            return simulated(command)
        assert command.stdin is not None
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main(json.loads(command.stdin())["request"])
        return Answer(node=command.node, code=code, out=output.getvalue())

    cluster.world.answer = answer  # type: ignore[method-assign]
    return cluster


def home(tmp_path: Path, node: str) -> Path:
    return tmp_path / node / "hf"


def plain(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def in_hub(hf: Path, commit: str = COMMIT) -> Path:
    root = hf / "hub" / "models--org--m"
    snapshot = root / "snapshots" / commit
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, data in FILES.items():
        blob = hashlib.sha256(data).hexdigest()
        (root / "blobs" / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return root


def test_the_list_of_models(nodes: Cluster, tmp_path: Path) -> None:
    """Complete, incomplete, and why; as a table and as JSON."""
    in_hub(home(tmp_path, "gpu01"))
    part = in_hub(home(tmp_path, "gpu02"))
    (part / "snapshots" / COMMIT / "m.safetensors").resolve().unlink()
    ran = nodes.run("model", "list")

    assert ran.code == 0
    row = next(line for line in ran.out.splitlines() if line.startswith("org/m"))
    assert row.split()[:6] == ["org/m", COMMIT[:12], "5", "MiB", "gpu01", "gpu02"]
    assert "gpu02: org/m: m.safetensors has no content" in ran.out
    payload = json.loads(nodes.run("model", "list", "--json").out)
    assert payload["nodes"]["gpu01"]["models"][0]["revisions"][0]["why"] == ""


def test_no_models(nodes: Cluster) -> None:
    """The output is a message."""
    ran = nodes.run("model", "list")

    assert (ran.code, ran.err) == (0, "these nodes have no models\n")


def test_an_unreachable_node_s_models_are_unknown(nodes: Cluster, tmp_path: Path) -> None:
    """The others are listed; the exit code is 1."""
    in_hub(home(tmp_path, "gpu01"))
    nodes.missing["gpu02"] = ConnectError("gpu02", "no route to host")
    ran = nodes.run("model", "list")

    assert ran.code == 1
    assert "org/m" in ran.out
    assert "gpu02: no route to host" in ran.out


def test_a_dry_run_prints_the_plan(nodes: Cluster, tmp_path: Path) -> None:
    """Without a lock."""
    in_hub(home(tmp_path, "gpu01"))
    ran = nodes.run("model", "copy", "org/m", "--dry-run")

    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"org/m ({COMMIT[:12]}): 5 MiB in 2 files, from gpu01",
        "  gpu02 would get 5 MiB, from gpu01",
    ]
    assert nodes.background_commands == []


def test_nothing_to_copy(nodes: Cluster, tmp_path: Path) -> None:
    """All nodes have it."""
    for node in ("gpu01", "gpu02"):
        in_hub(home(tmp_path, node))
    ran = nodes.run("model", "copy", "org/m", "--json")

    assert (ran.code, ran.events[-1]["data"]) == (0, {"changed": 0})
    assert "is on gpu[01-02] already" in ran.events[-1]["text"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[MemberSpec]:
    """Replace copies: record their specs; all nodes but the last one report success."""
    called: list[MemberSpec] = []

    def fake(
        parts: list[MemberSpec], connections: Any, *, total: int
    ) -> Generator[Event, None, CopyResult]:
        called.extend(parts)
        connections.check()
        yield Event(kind="wait", stage="copy", text="moving")
        program = FakeBackgroundCommand([])
        members = {spec.name: MemberProgress(program=program, received=total) for spec in parts}  # type: ignore[arg-type]
        members[parts[-1].name].failed = "No space left on device"
        return CopyResult(seconds=2.0, members=members)

    monkeypatch.setattr(copy_session, "coordinate_copy", fake)
    return called


def requests(parts: list[MemberSpec]) -> list[dict[str, Any]]:
    """Return the programs' requests."""
    return [
        json.loads(spec.command.stdin())["request"]
        for spec in parts
        if spec.command.stdin is not None
    ]


def test_a_model_is_copied_along_the_chain(
    nodes: Cluster, parts: list[MemberSpec], tmp_path: Path
) -> None:
    """All nodes write into their own home and serve at their own address, with one certificate. A
    node without the model fails the command.
    """
    in_hub(home(tmp_path, "gpu02"))
    ran = nodes.run("model", "copy", "org/m", "--rate", "10MB")

    requested = requests(parts)
    assert [spec.name for spec in parts] == ["gpu02", "gpu01"]
    assert [spec["source"] for spec in requested] == [True, False]
    assert [spec["listen"] for spec in requested] == [["10.0.0.12", 29570], ["10.0.0.11", 29570]]
    assert requested[1]["root"] == f"{home(tmp_path, 'gpu01')}/hub/models--org--m"
    assert requested[1]["refs"] == [["refs/main", COMMIT]]
    assert (requested[1]["rate"], requested[1]["label"]) == (10_000_000, COMMIT)
    assert requested[0]["certificate"] == requested[1]["certificate"]
    assert all(
        requested[0]["certificate"] not in " ".join(part.command.full_argv) for part in parts
    )
    assert parts[0].command.preamble == ()
    assert "copying org/m" in " ".join(parts[1].command.preamble)
    assert ran.code == 1
    assert "gpu01: does not have org/m" in ran.err
    assert "No space left on device" in ran.err
    assert "run the same command again" in ran.err
    assert nodes.trace[-1] == "free"


def test_a_folder_of_this_machine(nodes: Cluster, parts: list[MemberSpec], tmp_path: Path) -> None:
    """The machine has no address, so it pushes its files. `--as` is required when homes differ."""
    plain(tmp_path / "mine")
    ran = nodes.run("model", "copy", "./mine")
    assert (ran.code, "--as PATH" in ran.err) == (2, True)
    nodes.write(nodes.path.read_text().replace("gpu02/hf", "gpu01/hf"))
    nodes.run("model", "copy", "./mine")

    assert [spec.name for spec in parts] == [chain.THIS_MACHINE, "gpu01", "gpu02"]
    assert [spec.pushes for spec in parts] == [True, False, False]
    requested = requests(parts)
    assert "listen" not in requested[0]
    assert requested[0]["root"] == str(tmp_path / "mine")
    assert requested[1]["root"] == f"{home(tmp_path, 'gpu01')}/mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./none",), "no such folder on this machine"),
        (("org/m",), "no node has org/m"),
        (("org/m", "--local"), "not in this machine's Hugging Face cache"),
        (("/elsewhere/m",), "is outside every path mounted into the containers of c"),
        (("org/m", "--from", "gpu3"), "no node `gpu3`"),
        (("org/m", "--from", "gpu01", "--local"), "--from names a node"),
        (("org/m", "--as", "/x"), "--as requires a folder of this machine"),
        (("org/m", "--rate", "fast"), "should be bytes a second"),
    ],
)
def test_invalid_requests(nodes: Cluster, arguments: tuple[str, ...], message: str) -> None:
    """They are rejected before any change."""
    ran = nodes.run("model", "copy", *arguments)

    assert ran.code == 2
    assert message in ran.err


def test_different_copies(nodes: Cluster, tmp_path: Path) -> None:
    """In revision, or in files."""
    in_hub(home(tmp_path, "gpu01"))
    in_hub(home(tmp_path, "gpu02"), "2" * 40)
    ran = nodes.run("model", "copy", "org/m")

    assert ran.code == 2
    assert "org/m differs between gpu[01-02]" in ran.err


def test_an_unreachable_node_may_keep_a_model(nodes: Cluster, tmp_path: Path) -> None:
    """It is removed from the others; without any other node, the state is unknown."""
    root = in_hub(home(tmp_path, "gpu01"))
    nodes.missing["gpu02"] = ConnectError("gpu02", "cannot be reached")
    ran = nodes.run("model", "remove", "org/m", "--yes")

    assert (ran.code, root.exists()) == (1, False)
    nodes.missing["gpu01"] = ConnectError("gpu01", "cannot be reached")
    ran = nodes.run("model", "remove", "org/m", "--yes")
    assert (ran.code, "nothing to remove" in ran.err) == (1, False)


def test_removal(nodes: Cluster, tmp_path: Path) -> None:
    """With a dry run and a prompt; other folders stay."""
    root = in_hub(home(tmp_path, "gpu01"))
    data = home(tmp_path, "gpu02") / "data"
    data.mkdir(parents=True)
    shown = nodes.run("model", "remove", "org/m", "--dry-run")
    assert shown.out == f"gpu01: {root} would be removed, 5 MiB\n"
    refused = nodes.run("model", "remove", "org/m")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    ran = nodes.run("model", "remove", "org/m", "--yes", "--json")

    assert ran.code == 0
    assert ran.events[-1]["data"]["freed"].keys() == {"gpu01"}
    assert not root.exists()
    assert nodes.run("model", "remove", str(data), "--yes").code == 0
    assert data.exists()
    assert "nothing to remove" in nodes.run("model", "remove", "org/m", "--yes").err
