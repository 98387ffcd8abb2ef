"""The processes of one engine on a node, with a fake vLLM."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.processes import process
from launcher.agent.processes.process import IDLE, RUNNING, STOPPING, LocalEngine
from tests.agent.waits import lives, until

Start = Callable[..., LocalEngine]


def test_descriptions_of_exits() -> None:
    """Including the probable sender of a signal."""
    assert process._describe_exit(3) == "ended with exit code 3"
    assert process._describe_exit(-9) == "was killed by SIGKILL (by hand, or for lack of memory)"
    assert process._describe_exit(-11) == "was killed by SIGSEGV"
    assert process._describe_exit(-99) == "was killed by signal 99"


# ---- real processes ------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program as an engine."""
    created: list[LocalEngine] = []

    def begin(code: str, generation: int = 1, **env: str) -> LocalEngine:
        if not created:
            created.append(LocalEngine("chat", str(tmp_path / "chat" / "engine.log")))
        created[0].start(generation, (sys.executable, "-S", "-u", "-c", code), env)
        return created[0]

    yield begin
    for item in created:
        item.stop(0.0)
        over(item)


def log(engine: LocalEngine) -> str:
    return Path(engine.log).read_text()


def printed(engine: LocalEngine, text: str) -> None:
    """Wait for a text in the engine's output."""
    until(lambda: engine.poll() or text in log(engine), f"it prints {text!r}", lambda: log(engine))


def over(engine: LocalEngine) -> None:
    """Wait until all processes of the engine have exited."""
    until(lambda: engine.poll() or engine.state == IDLE, "it is over")


@pytest.mark.processes
def test_the_log_of_an_engine(start: Start) -> None:
    """Its output, with a marker at every start."""
    code = """if 1:
        import time
        print('(EngineCore_DP0 pid=1) eins')
        print('(Worker_DP1_TP0 pid=1) zwei')
        print('INFO: 127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK')
        print('drei')
        time.sleep(60)"""
    engine = start(code, MARK="x")
    printed(engine, "drei")

    assert log(engine).startswith(f"{process.BEGINS} (generation 1)\n(EngineCore")
    assert (engine.state, engine.ended, engine.last) == (RUNNING, "", 1)


@pytest.mark.processes
def test_an_exited_engine(start: Start) -> None:
    """Its first error is the cause; its output is the evidence."""
    engine = start("print('all is well')\nraise ValueError('the model does not exist')")
    over(engine)

    assert (engine.ended, engine.cause) == (
        "ended with exit code 1",
        "ValueError: the model does not exist",
    )
    assert engine.evidence == "ValueError: the model does not exist"
    assert log(engine).endswith("vlaunch agent: the engine ended with exit code 1\n")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "how"),
    [
        (
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            "VllmWorker-1 was killed by SIGKILL (by hand, or for lack of memory)",
        ),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore':"
            " -11}",
            "EngineCore was killed by SIGSEGV",
        ),
    ],
)
def test_a_killed_process_is_named(start: Start, line: str, how: str) -> None:
    """vLLM's first process ends in order after another one was killed."""
    engine = start(f"print('ERROR 11-24 11:16:45 [x.py:1] ' + {line!r})")
    over(engine)

    assert engine.ended == f"ended with exit code 0: its process {how}"


