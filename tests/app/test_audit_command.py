"""`vlaunch audit` with lines of several nodes."""

from __future__ import annotations

import json

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from tests.command_line import Cluster


def trail(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Answer]) -> None:
    """Set the nodes' answers to the audit query."""
    handler = cluster.world.answer

    def answer(command: Command) -> Answer | None:
        return expected[command.node] if command.argv[3:4] == ("audit",) else handler(command)

    monkeypatch.setattr(cluster.world, "answer", answer)


def line(**changes: object) -> str:
    payload = {
        "at": "2026-11-21T21:00:05Z",
        "who": "anna",
        "host": "laptop",
        "verb": "up",
        "command": "vlaunch up",
        "id": "1",
    }
    return json.dumps({**payload, "changes": ["starting"], **changes}) + "\n"


def test_down_reports_the_remaining_trail(cluster: Cluster) -> None:
    """Only the trail, images, models and results of batch jobs remain."""
    cluster.run("up")
    ran = cluster.run("down")

    assert ran.code == 0
    assert (
        "the audit trail stays on each node: /root/.vlaunch/audit/c.ndjson (`vlaunch audit`)"
        in ran.err
    )


def test_trails_are_merged(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest last, repetitions once; invalid lines are counted."""
    late = line(
        at="2026-11-21T22:00:00Z",
        who="bob",
        command="vlaunch down",
        changes=["removing", "clearing"],
    )
    payload = {
        "gpu01": Answer(node="gpu01", code=0, out=late + line()),
        "gpu02": Answer(node="gpu02", code=0, out=line() + "{\n"),
    }
    trail(cluster, monkeypatch, payload)
    ran = cluster.run("audit")

    assert ran.code == 0
    assert ran.out.splitlines() == [
        "2026-11-21T21:00:05Z  anna@laptop  gpu[01-02]  vlaunch up: starting",
        "2026-11-21T22:00:00Z  bob@laptop  gpu01  vlaunch down: removing; clearing",
    ]
    assert "gpu02: 1 unreadable line in its audit trail" in ran.err
    machine = json.loads(cluster.run("audit", "--json", "--tail", "1").out)
    everything = json.loads(cluster.run("audit", "--json", "--tail", "all").out)
    assert [(entry["who"], entry["nodes"]) for entry in machine["entries"]] == [("bob", ["gpu01"])]
    assert (machine["silent"], machine["unreadable"]) == ({}, {"gpu02": 1})
    assert len(everything["entries"]) == 2


def test_unreadable_nodes_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not reached, or not readable: the rest is told, and the exit code is 1."""
    refused = "/root/.vlaunch/audit/c.ndjson is not readable by this user"
    trail(cluster, monkeypatch, {"gpu01": Answer(node="gpu01", code=77, err=refused)})
    cluster.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: no route to host")
    ran = cluster.run("audit")

    assert (ran.code, ran.out) == (1, "")
    assert "no node has an audit entry" not in ran.err
    assert f"gpu01: cannot read its audit trail; {refused}" in ran.err
    assert "gpu02: cannot be reached: no route to host" in ran.err


def test_a_trail_is_sanitized(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters are removed, line breaks too."""
    wild = line(who="\x1b[2J\x9b1mx", command="a\nb\r\x07", changes=["\x1b]0;title\x07c"])
    trail(
        cluster,
        monkeypatch,
        {name: Answer(node=name, code=0, out=wild) for name in ("gpu01", "gpu02")},
    )
    ran = cluster.run("audit")

    assert not set("\x1b\x07\x9b\r") & set(ran.out + ran.err)
    assert len(ran.out.splitlines()) == 1
