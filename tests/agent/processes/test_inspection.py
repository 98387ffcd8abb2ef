"""Samples of a node's ranks, of real processes, with simulated py-spy and `nvidia-smi`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import records
from launcher.agent.processes import blame, inspection, process
from launcher.agent.processes.inspection import Inspection, InspectionTarget, take_sample
from launcher.agent.processes.node import RUN, LocalServer, Order
from tests.agent.waits import until

WORKER, ENGINE = "VLLM::Worker_DP1_PP1_TP0_EP0", "VLLM::EngineCore_DP1"
LOOP = {"name": "WorkerProc.worker_busy_loop", "short_filename": "vllm/executor.py", "line": 7}
WAIT = {"name": "Queue.get", "short_filename": "queue.py", "line": 171}
STEP = {
    "name": "Worker.execute_model",
    "filename": "/a/worker.py",
    "short_filename": None,
    "line": 2,
}
Spy = Callable[..., None]


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace NCCL's port and `nvidia-smi` by missing ones."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(inspection, "_RAS", unused.getsockname())
    monkeypatch.setattr(inspection, "_NVIDIA", ("no-nvidia-smi",))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A sleeping process in its own session."""
    sleep = subprocess.Popen(["sleep", "60"], start_new_session=True)
    until(lambda: inspection._thread_counters(sleep.pid, sleep.pid)["state"] == "S", "its sleep")
    yield sleep
    sleep.kill()
    sleep.wait()


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The processes' titles."""
    names: dict[int, str] = {}
    monkeypatch.setattr(process, "process_title", lambda pid: names.get(pid, "sleep 60"))
    return names


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """A function that installs a py-spy that prints threads, after `unreadable` failures."""

    def install(*threads: dict[str, Any], unreadable: int = 0) -> None:
        program, answer = tmp_path / "py-spy", tmp_path / "answer.json"
        answer.write_text(json.dumps(threads))
        program.write_text(
            f"#!/bin/sh\necho x >> {tmp_path}/calls\n"
            f'[ "$(wc -l < {tmp_path}/calls)" -gt {unreadable} ]'
            f" || {{ echo 'Error: Failed to copy PyFrameObject'; exit 1; }}; cat {answer}\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(inspection, "PY_SPY", str(program))

    return install


def thread(pid: int, *frames: dict[str, Any]) -> dict[str, Any]:
    """Return a thread as py-spy prints it."""
    return {"os_thread_id": pid, "thread_name": "MainThread", "frames": list(frames)}


def target(
    pid: int | None = None, *pids: int, count: int = 1, argv: tuple[str, ...] = ()
) -> InspectionTarget:
    """Return a target of an inspection."""
    return InspectionTarget(pid, pids, count, None, argv)


def test_rank(sleeper: subprocess.Popen[bytes], titles: dict[int, str], spy: Spy) -> None:
    """Its title has its name; its counters are those of the working thread."""
    pid = sleeper.pid
    titles[pid] = WORKER
    main = {"name": "main", "short_filename": "vllm/main.py", "line": 1}
    spy(thread(1, WAIT), thread(pid, STEP, LOOP, main), thread(2, WAIT, LOOP))

    sample = take_sample(target(pid))

    (rank,) = sample["ranks"]
    assert (rank["rank"], rank["engine"], rank["why"]) == ("DP1 TP0 PP1", False, "")
    assert rank["frames"] == [
        "Worker.execute_model (/a/worker.py:2)",
        "WorkerProc.worker_busy_loop (vllm/executor.py:7)",
    ]
    assert (rank["thread"], rank["state"]) == (pid, "S")
    assert len(sample["bytes"]["lo"]) == 2
    assert records.parse_record(
        blame.NodeSample, {"number": 1, "at": 2.0, **sample}, "inspection"
    ).ranks


def test_helpers(tmp_path: Path) -> None:
    """A rank's child processes count, also after they have exited, but other ranks do not."""
    script = tmp_path / "rank.sh"
    work = "sum(range(20_000_000))"
    script.write_text(f"python3 -c '{work}'; python3 -c '{work}; input()'; true\n")
    with subprocess.Popen(
        ["sh", str(script)], stdin=subprocess.PIPE, start_new_session=True
    ) as rank:

        def both_count() -> bool:
            ranks = {rank.pid, *process.session_pids(rank.pid)}
            alone = inspection._child_ticks({rank.pid})[rank.pid]
            return alone > inspection._child_ticks(ranks)[rank.pid] > 0

        until(both_count, "the ended child alone, and both")
        os.killpg(rank.pid, signal.SIGKILL)


def test_line(
    sleeper: subprocess.Popen[bytes], titles: dict[int, str], spy: Spy, tmp_path: Path
) -> None:
    """The source line of the innermost frame identifies a call into C."""
    program = tmp_path / "gpu_worker.py"
    program.write_text("for handle in work:\n    handle.wait()\n")
    titles[sleeper.pid] = WORKER
    spy(thread(sleeper.pid, {**STEP, "filename": str(program)}, LOOP))

    (rank,) = take_sample(target(sleeper.pid))["ranks"]

    assert rank["line"] == "handle.wait()"
    assert blame.classify_stack(rank["frames"], rank["line"]) == blame.WITH_OTHERS


def test_recorded_dump(titles: dict[int, str], spy: Spy) -> None:
    """The fixture is the output of py-spy 0.4.3 for a rank that spins."""
    recorded = Path(__file__).parents[2] / "fixtures" / "stacks" / "py-spy.json"
    spy(*json.loads(recorded.read_text()))
    titles[os.getpid()] = "VLLM::Worker_TP1"

    (rank,) = take_sample(target(None, os.getpid()))["ranks"]

    assert rank["rank"] == "TP1"
    assert rank["frames"][0] == "_spin_python (sitecustomize.py:7)"
    assert blame.classify_stack(rank["frames"]) == blame.OWN


def test_ranks_of_ray(sleeper: subprocess.Popen[bytes], titles: dict[int, str], spy: Spy) -> None:
    """They are identified by the process numbers from the head, whatever their titles."""
    titles[sleeper.pid] = "ray::RayWorkerProc"
    spy(thread(sleeper.pid, STEP, LOOP))

    first, _ = take_sample(target(None, sleeper.pid, 2**22 + 1))["ranks"]

    assert (first["pid"], first["rank"], first["engine"]) == (sleeper.pid, "", False)


@pytest.mark.parametrize(
    ("pids", "count", "rank"),
    [((), 1, "DP1"), ((), 0, "the engine DP1"), ((2**22 + 1,), 1, "the engine DP1")],
)
def test_engine(
    sleeper: subprocess.Popen[bytes],
    titles: dict[int, str],
    spy: Spy,
    pids: tuple[int, ...],
    count: int,
    rank: str,
) -> None:
    """An engine without workers is a rank; with workers it only schedules."""
    titles[sleeper.pid] = ENGINE
    spy(thread(sleeper.pid, STEP, LOOP))

    ranks = take_sample(target(sleeper.pid, *pids, count=count))["ranks"]

    assert {sample["pid"]: sample for sample in ranks}[sleeper.pid]["rank"] == rank


def test_unreadable_dump(
    sleeper: subprocess.Popen[bytes], titles: dict[int, str], spy: Spy
) -> None:
    """It is repeated a limited number of times."""
    titles[sleeper.pid] = WORKER
    spy(thread(sleeper.pid, STEP, LOOP), unreadable=2)
    assert take_sample(target(sleeper.pid))["ranks"][0]["frames"]

    spy(thread(sleeper.pid, STEP, LOOP), unreadable=99)
    assert (
        take_sample(target(sleeper.pid))["ranks"][0]["why"] == "Error: Failed to copy PyFrameObject"
    )


def test_no_py_spy(
    sleeper: subprocess.Popen[bytes], titles: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample has a reason instead of the stack."""
    titles[sleeper.pid] = WORKER
    monkeypatch.setattr(inspection, "PY_SPY", "/nowhere/py-spy")
    monkeypatch.setenv("PATH", "/nowhere")

    (rank,) = take_sample(target(sleeper.pid))["ranks"]

    assert (rank["frames"], rank["state"]) == ([], "S")
    assert rank["why"].startswith("py-spy is not in the container")


def test_gpus(
    sleeper: subprocess.Popen[bytes],
    titles: dict[int, str],
    spy: Spy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The n-th worker has the n-th GPU of the server."""
    titles[sleeper.pid] = WORKER
    spy(thread(sleeper.pid, STEP, LOOP))
    rows = "0, 3, 0, 60.50, 700.00\n2, 100, 0, 95.12, 700.00\n3, 0, 0, [N/A], [N/A]\n"
    monkeypatch.setattr(inspection, "_NVIDIA", ("printf", rows.replace("%", "%%")))

    sample = take_sample(InspectionTarget(sleeper.pid, (), 1, (2, 3), ()))

    load = {"utilization": 100.0, "memory": 0.0, "power_w": 95.12, "limit_w": 700.0}
    assert sample["ranks"][0]["gpus"] == [{"index": 2, **load}]
    assert sample["gpus"] == []


@pytest.mark.parametrize(("count", "indexes"), [(2, [0, 1]), (1, [])])
def test_gpus_of_ray(
    sleeper: subprocess.Popen[bytes],
    titles: dict[int, str],
    spy: Spy,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    indexes: list[int],
) -> None:
    """They are the node's, unless others have some of them: which rank has which is unknown."""
    titles[sleeper.pid] = "ray::RayWorkerProc"
    spy(thread(sleeper.pid, STEP, LOOP))
    rows = "0, 3, 0, 60.50, 700.00\\n1, 100, 0, 95.12, 700.00\\n"
    monkeypatch.setattr(inspection, "_NVIDIA", ("printf", rows))

    sample = take_sample(target(None, sleeper.pid, count=count))

    assert [gpu["index"] for gpu in sample["gpus"]] == indexes
    assert sample["ranks"][0]["gpus"] == []


RECORDED = Path(__file__).parents[2] / "fixtures" / "gpu-h100"
# From NCCL's user guide (Troubleshooting, RAS).
RAS = """\
NCCL version 2.28.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
"""


@pytest.mark.parametrize(
    ("hello", "notes"),
    [
        (
            "SERVER PROTOCOL 2\n",
            [
                "NCCL RAS: #0-0 (27a079b828ff1a75) MISMATCH",
                "NCCL RAS: Communicator ranks have different collective operation counts",
                "NCCL RAS: 26 ranks have launched up to operation 6650",
                "NCCL RAS: 6 ranks have launched up to operation 6649",
                "NCCL RAS: Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210",
            ],
        ),
        ("HTTP/1.1 400 Bad Request\n", []),
        ("", []),
    ],
)
def test_nccl(monkeypatch: pytest.MonkeyPatch, hello: str, notes: list[str]) -> None:
    """NCCL's RAS reports the communicators that differ, if the library answers."""
    requests: list[str] = []

    def answer() -> None:
        peer, _ = server.accept()
        with peer, peer.makefile("rw", newline="\n") as stream:
            for reply in (hello, "OK\n", RAS):
                requests.append(stream.readline())
                stream.write(reply)
                stream.flush()
                if "PROTOCOL 2" not in hello:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(inspection, "_RAS", server.getsockname())
        answering = threading.Thread(target=answer)
        answering.start()
        result = take_sample(target())["notes"]
        answering.join()

    assert result == notes
    assert requests[0] == "CLIENT PROTOCOL 2\n"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("works", 4),
        ("missing", 4),
        ("stopped", 6),
        ("killed", 9),
    ],
)
def test_recorded_report(name: str, lines: int) -> None:
    """The reports are of NCCL 2.28.9 with two ranks; those of ranks that work may differ, too."""
    wrong = inspection._problem_lines((RECORDED / f"ras-{name}.txt").read_text())

    assert len(wrong) == lines
    assert any("Rank 1 " in line for line in wrong)
    assert not any("=" in line or "RUNNING" in line for line in wrong)


