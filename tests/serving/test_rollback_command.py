"""`vlaunch rollback`, and `serve --or-rollback`: the choice of the server, and the errors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from launcher.core.errors import (
    DeadlineError,
    GateError,
    ServerError,
    StoppedError,
    UnwatchedError,
    VlaunchError,
)
from launcher.serving.run_start import StartRun
from launcher.serving.start import Replica
from tests.command_line import Cluster

SERVE = ("serve", "--skip-network-check", "--model")


def answers(monkeypatch: pytest.MonkeyPatch, *silent: str) -> None:
    """Let every server answer at once except those of some models."""

    def wait(run: StartRun, replica: Replica) -> None:
        model = replica.spec.model
        if model in silent:
            raise GateError(
                f"{model} never answered", evidence="the last line", hint="read the log"
            )
        run.rows[replica.spec.name] = [f"endpoint of {model}"]

    monkeypatch.setattr(StartRun, "await_answer", wait)


def fails(
    monkeypatch: pytest.MonkeyPatch,
    error: VlaunchError,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    after: int = 0,
) -> None:
    """Let the first wait fail, after an action; all later ones end with the exit code `after`."""
    errors = [error]

    def wait(run: StartRun, replica: Replica) -> None:
        if not errors:
            run.code, run.rows[replica.spec.name] = after, []
            return
        failure = errors.pop()
        meanwhile()
        raise failure

    monkeypatch.setattr(StartRun, "await_answer", wait)


def record_answer(cluster: Cluster, name: str = "default") -> None:
    """Add the present spec to the history, newest first, like the supervisor."""
    files = cluster.world.machines["gpu01"].files
    before = json.loads(files.get(f"server/{name}/history.json", b"[]"))
    answered = {"at": 1.0, "desired": json.loads(files[f"server/{name}/desired.json"])}
    files[f"server/{name}/history.json"] = json.dumps([answered, *before]).encode()


def running(cluster: Cluster) -> list[str]:
    return [server["desired"]["model"] for server in cluster.world.servers()]


OLD = "org/old (TP=4 PP=1, ray) --seed 7"


@pytest.fixture
def served(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster on which org/old has answered."""
    answers(monkeypatch, "org/broken")
    cluster.run("up")
    assert cluster.run(*SERVE, "org/old", "--tp", "4", "--pp", "1", "--", "--seed", "7").code == 0
    record_answer(cluster)
    return cluster


def test_the_previous_server_is_started_again(served: Cluster) -> None:
    """With its model, arguments and parallelism, in place of the present one."""
    (old,) = served.world.servers()
    assert served.run(*SERVE, "org/new", "--replace").code == 0
    record_answer(served)
    ran = served.run("rollback", "--skip-network-check")
    (again,) = served.world.servers()

    assert ran.code == 0, ran.err
    assert ran.out == "endpoint of org/old\n"
    assert f"back to {OLD}" in ran.err
    assert (again["desired"]["id"], again["desired"]["processes"]) == (
        old["desired"]["id"],
        old["desired"]["processes"],
    )


def test_other_servers_stay(served: Cluster) -> None:
    """Histories are per name; with several servers, the name is required."""
    second = (
        "--name",
        "chat",
        "--port",
        "8001",
        "--backend",
        "mp",
        "--tp",
        "2",
        "--pp",
        "1",
        "--nodes",
        "gpu02",
    )
    assert served.run(*SERVE, "org/chat", *second).code == 0
    record_answer(served, "chat")
    assert served.run(*SERVE, "org/chat2", *second, "--replace").code == 0
    record_answer(served, "chat")
    which, alone = served.run("rollback"), served.run("rollback", "default")
    both = served.run("rollback", "chat", "--server", "default")
    ran = served.run("rollback", "--server", "chat", "--skip-network-check")

    assert which.code == 2
    assert "2 servers have answered before: `chat`, `default`" in which.err
    assert (alone.code, "only the current one has: org/old" in alone.err) == (2, True)
    assert (both.code, "--server default and chat differ" in both.err) == (2, True)
    assert ran.code == 0, ran.err
    assert running(served) == ["org/chat", "org/old"]
    assert served.world.servers()[0]["desired"]["places"] == {"gpu02": 2}


