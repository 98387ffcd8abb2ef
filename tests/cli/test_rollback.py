"""`vlaunch rollback`, and `serve --or-rollback`: what is started, and what is said when there is nothing to return to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.errors import GateError
from launcher.plan.serve import Request
from tests.cli.conftest import Cluster

SERVE = ("serve", "--skip-network-check", "--model")


def answers(monkeypatch: pytest.MonkeyPatch, *silent: str) -> None:
    """Have every server answer at once but those of some models."""

    def wait(session: Any, seen: Any, request: Request, *_: Any, **__: Any) -> tuple[int, list[str]]:
        if request.model in silent:
            raise GateError(f"{request.model} never answered", evidence="the last line", hint="read the log")
        return 0, [f"endpoint of {request.model}"]

    monkeypatch.setattr("launcher.cli.start._wait", wait)


def kept(cluster: Cluster) -> None:
    """Write down what has been submitted as what has answered, the last one as what is wanted, as supervisors do."""
    files = cluster.world.machines["gpu01"].files
    wanted = [job["wanted"] for job in cluster.world.jobs]
    files["server/answered.json"] = json.dumps([{"at": 1.0, "wanted": each} for each in reversed(wanted)]).encode()
    files["server/wanted.json"] = json.dumps(wanted[-1]).encode()


def running(cluster: Cluster) -> list[str]:
    return [job["wanted"]["model"] for job in cluster.world.jobs if job["status"] == "RUNNING"]


@pytest.fixture
def served(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster on which org/old has answered."""
    answers(monkeypatch, "org/broken")
    cluster.run("up")
    assert cluster.run(*SERVE, "org/old", "--tp", "4", "--pp", "1", "--", "--seed", "7").code == 0
    kept(cluster)
    return cluster


def test_the_server_before_is_started_again(served: Cluster) -> None:
    """With its model, its arguments and its split; what runs now is stopped."""
    assert served.run(*SERVE, "org/new", "--replace").code == 0
    kept(served)
    ran = served.run("rollback", "--skip-network-check")
    old, again = served.world.jobs[0]["wanted"], served.world.jobs[-1]["wanted"]

    assert ran.code == 0, ran.err
    assert ran.out == "endpoint of org/old\n"
    assert "back to org/old (TP=4 PP=1, ray) --seed 7" in ran.err
    assert again["argv"] == old["argv"]
    assert running(served) == ["org/old"]


def test_it_looks_with_the_lock_held(served: Cluster) -> None:
    """What has answered, and what is wanted, may change until the lock is ours; while a model loads others may have it."""
    served.run(*SERVE, "org/new", "--replace")
    kept(served)
    for words in (("rollback", "--skip-network-check"), (*SERVE, "org/broken", "--replace", "--or-rollback")):
        served.trace.clear()
        served.run(*words)
        held = [word for word, before in zip(served.trace, ["free", *served.trace], strict=False) if before == "free"]
        assert held == ["hold"] * len(held)
        assert served.trace.count("free") == len(held)


def test_a_dry_run_changes_nothing(served: Cluster) -> None:
    """And prints what would be sent."""
    served.run(*SERVE, "org/new", "--replace")
    kept(served)
    before = len(served.world.changes)
    ran = served.run("rollback", "--skip-network-check", "--dry-run")

    assert ran.code == 0
    assert "org/old" in ran.out
    assert len(served.world.changes) == before


def test_a_failure_is_told_with_the_server_that_was_to_come_back(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve` tells it."""
    served.run(*SERVE, "org/new", "--replace")
    kept(served)
    path = served.path.parent / "hooks" / "on-failure"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho "$VLAUNCH_MODEL at $VLAUNCH_ENDPOINT: $VLAUNCH_ERROR"\n')
    path.chmod(0o755)
    answers(monkeypatch, "org/old")
    ran = served.run("rollback", "--skip-network-check")

    assert ran.code == 1
    assert "on-failure: org/old at http://10.0.0.11:8000/v1: org/old never answered" in ran.err


def test_nothing_to_return_to(served: Cluster) -> None:
    """Said before anything is touched."""
    before = len(served.world.changes)
    ran = served.run("rollback")

    assert (ran.code, ran.out) == (2, "")
    assert "only the present one has: org/old" in ran.err
    assert len(served.world.changes) == before


def test_a_server_that_does_not_answer_makes_room_for_the_one_before(served: Cluster) -> None:
    """The exit code is that of a failure, and the failure is told."""
    ran = served.run(*SERVE, "org/broken", "--replace", "--or-rollback")

    assert (ran.code, ran.out) == (1, "")
    assert "org/broken did not answer, so org/old (TP=4 PP=1, ray) --seed 7 answers again" in ran.err
    assert "the last line" in ran.err
    assert running(served) == ["org/old"]


def test_without_a_server_before_both_troubles_are_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure first."""
    answers(monkeypatch, "org/broken")
    cluster.run("up")
    ran = cluster.run(*SERVE, "org/broken", "--or-rollback")

    assert ran.code == 1
    assert "org/broken never answered; and the server before does not answer either" in ran.err
    assert "no other server has answered" in ran.err


def test_a_wrong_request_is_no_failure(served: Cluster) -> None:
    """Nothing was touched, so nothing is rolled back."""
    ran = served.run(*SERVE, "org/new", "--or-rollback")

    assert ran.code == 2
    assert "another server runs: org/old" in ran.err
    assert "--or-rollback waits" in served.run(*SERVE, "org/new", "--or-rollback", "--no-wait").err
