"""What is written down of a command and its author, on which nodes, and that no secret is in it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest

from launcher import __version__
from tests.command_line import INVENTORY, SECRET, Cluster


def lines(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """The lines that each node was sent, in order; they are not sent again."""
    found: dict[str, list[dict[str, Any]]] = {}
    for command in cluster.commands:
        if command.before:
            assert command.before[:2] == ("sh", "-c") and command.before[3] == "audit"
            assert command.before[5] == "c"
            found.setdefault(command.node, []).append(json.loads(command.before[6]))
    cluster.commands.clear()
    return found


def test_each_node_that_changes_keeps_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of the first thing that changes it; with who, what, and the inventory it came
    from.
    """
    monkeypatch.setenv("LOGNAME", "anna")
    assert cluster.run("up", "--verbose").code == 0
    first = {}
    for command in cluster.commands:
        if command in cluster.world.changes:
            first.setdefault(command.node, command)
    assert set(first) == {"gpu01", "gpu02"} and all(command.before for command in first.values())
    found = lines(cluster)

    for name in ("gpu01", "gpu02"):
        (said,) = found[name]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", said["at"])
        assert (said["who"], said["verb"], said["node"], said["vlaunch"]) == (
            "anna",
            "up",
            name,
            __version__,
        )
        assert said["command"] == "vlaunch up --verbose"
        assert said["inventory"] == hashlib.sha256(INVENTORY.encode()).hexdigest()[:12]
        assert f"starting the Ray {'head' if name == 'gpu01' else 'worker'}" in said["changes"]
    assert found["gpu01"][0]["id"] == found["gpu02"][0]["id"]


def test_what_changes_nothing_leaves_no_line(cluster: Cluster) -> None:
    """A second `up`, and a dry run, whose script has none either."""
    cluster.run("up")
    cluster.commands.clear()
    assert cluster.run("up").code == 0
    dry = cluster.run("down", "--dry-run")

    assert (dry.code, lines(cluster)) == (0, {})
    assert "audit" not in dry.out


@pytest.mark.parametrize("secret", [SECRET, "it has no form of its own"])
def test_no_secret_is_in_a_line(
    cluster: Cluster, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cluster's nor what somebody types; the cluster's own token is none of a line's
    business either.
    """
    monkeypatch.setenv("HF_TOKEN", secret)
    cluster.run("up")
    token = cluster.world.machines["gpu01"].files["secrets/RAY_AUTH_TOKEN"].decode()
    cluster.run("serve", "--model", f"x {secret}", "--skip-network-check", "--no-wait")
    assert "gpu01: want" in cluster.world.verbs()
    text = json.dumps(
        [command.before for command in cluster.commands]
        + [command.argv for command in cluster.held]
    )

    assert "serve --model" in text
    assert secret not in text
    assert token not in text


def test_nor_is_what_looks_like_one(cluster: Cluster) -> None:
    """Nobody told us of it; `vlaunch lock` shows the same words."""
    cluster.run("up")
    words = ("--", "--kv-transfer-config", '{"auth_token": "swordfish-swordfish"}')
    cluster.run("serve", "--model", "org/m", "--skip-network-check", "--no-wait", *words)
    said = [command.before for command in cluster.commands] + [
        each.stdin() for each in cluster.held if each.stdin
    ]

    assert "auth_token" in str(said)
    assert "swordfish" not in str(said)


@pytest.mark.parametrize(("words", "strict"), [(["up"], "strict"), (["down"], "lenient")])
def test_a_full_disk_keeps_nobody_from_cleaning_up(
    cluster: Cluster, words: list[str], strict: str
) -> None:
    """Whoever builds needs the disk anyway."""
    if words == ["down"]:
        cluster.run("up")
        cluster.commands.clear()
    cluster.run(*words)

    assert {command.before[7] for command in cluster.commands if command.before} == {strict}