def test_watchdog(
    sleeper: subprocess.Popen[bytes], titles: dict[int, str], spy: Spy, tmp_path: Path
) -> None:
    """Files that vLLM's watchdog wrote for a rank are named."""
    titles[sleeper.pid] = WORKER
    spy()
    path = tmp_path / f"VLLM_STACK_DUMP_for_worker_1_{sleeper.pid}.log"
    path.touch()
    (tmp_path / "VLLM_STACK_DUMP_for_worker_1_1.log").touch()
    settings = json.dumps({"dump_dir": str(tmp_path)})
    argv = ("vllm", "serve", "m", "--watchdog-config", settings)

    notes = take_sample(target(sleeper.pid, argv=argv))["notes"]

    assert notes == [f"vLLM's watchdog wrote {path}"]
    assert take_sample(target(sleeper.pid, argv=("vllm", "serve", "m")))["notes"] == []


def test_sampling_starts_and_stops(
    sleeper: subprocess.Popen[bytes],
    titles: dict[int, str],
    spy: Spy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples are taken as long as there is a target."""
    titles[sleeper.pid] = WORKER
    spy(thread(sleeper.pid, STEP, LOOP))
    monkeypatch.setattr(inspection, "EVERY", 0.01)
    monkeypatch.setattr(inspection, "_SHARE", 1.0)
    sampler = Inspection()
    assert sampler.sample is None

    sampler.tick(target(sleeper.pid))
    until(lambda: sampler.sample and sampler.sample.number > 1, "two samples")
    sampler.tick(None)

    assert sampler.sample is None


def test_a_new_target_during_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread continues, with its pause between two samples."""
    started, finish = threading.Event(), threading.Event()

    def sample(_: InspectionTarget) -> dict[str, Any]:
        started.set()
        finish.wait(60)
        return {}

    monkeypatch.setattr(inspection, "take_sample", sample)
    sampler = Inspection()
    sampler.tick(target(1))
    assert started.wait(60)
    sampler.tick(None)
    sampler.tick(target(2))

    assert not sampler._wake.is_set()
    sampler.tick(None)
    finish.set()


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node samples ranks while its order says so; its report has the sample."""
    sample = {"number": 1, "at": time.monotonic(), "ranks": []}
    monkeypatch.setattr(inspection, "take_sample", lambda _: sample)
    order = Order(generation=1, phase=RUN, inspect=True)
    server = LocalServer("chat", str(tmp_path), order)

    server.tick(order)
    until(lambda: server.report().inspection, "a sample")
    server.tick(Order(generation=1, phase=RUN))

    assert server.report().inspection is None


def test_target_of_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the command of the engine, with the options that the agent added."""
    targets: list[InspectionTarget] = []
    sample = {"number": 1, "at": time.monotonic(), "ranks": []}
    monkeypatch.setattr(inspection, "take_sample", lambda item: [targets.append(item), sample][1])
    order = Order(generation=1, phase=RUN, inspect=True)
    server = LocalServer("chat", str(tmp_path), order)
    server.engine.argv = ("vllm", "serve", "m", "--watchdog-config", "{}")

    server.tick(order)
    until(lambda: targets, "a sample")
    server.tick(None)

    assert targets[0].argv == server.engine.argv


def test_session() -> None:
    """An engine's processes are those of its session."""
    engine = subprocess.Popen(
        [sys.executable, "-S", "-c", "import os, time; os.fork(); time.sleep(60)"],
        start_new_session=True,
    )
    try:
        until(lambda: len(process.session_pids(engine.pid)) == 2, "both processes")
    finally:
        os.killpg(engine.pid, 9)
        engine.wait()
