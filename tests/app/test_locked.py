"""The cluster lock around commands: acquisition, waits, and, with real local processes, release."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.app import audit, lock
from launcher.cli.main import run_command
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.ssh.fleet import Line
from tests.command_line import ANNA, Cluster, is_locked
from tests.ssh import processes

pytestmark = pytest.mark.processes


def busy(cluster: Cluster) -> None:
    cluster.lock = [Line(node="gpu01", text=f"held {ANNA}"), Answer(node="gpu01", code=75)]


@pytest.mark.parametrize(
    "parts", [["up"], ["down"], ["stop"], ["stop", "x"], ["check-nccl"], ["jobs", "remove", "x"]]
)
def test_changes_lock_before_the_first_query(up: Cluster, parts: list[str]) -> None:
    """The plan depends on the queries. The lock is released at the end."""
    up.run(*parts)

    assert up.trace[0] == "hold"
    assert up.trace.count("hold") == 1
    assert up.trace[-1] == "free"


@pytest.mark.parametrize(
    "parts",
    [
        ["up", "--dry-run"],
        ["down", "--dry-run"],
        ["stop", "--dry-run"],
        ["status"],
        ["jobs"],
        ["serve", "--dry-run", "--model=m"],
    ],
)
def test_queries_take_no_lock(up: Cluster, parts: list[str]) -> None:
    """Even while another operator works."""
    busy(up)
    up.run(*parts)

    assert up.background_commands == []
    assert up.commands


def test_a_start_is_awaited_without_the_lock(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may work while a model loads."""

    def wait(*_: object, **__: object) -> tuple[int, list[str]]:
        up.trace.append("wait")
        return 0, []

    monkeypatch.setattr("launcher.serving.start._wait_for_answer", wait)
    ran = up.run("serve", "--model", "org/m", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert up.trace[0] == "hold" and up.trace[-2:] == ["free", "wait"]
    assert "gpu01: want" in up.world.verbs()


def test_another_operator_is_named_and_nothing_is_touched(up: Cluster) -> None:
    """User, host, time and command, and the fix."""
    busy(up)
    ran = up.run("up")

    assert (ran.code, up.world.changes, up.commands) == (1, [], [])
    assert (
        "error: gpu01: cluster c is locked by another operator: anna@laptop since"
        " 2026-11-21T21:00:05Z (`vlaunch up`)" in ran.err
    )
    assert "hint: wait for it: `--lock-wait 600`" in ran.err
    assert "vlaunch lock break" in ran.err


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("", ["--lock-wait", "60"]),
        ("lock_wait: 60\n", []),
        ("lock_wait: 60\n", ["--lock-wait", "5"]),
    ],
)
def test_waiting_is_shown_and_ends_with_the_lock(up: Cluster, extra: str, parts: list[str]) -> None:
    """With the owner's name, then the command continues: the longer of flag and key counts."""
    up.lock = [Line(node="gpu01", text=f"held {ANNA}"), Line(node="gpu01", text="locked")]
    up.path.write_text(extra + up.path.read_text())
    ran = up.run("up", *parts)

    assert ran.code == 0
    assert "waiting: the cluster's lock, held by anna@laptop since" in ran.err
    assert (
        ran.err.index("anna@laptop")
        < ran.err.index("acquired the cluster's lock")
        < ran.err.index("Scan the nodes")
    )


def test_the_owners_name_is_sanitized(up: Cluster) -> None:
    """Any user with write access may have written the file."""
    wild = json.dumps({"who": "\x1b[2Ja", "host": "b\x07", "since": "\x9b1m", "command": "c"})
    up.lock = [Line(node="gpu01", text=f"held {wild}"), Answer(node="gpu01", code=75)]
    ran = up.run("up")

    assert ran.code == 1
    assert not set("\x1b\x07\x9b") & set(ran.err)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            Answer(node="gpu01", code=73, err="mkdir: cannot create: Read-only file system"),
            "Read-only file system",
        ),
        (
            Answer(node="gpu01", code=69, err="neither flock nor python3 is installed"),
            "apt-get install util-linux",
        ),
        (
            Answer(node="gpu01", code=255, err="the connection was lost"),
            "run the same command again: the connection to gpu01 was lost",
        ),
    ],
)
def test_without_a_lock_only_cleanup_continues(up: Cluster, answer: Answer, text: str) -> None:
    """`down` continues without the lock, and reports it."""
    up.lock = [answer]
    ran = up.run("up")

    assert (ran.code, up.world.changes) == (1, [])
    assert "cannot take the cluster's lock" in ran.err and text in ran.err

    up.lock = [answer]
    ran = up.run("down")

    assert ran.code == 0
    assert "continuing without the lock" in ran.err


def test_the_heads_error_is_the_evidence(up: Cluster) -> None:
    """A read-only file system, for example: the lock's program prints it before it exits."""
    text = "mkdir: cannot create directory '/root/.vlaunch': Read-only file system"
    up.lock = [Line(node="gpu01", text=text, error=True), Answer(node="gpu01", code=73)]
    ran = up.run("up")

    assert (ran.code, up.world.changes) == (1, [])
    assert text in ran.err


