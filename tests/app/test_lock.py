"""The cluster lock: its programs, run locally, and commands that acquire, await and release it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.app import audit, lock
from launcher.app.lock import Owner
from launcher.cli.main import run_command
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError, UnreadableAnswer
from launcher.core.transport import Command
from launcher.serving.run_start import StartRun
from launcher.serving.start import Replica
from launcher.ssh.fleet import Line
from tests.command_line import ANNA, Cluster, is_locked
from tests.ssh import processes

_TOOLS = ("sh", "head", "mkdir", "date", "sleep", "cat", "rm")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH without `flock`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in _TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def start(state: Path, path: Path | None = None, wait: float = 0) -> subprocess.Popen[bytes]:
    """Start a holder; it exits with its standard input."""
    env = {**os.environ, **({"PATH": str(path)} if path else {})}
    argv = lock.hold_argv(str(state), "c", wait)
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it may have exited already
        process.stdin.write(lock.encode_owner("anna", "laptop", "vlaunch up"))
    return process


def read_output(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def query_lock(state: Path, path: Path | None = None) -> Answer:
    env = {**os.environ, **({"PATH": str(path)} if path else {})}
    done = subprocess.run(
        lock.status_argv(str(state), "c"), env=env, capture_output=True, text=True, check=False
    )
    return Answer(node="gpu01", code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.processes
@pytest.mark.parametrize("flock", [True, False])
def test_the_lock_lasts_until_the_input_ends(flock: bool, tmp_path: Path, path: Path) -> None:
    """With `flock`, or Python's where that is missing; only the owner may read the file."""
    (path / "python3").symlink_to(Path(sys.executable).resolve())
    where = None if flock else path
    with start(tmp_path / "s", where) as holder:
        assert read_output(holder) == "locked"
        owner = lock.parse_status(query_lock(tmp_path / "s", where))
        assert owner is not None
        assert (owner.who, owner.host, owner.command, owner.pid) == (
            "anna",
            "laptop",
            "vlaunch up",
            holder.pid,
        )
        assert stat.S_IMODE((tmp_path / "s/locks/c").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "s/locks").stat().st_mode) == 0o700
        # Docker, perhaps as another user, must have access to its mounts.
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o755
    assert lock.parse_status(query_lock(tmp_path / "s", where)) is None


@pytest.mark.processes
def test_a_head_without_flock_and_python(tmp_path: Path, path: Path) -> None:
    """An error, instead of no lock."""
    with start(tmp_path / "s", path) as holder:
        assert holder.wait(60) == lock.MISSING
        assert holder.stderr is not None
        assert b"neither flock nor python3" in holder.stderr.read()


@pytest.mark.processes
def test_the_loser_gets_the_winners_name(tmp_path: Path) -> None:
    """Exactly one of two gets the lock."""
    with start(tmp_path) as first:
        assert read_output(first) == "locked"
        with start(tmp_path) as second:
            assert read_output(second).startswith("held {")
            assert second.wait(60) == lock.BUSY