def test_rollback_after_a_stop(served: Cluster) -> None:
    """Without a spec, the previous server is the last one that answered."""
    served.unwant()

    assert served.run("rollback", "--skip-network-check").code == 0
    assert running(served) == ["org/old"]


def test_the_query_runs_under_the_lock(served: Cluster) -> None:
    """History and spec are stable under it; while a model loads, others may take it."""
    served.run(*SERVE, "org/new", "--replace")
    record_answer(served)
    for args in (
        ("rollback", "--skip-network-check"),
        (*SERVE, "org/broken", "--replace", "--or-rollback"),
    ):
        served.trace.clear()
        served.run(*args)
        owners = [
            event
            for event, before in zip(served.trace, ["free", *served.trace], strict=False)
            if before == "free"
        ]
        assert owners == ["hold"] * len(owners)
        assert served.trace.count("free") == len(owners)


def test_a_dry_run_changes_nothing(served: Cluster) -> None:
    """It prints the commands."""
    served.run(*SERVE, "org/new", "--replace")
    record_answer(served)
    before = len(served.world.changes)
    ran = served.run("rollback", "--skip-network-check", "--dry-run")

    assert ran.code == 0
    assert "org/old" in ran.out
    assert len(served.world.changes) == before


def test_a_failure_names_the_previous_server(
    served: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `serve`."""
    served.run(*SERVE, "org/new", "--replace")
    record_answer(served)
    path = served.path.parent / "hooks" / "on-failure"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho "$VLAUNCH_MODEL at $VLAUNCH_ENDPOINT: $VLAUNCH_ERROR"\n')
    path.chmod(0o755)
    answers(monkeypatch, "org/old")
    ran = served.run("rollback", "--skip-network-check")

    assert ran.code == 1
    assert "on-failure: org/old at http://10.0.0.11:8000/v1: org/old never answered" in ran.err


def test_no_previous_server(served: Cluster) -> None:
    """The error comes before any change."""
    before = len(served.world.changes)
    ran = served.run("rollback")

    assert (ran.code, ran.out) == (2, "")
    assert "only the current one has: org/old" in ran.err
    assert len(served.world.changes) == before


def test_a_failed_start_is_rolled_back(served: Cluster) -> None:
    """The exit code is a failure's, and the error is reported."""
    ran = served.run(*SERVE, "org/broken", "--replace", "--or-rollback")

    assert (ran.code, ran.out) == (1, "")
    assert f"org/broken failed to start; rolled back to {OLD}, which is ready" in ran.err
    assert "the last line" in ran.err
    assert running(served) == ["org/old"]


def test_without_a_previous_server_both_errors_are_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure first."""
    answers(monkeypatch, "org/broken")
    cluster.run("up")
    ran = cluster.run(*SERVE, "org/broken", "--or-rollback")

    assert ran.code == 1
    assert "org/broken never answered; rollback failed too: no other server has answered" in ran.err
    assert "hint: read the log" in ran.err


def test_an_invalid_request_is_not_rolled_back(served: Cluster) -> None:
    """The cluster is unchanged."""
    ran = served.run(*SERVE, "org/new", "--or-rollback")

    assert ran.code == 2
    assert "server `default` is already running org/old" in ran.err
    assert (
        "--or-rollback cannot be combined"
        in served.run(*SERVE, "org/new", "--or-rollback", "--no-wait").err
    )


def test_a_failed_rollback(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both errors are reported; the hint is about the last start."""
    answers(monkeypatch, "org/broken", "org/old")
    ran = served.run(*SERVE, "org/broken", "--replace", "--or-rollback")

    assert ran.code == 1
    assert (
        "org/broken never answered; the previous server failed to start too: org/old never"
        " answered" in ran.err
    )
    assert running(served) == ["org/old"]


@pytest.mark.parametrize(
    "error",
    [
        StoppedError("the server was stopped while it was being watched"),
        UnwatchedError(
            "lost contact with server `default`",
            hint="the server may still be running",
        ),
    ],
)
def test_other_ends_are_not_rolled_back(
    served: Cluster, monkeypatch: pytest.MonkeyPatch, error: ServerError
) -> None:
    """An operator's stop, or an unknown state: reported, without a start or stop."""
    fails(monkeypatch, error)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert ran.code == 1
    assert f"error: {error.message}\n" in ran.err
    assert running(served) == ["org/new"]


def test_a_server_of_another_operator_stays(
    served: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This operator's server may have failed, but another operator has replaced it."""
    ours = ServerError(
        "the server did not start: out of memory",
        hint="ask for less\nremove what is left: `vlaunch stop`",
    )
    fails(monkeypatch, ours, lambda: replaced(served))
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert ran.code == 1
    assert (
        "out of memory; rollback skipped: another operator has started org/theirs there" in ran.err
    )
    assert "hint: ask for less" in ran.err
    assert "vlaunch stop" not in ran.err
    assert running(served) == ["org/theirs"]


def replaced(cluster: Cluster) -> None:
    assert cluster.run(*SERVE, "org/theirs", "--replace", "--no-wait").code == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_failure_after_an_operators_stop(
    served: Cluster, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """A stopping engine looks broken; under the lock its state is certain."""

    def ended() -> None:
        served.world.observed["default"] = {"state": "failed"}
        if stopped:
            served.unwant()

    fails(monkeypatch, ServerError("the server cannot go on: EngineDeadError"), ended)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert ran.code == 1
    assert ("rollback skipped: another operator has stopped it" in ran.err) is stopped
    assert running(served) == ([] if stopped else ["org/old"])


def test_a_server_stopped_for_its_network_is_rolled_back(
    served: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This operator's own command stopped it."""
    fails(monkeypatch, GateError("its network is below the required level"), served.unwant)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert f"org/new failed to start; rolled back to {OLD}, which is ready" in ran.err
    assert running(served) == ["org/old"]


def test_a_rejected_start_is_not_rolled_back(served: Cluster) -> None:
    """The old server still runs."""
    batch = {
        "submission_id": "b-1",
        "status": "RUNNING",
        "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": "8"},
    }
    served.world.jobs.append(batch)
    before = len(served.world.changes)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert ran.code == 1
    assert "GPUs are free in Ray" in ran.err
    assert "rollback skipped: org/old is running" in ran.err
    assert len(served.world.changes) == before


def test_the_hint_is_about_the_running_server(
    served: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a timeout the late server is gone; a stop would hit the old one."""
    late = DeadlineError(
        "no answer from the server within 9s",
        hint="it goes on: watch it, or end it with `vlaunch stop`",
    )
    fails(monkeypatch, late)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert ran.code == 1
    assert "org/new failed to start; rolled back to org/old" in ran.err
    assert "vlaunch stop" not in ran.err
    assert "hint: try again with `vlaunch serve --replace`" in ran.err
    assert running(served) == ["org/old"]


def test_an_interrupted_rollback(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the old server starts: it continues, in an unknown state."""
    fails(monkeypatch, ServerError("the server did not start"), after=130)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert f"the server did not start; {OLD} was started again\n" in ran.err
    assert "rolled back to" not in ran.err


def test_a_lost_rollback_is_no_failure(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old server may well answer."""
    errors = [
        UnwatchedError("the server cannot be watched any more"),
        ServerError("the server did not start"),
    ]

    def wait(run: StartRun, replica: Replica) -> None:
        raise errors.pop()

    monkeypatch.setattr(StartRun, "await_answer", wait)
    ran = served.run(*SERVE, "org/new", "--replace", "--or-rollback")

    assert f"{OLD} was started again, but the server cannot be watched any more" in ran.err
    assert "failed to start too" not in ran.err
