"""The processes of one engine on a node, with stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent import process
from launcher.agent.process import IDLE, RUNNING, STOPPING, LocalEngine
from tests.agent.waits import lives, until

Start = Callable[..., LocalEngine]


def test_words_for_an_end() -> None:
    """People ask who killed it."""
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
    """Wait until the engine has printed something."""
    until(lambda: engine.poll() or text in log(engine), f"it prints {text!r}", lambda: log(engine))


def over(engine: LocalEngine) -> None:
    """Wait until nothing of the engine runs."""
    until(lambda: engine.poll() or engine.state == IDLE, "it is over")


@pytest.mark.processes
def test_what_an_engine_prints(start: Start) -> None:
    """Is its log, which says where each one begins."""
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
def test_an_engine_that_ends(start: Start) -> None:
    """Says how, with its first error as the cause; what it printed is the evidence."""
    engine = start("print('all is well')\nraise ValueError('the model does not exist')")
    over(engine)

    assert (engine.ended, engine.cause) == (
        "ended with exit code 1",
        "ValueError: the model does not exist",
    )
    assert engine.evidence == "ValueError: the model does not exist"
    assert log(engine).endswith("vlaunch agent: the engine ended with exit code 1\n")


@pytest.mark.processes
def test_what_an_engine_is_asked_is_no_evidence(start: Start) -> None:
    """Its log ends with that, and with counters, while nothing is wrong."""
    engine = start(
        "print('loading')\n"
        "print('INFO:     10.0.0.1:4 - \"GET /metrics HTTP/1.1\" 200 OK')\n"
        "print('INFO Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s')"
    )
    over(engine)

    assert engine.evidence == "loading"


@pytest.mark.processes
def test_the_exception_comes_first_in_the_evidence(start: Start) -> None:
    """With the head of the traceback, which says whose it is, before what only reports it."""
    lines = (
        "EngineDeadError: EngineCore encountered an issue.",
        "ray.exceptions.RayTaskError(ValueError): ray::RayWorkerProc.load() (pid=7, ip=10.0.0.2)",
        "ValueError: x",
    )
    engine = start(f"print({chr(10).join(lines)!r})")
    over(engine)

    assert engine.evidence.splitlines() == [*lines[1:], lines[0]]


@pytest.mark.processes
def test_what_looked_like_an_error_before_it_was_well(start: Start) -> None:
    """Is none that mattered: an engine that is killed later did not die of it."""
    engine = start("import time\nprint('KeyError: 1')\ntime.sleep(60)")
    until(lambda: engine.cause == "KeyError: 1", "it is seen")
    engine.mark_healthy()
    os.kill(engine.pid or 0, signal.SIGKILL)
    over(engine)

    assert (engine.ended, engine.cause) == (
        "was killed by SIGKILL (by hand, or for lack of memory)",
        "",
    )
    assert engine.evidence == "KeyError: 1"  # its last lines, for want of better


@pytest.mark.processes
def test_what_is_wrong_is_told_with_a_validation(start: Start) -> None:
    """pydantic says it on the line after the error's name, which the agent must not forget."""
    text = (
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\\n  Value error, no such"
        " model [type=x]"
    )
    engine = start(f"print('{text}'); raise SystemExit(1)")
    over(engine)

    assert engine.cause == "Value error, no such model"


@pytest.mark.processes
def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """Has ended at once, with the words of the system; the next one may be there."""
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
    """Return the numbers that LEAVES prints."""
    printed(engine, "deaf")
    printed(engine, "children")
    (line,) = [line for line in log(engine).splitlines() if line.startswith("children")]
    return [int(part) for part in line.split()[1:]]


@pytest.mark.processes
def test_all_of_an_engine_ends(start: Start) -> None:
    """Politely first; what ignores that, or has left the session, is killed when its time is
    over.
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
def test_what_a_killed_engine_leaves_ends_too(start: Start) -> None:
    """Its workers would hold the memory that the next one needs."""
    engine = start(LEAVES)
    remaining = children_of(engine)
    engine._grace = 0.3
    os.kill(engine.pid or 0, signal.SIGKILL)
    over(engine)

    assert [lives(pid) for pid in remaining] == [False] * 2
    assert "SIGKILL" in engine.ended


@pytest.mark.processes
def test_an_engine_that_is_frozen_ends_politely(start: Start) -> None:
    """It is woken to hear that it should."""
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
def test_engines_of_other_agents_and_generations_are_left_alone(
    start: Start, tmp_path: Path
) -> None:
    """Other servers run here, and other containers may show their processes."""
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
def test_the_log_does_not_grow_without_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put aside once; what was there before goes."""
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
def test_a_disk_that_is_full_ends_no_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is still read: a full pipe would block it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process.os, "makedirs", full)
    engine = start("for at in range(9000): print('x' * 90, at)\nraise KeyError(1)")
    over(engine)

    assert (engine.cause, engine.ended) == ("KeyError: 1", "ended with exit code 1")


@pytest.mark.processes
def test_logs_of_nccl_are_of_this_engine(start: Start, tmp_path: Path) -> None:
    """Those of one that is gone would be read as its own."""
    for name in ("nccl.host.1", "nccl.host.2", "other"):
        (tmp_path / name).write_text("old")
    over(start("", NCCL_DEBUG_FILE=str(tmp_path / "nccl.%h.%p")))

    assert [path.name for path in sorted(tmp_path.iterdir())] == ["chat", "other"]