@pytest.mark.processes
def test_files_of_a_shared_folder_belong_to_its_group(tmp_path: Path) -> None:
    """Administrators share a folder with its set-group-ID bit."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o2770)
    with start(tmp_path) as holder:
        assert read_output(holder) == "locked"
        assert stat.S_IMODE((tmp_path / "locks/c").stat().st_mode) == 0o660


@pytest.mark.processes
def test_other_processes_are_never_killed(tmp_path: Path) -> None:
    """The file may name an unrelated process; nor is a new owner killed."""
    with start(tmp_path) as holder, subprocess.Popen(["sleep", "60"]) as other:
        assert read_output(holder) == "locked"
        owner = lock.parse_status(query_lock(tmp_path))
        assert owner is not None
        wrong = owner.raw.replace(f'"pid": {holder.pid}', f'"pid": {other.pid}')
        for written, requests, label in ((owner.raw, wrong, "changed"), (wrong, wrong, "stranger")):
            (tmp_path / "locks/c").write_text(written + "\n")
            argv = lock.break_argv(str(tmp_path), "c", lock.parse_owner(requests))
            done = subprocess.run(
                argv, input=lock.encode_owner("eve", "h", "x"), capture_output=True, check=False
            )
            assert (done.returncode, done.stdout.decode().strip()) == (0, label)
        assert (holder.poll(), other.poll()) == (None, None)
        other.kill()


@pytest.mark.processes
def test_a_waiting_process_may_get_a_broken_lock(tmp_path: Path) -> None:
    """It keeps it; breaking has succeeded nevertheless."""
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "flock").write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("flock")} "$@"\n')
    (slow / "flock").chmod(0o755)
    env = {**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"}
    with start(tmp_path) as holder, contextlib.ExitStack() as later:
        assert read_output(holder) == "locked"
        waiter = later.enter_context(start(tmp_path, wait=60))
        assert read_output(waiter).startswith("held {")
        owner = lock.parse_status(query_lock(tmp_path))
        assert owner is not None
        argv = lock.break_argv(str(tmp_path), "c", owner)
        done = subprocess.run(
            argv,
            input=lock.encode_owner("eve", "h", "x"),
            env=env,
            capture_output=True,
            check=False,
            timeout=20,
        )
        assert (done.returncode, done.stdout) == (0, b"freed\n")
        assert (holder.wait(60), waiter.poll()) == (143, None)
        assert read_output(waiter) == "locked"


@pytest.mark.processes
def test_a_long_command_is_cut() -> None:
    """The holder's process stands in the same line, and `lock break` needs it."""
    text = lock.encode_owner("w" * 32, "h" * 64, "\N{GRINNING FACE}" * 5000, "l" * 100)

    assert len(text) < 3900
    assert lock.parse_breaker(text.decode()).command.startswith("\N{GRINNING FACE}")


@pytest.mark.processes
@pytest.mark.parametrize("pid", [0, 1, -1])
def test_invalid_process_numbers(pid: int, tmp_path: Path) -> None:
    """Zero is our own process group, and -1 all processes."""
    with start(tmp_path) as holder:
        assert read_output(holder) == "locked"
        argv = lock.break_argv(str(tmp_path), "c", Owner(pid=pid, raw="x"))
        assert subprocess.run(argv, input=b"x\n", capture_output=True, check=False).returncode == 64
        assert holder.poll() is None


@pytest.mark.processes
@given(
    st.text()
    | st.dictionaries(
        st.sampled_from(["who", "pid", "since", "host"]), st.integers() | st.text()
    ).map(str)
)
def test_any_content_of_the_file(text: str) -> None:
    """Its process may be killed, or is none."""
    owner = lock.parse_owner(text)

    assert owner.pid == 0 or owner.pid > 1
    assert owner.description


@pytest.mark.processes
@pytest.mark.parametrize("pid", ["true", "1", "0", "-1", '"7"', "4294967296", "1e3"])
def test_impossible_process_numbers(pid: str) -> None:
    """They are none."""
    assert lock.parse_owner(f'{{"who": "a", "pid": {pid}}}').pid == 0


@pytest.mark.processes
@pytest.mark.parametrize(("code", "out"), [(0, "what"), (1, "free\n"), (255, ""), (0, "")])
def test_an_empty_answer_is_an_error(code: int, out: str) -> None:
    """It must not count as a free lock."""
    with pytest.raises(UnreadableAnswer):
        lock.parse_status(Answer(node="gpu01", code=code, out=out, err="why"))


def text_of(pid: int) -> str:
    """Return a process's own description."""
    place = lock.identify_process().rpartition(":")[0].rpartition(":")[0]
    return f"{place}:{pid}:{lock._start_time(pid)}"


def test_a_running_launcher_is_alive() -> None:
    """This process, and a child."""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert (
            lock.process_ended(lock.identify_process()),
            lock.process_ended(text_of(child.pid)),
        ) == (False, False)
        child.kill()


def test_an_exited_launcher_is_dead() -> None:
    """Even as a zombie, and if its number was reused."""
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as child:
        text = text_of(child.pid)
        child.kill()
        assert child.stdout is not None
        assert child.stdout.read() == b""
        assert processes.awaited(lambda: lock.process_ended(text), within=120)
    assert lock.process_ended(text)
    assert lock.process_ended(f"{lock.identify_process().rpartition(':')[0]}:1")


