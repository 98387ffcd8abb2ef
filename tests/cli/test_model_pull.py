"""`vlaunch model pull` on simulated nodes: the hub's answers are made up, and nothing is moved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.model import Answer
from launcher.spread import Part
from launcher.tools import chain
from launcher.transport import Command
from tests.cli.conftest import Cluster
from tests.cli.test_model import COMMIT, FILES, home, in_hub, nodes, parts, requests

__all__ = ["nodes", "parts"]
TOKEN = "hf_thisMustStayHidden"


@pytest.fixture
def hub(nodes: Cluster) -> dict[str, Any]:
    """What the hub has, as a node's program tells it; tests change it."""
    nodes.write(nodes.path.read_text() + "secrets: {HF_TOKEN: {env: HF_TOKEN}}\n")
    rows = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in FILES.items()]
    said: dict[str, Any] = {"event": "resolved", "revision": COMMIT, "files": rows, "asked": {}}
    simulated = nodes.world.answer

    def answer(command: Command) -> Answer | None:
        if command.argv == chain.on_node(nodes.world.inventory).argv and command.stdin is not None:
            request = json.loads(command.stdin())["request"]
            if request["verb"] == "resolve":
                said["asked"] = {**request, "node": command.node}
                told = {key: value for key, value in said.items() if key != "asked"}
                return Answer(node=command.node, code=0, out=json.dumps(told) + "\n")
        return simulated(command)

    nodes.world.answer = answer  # type: ignore[method-assign]
    return said


def test_one_node_downloads_for_all(
    nodes: Cluster, hub: dict[str, Any], parts: list[Part], tmp_path: Path
) -> None:
    """The head, unless another one is named; the token is in no command line, nor in any output."""
    ran = nodes.run("model", "pull", "org/m", "--rate", "1GB")

    assert hub["asked"]["node"] == "gpu01"
    assert hub["asked"]["token"] == TOKEN
    assert [each.name for each in parts] == ["gpu01", "gpu02"]
    asked = requests(parts)
    assert [(each["source"], each["growing"]) for each in asked] == [(True, True), (False, False)]
    assert asked[0]["refs"] == asked[1]["refs"] == [["refs/main", COMMIT]]
    fetches = nodes.held[-1]
    assert fetches.stdin is not None
    request = json.loads(fetches.stdin())["request"]
    assert (request["verb"], request["token"]) == ("download", TOKEN)
    assert sorted(request["files"]) == sorted(FILES)
    assert request["hub"] == f"{home(tmp_path, 'gpu01')}/hub"
    assert TOKEN not in " ".join(word for each in nodes.held for word in each.words)
    assert TOKEN not in ran.out + ran.err
    nodes.run("model", "pull", "org/m", "--node", "gpu02")
    assert hub["asked"]["node"] == "gpu02"


def test_a_dry_run_says_what_would_come(nodes: Cluster, hub: dict[str, Any]) -> None:
    """And downloads nothing."""
    ran = nodes.run("model", "pull", "org/m", "--dry-run")

    assert ran.code == 0
    assert ran.out.splitlines() == [
        "gpu01 would download from Hugging Face",
        f"org/m ({COMMIT[:12]}): 5 MiB in 2 files, from gpu01",
        "  gpu02 would get 5 MiB, from gpu01",
    ]
    assert nodes.held == []


def test_what_a_node_has_is_not_downloaded(
    nodes: Cluster, hub: dict[str, Any], parts: list[Part], tmp_path: Path
) -> None:
    """It is copied from there; where all have it, nothing is done."""
    in_hub(home(tmp_path, "gpu02"))
    nodes.run("model", "pull", "org/m")
    assert [each.name for each in parts] == ["gpu02", "gpu01"]
    assert [each["growing"] for each in requests(parts)] == [False, False]
    in_hub(home(tmp_path, "gpu01"))
    ran = nodes.run("model", "pull", "org/m")

    assert (ran.code, "there was nothing to copy" in ran.err) == (0, True)


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ("GatedRepoError: 401", "ask for access on the model's page"),
        ("RepositoryNotFoundError: 404", "is the name right?"),
        ("there is no huggingface_hub here", "run `vlaunch up`"),
        ("ConnectError: refused", "does that node reach the hub?"),
    ],
)
def test_what_a_hub_refuses(nodes: Cluster, hub: dict[str, Any], why: str, hint: str) -> None:
    """Is told with what to do."""
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