@pytest.mark.processes
def test_the_kernels_reason(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's count of killed processes has risen; one of earlier kills says nothing."""
    events = tmp_path / "memory.events"
    events.write_text("oom 2\noom_kill 1\noom_group_kill 0\n")
    monkeypatch.setattr(process, "_MEMORY_EVENTS", str(events))
    reason = ": the kernel killed a process of this container for lack of memory"

    engine = start("print('well')\nraise SystemExit(3)")
    over(engine)
    assert engine.ended == "ended with exit code 3"
    engine = start(f"open({str(events)!r}, 'w').write('oom_kill 2')\nraise SystemExit(3)", 2)
    over(engine)
    assert engine.ended == f"ended with exit code 3{reason}"


@pytest.mark.processes
def test_request_logs_are_no_evidence(start: Start) -> None:
    """A healthy log ends with requests and counters."""
    engine = start(
        "print('loading')\n"
        "print('INFO:     10.0.0.1:4 - \"GET /metrics HTTP/1.1\" 200 OK')\n"
        "print('INFO Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s')"
    )
    over(engine)

    assert engine.evidence == "loading"


@pytest.mark.processes
def test_the_exception_comes_first_in_the_evidence(start: Start) -> None:
    """With the head of its traceback, which names the process, before its consequences."""
    lines = (
        "EngineDeadError: EngineCore encountered an issue.",
        "ray.exceptions.RayTaskError(ValueError): ray::RayWorkerProc.load() (pid=7, ip=10.0.0.2)",
        "ValueError: x",
    )
    engine = start(f"print({chr(10).join(lines)!r})")
    over(engine)

    assert engine.evidence.splitlines() == [*lines[1:], lines[0]]


@pytest.mark.processes
def test_errors_before_an_answer_are_ignored(start: Start) -> None:
    """An engine that is killed later did not die of them."""
    engine = start("import time\nprint('KeyError: 1')\ntime.sleep(60)")
    until(lambda: engine.cause == "KeyError: 1", "it is seen")
    engine.mark_healthy()
    os.kill(engine.pid or 0, signal.SIGKILL)
    over(engine)

    assert (engine.ended, engine.cause) == (
        "was killed by SIGKILL (by hand, or for lack of memory)",
        "",
    )
    assert engine.evidence == "KeyError: 1"  # its last lines, without an error among them


@pytest.mark.processes
def test_validation_errors_include_the_reason(start: Start) -> None:
    """pydantic prints it on the line after the error's name, which the agent must not drop."""
    text = (
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\\n  Value error, no such"
        " model [type=x]"
    )
    engine = start(f"print('{text}'); raise SystemExit(1)")
    over(engine)

    assert engine.cause == "Value error, no such model"


@pytest.mark.processes
def test_a_missing_program(tmp_path: Path) -> None:
    """It has exited at once, with the system's error; the next one may exist."""
    engine = LocalEngine("chat", str(tmp_path / "chat" / "engine.log"))
    engine.start(1, ("/no/vllm", "serve"), {})

    assert (engine.state, engine.ended, engine.last) == (
        IDLE,
        "cannot be started: /no/vllm: No such file or directory",
        1,
    )
    assert "cannot be started" in log(engine)
    engine.start(2, (sys.executable, "-c", ""), {})
    over(engine)
    assert engine.ended == "ended with exit code 0"


LEAVES = """if 1:
    import os, signal, subprocess, sys, time
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('deaf', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-S", "-c", deaf], start_new_session=True)
    child = subprocess.Popen(["sleep", "60"])
    print("children", other.pid, child.pid, flush=True)
    time.sleep(60)"""


def children_of(engine: LocalEngine) -> list[int]:
    """Return the process numbers that LEAVES prints."""
    printed(engine, "deaf")
    printed(engine, "children")
    (line,) = [line for line in log(engine).splitlines() if line.startswith("children")]
    return [int(part) for part in line.split()[1:]]


@pytest.mark.processes
def test_an_engine_stops_with_its_children(start: Start) -> None:
    """Politely first; processes that ignore SIGTERM or have left the session are killed at the
    deadline.
    """
    engine = start(LEAVES)
    remaining = children_of(engine)
    first = engine.pid or 0
    engine.stop(0.3)
    assert engine.state == STOPPING
    over(engine)

    assert [lives(pid) for pid in (first, *remaining)] == [False] * 3
    assert (engine.ended, engine.pid) == ("", None)


@pytest.mark.processes
def test_children_of_a_killed_engine_are_stopped(start: Start) -> None:
    """Its workers would occupy the memory that the next engine needs."""
    engine = start(LEAVES)
    remaining = children_of(engine)
    engine._grace = 0.3
    os.kill(engine.pid or 0, signal.SIGKILL)
    over(engine)

    assert [lives(pid) for pid in remaining] == [False] * 2
    assert "SIGKILL" in engine.ended


@pytest.mark.processes
def test_a_frozen_engine_stops_politely(start: Start) -> None:
    """It is resumed to receive the signal."""
    wakes = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('bye'),"
        " exit(0)))\nprint('here')\ntime.sleep(60)"
    )
    engine = start(wakes)
    printed(engine, "here")
    os.kill(engine.pid or 0, signal.SIGSTOP)
    engine.stop(20.0)
    over(engine)

    printed(engine, "bye")


@pytest.mark.processes
def test_other_engines_are_not_stopped(start: Start, tmp_path: Path) -> None:
    """Other servers run on the node, and other containers may show their processes."""
    sleep = "import time; print('here'); time.sleep(60)"
    first, other = start(sleep), LocalEngine("embed", str(tmp_path / "embed" / "engine.log"))
    other.start(1, (sys.executable, "-S", "-u", "-c", sleep), {})
    printed(other, "here")
    first.stop(0.0)
    over(first)

    assert lives(other.pid or 0)
    other.stop(0.0)
    over(other)


@pytest.mark.processes
def test_the_log_is_rotated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old log is retained."""
    monkeypatch.setattr(process, "_LOG", 5000)
    engine = start("for at in range(2000): print('x' * 90, at)")
    over(engine)
    until(lambda: Path(engine.log).stat().st_size < 75_000, "it is short")

    assert Path(f"{engine.log}.1").stat().st_size < 75_000
    assert sorted(path.name for path in Path(engine.log).parent.iterdir()) == [
        "engine.log",
        "engine.log.1",
    ]


@pytest.mark.processes
def test_a_full_disk_stops_no_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is still read: a full pipe would block it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process.os, "makedirs", full)
    engine = start("for at in range(9000): print('x' * 90, at)\nraise KeyError(1)")
    over(engine)

    assert (engine.cause, engine.ended) == ("KeyError: 1", "ended with exit code 1")


@pytest.mark.processes
def test_old_logs_of_nccl_are_removed(start: Start, tmp_path: Path) -> None:
    """This engine's logs would be confused with them."""
    for name in ("nccl.host.1", "nccl.host.2", "other"):
        (tmp_path / name).write_text("old")
    over(start("", NCCL_DEBUG_FILE=str(tmp_path / "nccl.%h.%p")))

    assert [path.name for path in sorted(tmp_path.iterdir())] == ["chat", "other"]


def test_stopped_processes_are_listed(start: Start) -> None:
    """By its session or its PID, with its title, until it continues."""
    engine = start("import time; print('it runs'); time.sleep(60)")
    printed(engine, "it runs")
    pid = engine.pid
    assert pid is not None
    assert process.stopped_processes(pid, ()) == []
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process.stopped_processes(pid, ()), "it is stopped")
    for session, pids in ((pid, ()), (None, (pid,))):
        (text,) = process.stopped_processes(session, pids)
        assert text.startswith(f"process {pid} ({sys.executable} -S")
    assert process.stopped_processes(None, (1,)) == []
    os.kill(pid, signal.SIGCONT)
    until(lambda: not process.stopped_processes(pid, ()), "it continues")
