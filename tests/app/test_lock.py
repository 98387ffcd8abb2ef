"""The lock's programs, run locally, and parsers of their answers."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.app import lock
from launcher.app.lock import Owner
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
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
