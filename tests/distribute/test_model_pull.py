"""`vlaunch model pull` on simulated nodes, with a fake hub and without transfers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.transport import Command
from launcher.distribute import chain
from launcher.distribute.coordinator import MemberSpec
from launcher.ssh.fleet import Line
from tests.command_line import Cluster
from tests.distribute.test_model_command import COMMIT, FILES, home, in_hub, nodes, parts, requests

__all__ = ["nodes", "parts"]
TOKEN = "hf_thisMustStayHidden"


@pytest.fixture
def hub(nodes: Cluster, tmp_path: Path) -> dict[str, Any]:
    """Simulate the hub, as a node's program reports it; tests change the answers."""
    nodes.lock.append(Line(node="gpu01", text='{"event": "downloaded", "bytes": 5}'))
    nodes.write(nodes.path.read_text() + "secrets: {HF_TOKEN: {env: HF_TOKEN}}\n")
    rows = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in FILES.items()]
    answers: dict[str, Any] = {
        "event": "resolved",
        "revision": COMMIT,
        "files": rows,
        "request": {},
    }
    simulated = nodes.world.answer
    downloads: list[Command] = []

    def answer(command: Command) -> Answer | None:
        if (
            command.argv == chain.node_runtime(nodes.world.inventory).argv
            and command.stdin is not None
        ):
            request = json.loads(command.stdin())["request"]
            last = nodes.background_commands[-1] if nodes.background_commands else command
            if "downloading org/m" in " ".join(last.preamble) and last not in downloads:
                downloads.append(last)
                in_hub(home(tmp_path, last.node))
            if request["verb"] == "resolve":
                answers["request"] = {**request, "node": command.node}
                event = {key: value for key, value in answers.items() if key != "request"}
                return Answer(node=command.node, code=0, out=json.dumps(event) + "\n")
        return simulated(command)

    nodes.world.answer = answer  # type: ignore[method-assign]
    return answers


def test_one_node_downloads_for_all(
    nodes: Cluster, hub: dict[str, Any], parts: list[MemberSpec], tmp_path: Path
) -> None:
    """The head, unless another one is named; then it is copied. No command line and no output has
    the token.
    """
    ran = nodes.run("model", "pull", "org/m", "--rate", "1GB")

    assert hub["request"]["node"] == "gpu01"
    assert hub["request"]["token"] == TOKEN
    fetches = nodes.background_commands[-1]
    assert fetches.stdin is not None
    request = json.loads(fetches.stdin())["request"]
    assert (request["verb"], request["token"], request["ref"]) == ("download", TOKEN, "main")
    assert sorted(request["files"]) == sorted(FILES)
    assert request["hub"] == f"{home(tmp_path, 'gpu01')}/hub"
    assert "downloading org/m" in " ".join(fetches.preamble)
    assert [spec.name for spec in parts] == ["gpu01", "gpu02"]
    assert requests(parts)[1]["refs"] == [["refs/main", COMMIT]]
    assert "5 MiB downloaded" in ran.err
    assert TOKEN not in " ".join(
        argument for spec in nodes.background_commands for argument in spec.full_argv
    )
    assert TOKEN not in ran.out + ran.err
    nodes.run("model", "pull", "org/m", "--on", "gpu02")
    assert hub["request"]["node"] == "gpu02"


def test_a_download_for_a_single_node_is_verified(
    nodes: Cluster, hub: dict[str, Any], parts: list[MemberSpec]
) -> None:
    """With the hub's digests, by a copy without targets."""
    nodes.run("model", "pull", "org/m", "--to", "gpu01")

    assert [(request["source"], request["alone"]) for request in requests(parts)] == [(True, True)]


def test_a_failed_download(nodes: Cluster, hub: dict[str, Any], parts: list[MemberSpec]) -> None:
    """The error has the reason, and no copy starts."""
    failed = json.dumps({"event": "failed", "why": "LocalEntryNotFoundError: no route"})
    nodes.lock[1] = Line(node="gpu01", text=failed)
    ran = nodes.run("model", "pull", "org/m")

    assert (ran.code, parts) == (1, [])
    assert "LocalEntryNotFoundError: no route" in ran.err


def test_a_dry_run_lists_the_files(nodes: Cluster, hub: dict[str, Any]) -> None:
    """Without a download."""
    ran = nodes.run("model", "pull", "org/m", "--dry-run")

    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"org/m ({COMMIT[:12]}): gpu01 would download 5 MiB in 2 files from Hugging Face",
        "  then gpu02 would get it from there",
    ]
    assert nodes.background_commands == []


def test_a_model_on_a_node_is_not_downloaded(
    nodes: Cluster, hub: dict[str, Any], parts: list[MemberSpec], tmp_path: Path
) -> None:
    """It is copied; if all have it, the plan is empty."""
    in_hub(home(tmp_path, "gpu02"))
    nodes.run("model", "pull", "org/m")
    assert [spec.name for spec in parts] == ["gpu02", "gpu01"]
    in_hub(home(tmp_path, "gpu01"))
    ran = nodes.run("model", "pull", "org/m")

    assert (ran.code, "there was nothing to copy" in ran.err) == (0, True)


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ("GatedRepoError: 401", "request access on the model's page"),
        ("RepositoryNotFoundError: 404", "check the name;"),
        ("huggingface_hub is not installed here", "run `vlaunch up`"),
        ("ConnectError: refused", "check that the node reaches the hub"),
    ],
)
def test_errors_of_the_hub(nodes: Cluster, hub: dict[str, Any], why: str, hint: str) -> None:
    """The hint fits the reason."""
    hub.clear()
    hub.update({"event": "failed", "why": why})
    ran = nodes.run("model", "pull", "org/m")

    assert ran.code == 1
    assert "gpu01: cannot download org/m" in ran.err
    assert why in ran.err
    assert hint in ran.err.replace("\n", " ")


def test_a_folder_is_not_downloaded(nodes: Cluster) -> None:
    """It has no name at the hub."""
    assert nodes.run("model", "pull", "/data/mine").code == 2


def test_too_little_space_is_detected_before_the_download(
    nodes: Cluster, hub: dict[str, Any]
) -> None:
    """On all selected nodes."""
    hub["files"][1][1] = 10**18
    ran = nodes.run("model", "pull", "org/m")

    assert (ran.code, len(nodes.background_commands)) == (2, 1)
    assert "gpu[01-02] has too little disk space" in ran.err