def test_a_head_without_a_valid_answer_is_not_awaited(
    up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any output, or none."""
    monkeypatch.setattr("launcher.app.locked._ANSWER_SECONDS", 0.05)
    up.lock = [Line(node="gpu01", text="what?"), Line(node="gpu01", text="locked", error=True)]
    ran = up.run("up")

    assert (ran.code, up.world.changes) == (1, [])
    assert "did not respond to the lock request within" in ran.err


def test_down_without_its_head_takes_no_lock(up: Cluster) -> None:
    """The other nodes are cleaned all the same."""
    up.missing["gpu01"] = ConnectError("gpu01", "cannot be reached: no route to host")
    ran = up.run("down")

    assert (ran.code, up.background_commands) == (1, [])
    assert {command.node for command in up.world.changes} == {"gpu02"}
    assert "continuing without the lock (cannot connect to gpu01)" in ran.err


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_lost_lock_stops_the_command(cluster: Cluster, verb: str) -> None:
    """Before its next step, even in a cleanup: another operator may have the lock."""
    if verb == "down":
        assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    handler = cluster.world.answer

    def losing(command: Command) -> Answer | None:
        answer = handler(command)
        if cluster.world.changes:
            cluster.background[-1].over = Answer(
                node="gpu01", code=255, err="the connection was lost"
            )
        return answer

    cluster.world.answer = losing  # type: ignore[method-assign]
    ran = cluster.run(verb)

    assert ran.code == 1
    assert "lost the cluster's lock with the connection; stopped before the next step" in ran.err
    # All of the wave in progress, and no later one.
    assert len({command.node for command in cluster.world.changes}) == len(cluster.world.changes)


def test_lock_and_audit_cost_one_round_trip(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is one command on the head; audit lines travel with the first step."""
    cluster.run("up")  # probes the image once
    cluster.run("down")
    for saved in (cluster.trace, cluster.background_commands, cluster.commands):
        saved.clear()
    cluster.run("up")
    with_lines = cluster.trace.count("run")
    assert (cluster.trace.count("hold"), len(cluster.background_commands)) == (1, 1)
    assert any(command.preamble for command in cluster.commands)
    cluster.run("down")
    cluster.trace.clear()
    monkeypatch.setattr(audit.Recorder, "record", lambda *_: {})
    cluster.run("up")

    assert cluster.trace.count("run") == with_lines


def test_two_launchers_at_once(
    local_cluster: Path,
    launch: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One works; the other is rejected with the owner's name, or waits."""
    first = launch("down", "--yes")
    assert processes.awaited((local_cluster / "asked").exists)

    assert run_command(["stop"]) == 1
    err = capsys.readouterr().err
    assert "cluster c is locked by another operator: anna@" in err
    assert "(`vlaunch down --yes`)" in err

    assert run_command(["lock"]) == 0
    assert capsys.readouterr().out.startswith("c: held by anna@")
    second = launch("stop", "--lock-wait", "60", user="bob")
    assert second.stderr is not None
    assert any("waiting: the cluster's lock, held by anna@" in line for line in second.stderr)
    (local_cluster / "go").touch()

    assert (first.wait(60), second.wait(60)) == (1, 0)  # `down` needs Docker
    assert not is_locked(capsys)


def test_a_killed_launcher_frees_the_lock(
    local_cluster: Path,
    launch: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kernel releases it; the text in the file stays, without effect."""
    first = launch("down", "--yes")
    assert processes.awaited((local_cluster / "asked").exists)
    assert is_locked(capsys)
    first.send_signal(signal.SIGKILL)

    assert processes.awaited(lambda: not is_locked(capsys), within=120)
    assert "anna" in (local_cluster / "state/locks/c").read_text()
    (local_cluster / "go").touch()
    assert run_command(["stop"]) == 0


@pytest.mark.parametrize("alive", [True, False])
def test_a_dead_local_launchers_lock_is_taken_over(
    alive: bool, local_cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head may not have noticed its closed connection; a running launcher keeps the lock."""
    (local_cluster / "go").touch()
    with subprocess.Popen(["true"]) as ended:
        gone = lock.identify_process().replace(f":{os.getpid()}:", f":{ended.pid}:")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        lock.hold_argv(f"{local_cluster}/state", "c"), stdin=pipe, stdout=pipe
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(
            lock.encode_owner(
                "anna", "laptop", "vlaunch up", lock.identify_process() if alive else gone
            )
        )
        holder.stdin.flush()
        assert holder.stdout.readline() == b"locked\n"
        code, err = run_command(["stop"]), capsys.readouterr().err

        assert code == (1 if alive else 0), err
        assert (holder.poll() is None) is alive
        assert ("taking over the lock of a dead process: anna@laptop since" in err) is not alive