def test_with_hidepid_no_launcher_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `hidepid`, other users' processes appear to have exited."""
    text = lock.identify_process()
    for name in ("sys/kernel/random", "self/ns"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_bytes(
        Path("/proc/sys/kernel/random/boot_id").read_bytes()
    )
    (tmp_path / "self/ns/pid").symlink_to(Path("/proc/self/ns/pid").readlink())
    monkeypatch.setattr(lock, "_PROC", tmp_path)

    assert not lock.process_ended(text)
    assert lock.identify_process() == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "::",
        "x:1:2",
        "another-boot:pid:[4026531836]:1:2",
        "{place}::2",
        "{place}:\N{SUPERSCRIPT TWO}:2",
        "{place}:-1:2",
    ],
)
def test_unknown_launchers(text: str) -> None:
    """Another machine, an earlier boot, another container, or invalid text."""
    place = lock.identify_process().rpartition(":")[0].rpartition(":")[0]

    assert not lock.process_ended(text.replace("{place}", place))


def busy(cluster: Cluster) -> None:
    cluster.lock = [Line(node="gpu01", text=f"held {ANNA}"), Answer(node="gpu01", code=75)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "parts", [["up"], ["down"], ["stop"], ["stop", "x"], ["check-nccl"], ["jobs", "remove", "x"]]
)
def test_changes_lock_before_the_first_query(up: Cluster, parts: list[str]) -> None:
    """The plan depends on the queries. The lock is released at the end."""
    up.run(*parts)

    assert up.trace[0] == "hold"
    assert up.trace.count("hold") == 1
    assert up.trace[-1] == "free"


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_start_is_awaited_without_the_lock(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may work while a model loads."""

    def wait(run: StartRun, replica: Replica) -> None:
        up.trace.append("wait")
        run.rows[replica.spec.name] = []

    monkeypatch.setattr(StartRun, "await_answer", wait)
    ran = up.run("serve", "--model", "org/m", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert up.trace[0] == "hold" and up.trace[-2:] == ["free", "wait"]
    assert "gpu01: want" in up.world.verbs()


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_owners_name_is_sanitized(up: Cluster) -> None:
    """Any user with write access may have written the file."""
    wild = json.dumps({"who": "\x1b[2Ja", "host": "b\x07", "since": "\x9b1m", "command": "c"})
    up.lock = [Line(node="gpu01", text=f"held {wild}"), Answer(node="gpu01", code=75)]
    ran = up.run("up")

    assert ran.code == 1
    assert not set("\x1b\x07\x9b") & set(ran.err)


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_heads_error_is_the_evidence(up: Cluster) -> None:
    """A read-only file system, for example: the lock's program prints it before it exits."""
    text = "mkdir: cannot create directory '/root/.vlaunch': Read-only file system"
    up.lock = [Line(node="gpu01", text=text, error=True), Answer(node="gpu01", code=73)]
    ran = up.run("up")

    assert (ran.code, up.world.changes) == (1, [])
    assert text in ran.err


@pytest.mark.processes
def test_a_head_without_a_valid_answer_is_not_awaited(
    up: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any output, or none."""
    monkeypatch.setattr("launcher.app.lock._ANSWER_SECONDS", 0.05)
    up.lock = [Line(node="gpu01", text="what?"), Line(node="gpu01", text="locked", error=True)]
    ran = up.run("up")

    assert (ran.code, up.world.changes) == (1, [])
    assert "did not respond to the lock request within" in ran.err


@pytest.mark.processes
def test_down_without_its_head_takes_no_lock(up: Cluster) -> None:
    """The other nodes are cleaned all the same."""
    up.missing["gpu01"] = ConnectError("gpu01", "cannot be reached: no route to host")
    ran = up.run("down")

    assert (ran.code, up.background_commands) == (1, [])
    assert {command.node for command in up.world.changes} == {"gpu02"}
    assert "continuing without the lock (cannot connect to gpu01)" in ran.err


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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
