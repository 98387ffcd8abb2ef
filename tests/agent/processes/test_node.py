"""Orders of the supervisor on a node, with real programs as engines, or none."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent.processes import gpu, leftovers, node
from launcher.agent.processes.node import (
    KEEP,
    NOTHING,
    PREPARE,
    RUN,
    LocalNode,
    LocalServer,
    Order,
    ServerReport,
)
from launcher.agent.processes.process import RUNNING
from tests.agent.waits import lives, until

SLEEP = (sys.executable, "-S", "-c", "import time; print('it runs', flush=True); time.sleep(60)")


@pytest.fixture
def local_node(tmp_path: Path) -> Iterator[LocalNode]:
    """A node without engines; reasons to restart its container are in `lost`."""
    lost: list[str] = []
    created = LocalNode(str(tmp_path), private_shm=False, on_gpus_lost=lost.append)
    created.why = lost  # type: ignore[attr-defined]
    yield created
    until(created.stop_all, "it ends")


def turn(present: LocalNode, name: str, true: Any, **orders: Order) -> ServerReport:
    """Run turns until a condition on a server's report holds; repeat the orders in every turn."""
    report = NOTHING

    def holds() -> object:
        nonlocal report
        present.orders = orders
        present.tick()
        report = present.report().get(name, NOTHING)
        return true(report)

    until(holds, name, lambda: report)
    return report


# ---- before a start ------------------------------------------------------------------------------


def test_a_start_waits_for_memory(local_node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the process; memory is freed gradually, so two measurements must agree."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    says = ["held by x", "", "held by x", "", ""]
    looked: list[tuple[object, ...]] = []

    def room(*args: object) -> tuple[int, str]:
        looked.append(args)
        return 3, says.pop(0) if says else ""

    monkeypatch.setattr(gpu, "free_gpus", room)
    order = Order(generation=4, phase=PREPARE, argv=SLEEP, share=0.9, count=2, gpus=(0, 1, 2))
    text = turn(local_node, "chat", lambda report: report.waits, chat=order)
    assert (text.waits, text.prepared, text.room) == ("held by x", 0, (4, 3))
    assert looked[0] == (0.9, (0, 1, 2), 2)

    turn(local_node, "chat", lambda report: report.prepared == 4, chat=order)
    assert says == []

    says[:] = ["held by y"] * 9
    order = Order(generation=5, phase=PREPARE, share=0.9, count=2)
    turn(local_node, "chat", lambda report: report.waits, chat=order)
    local_node.orders = {"chat": Order(generation=5, phase=KEEP)}
    local_node.tick()
    assert local_node.report()["chat"].waits == ""


def test_a_start_without_a_need_for_memory(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that may hang is not queried."""
    monkeypatch.setattr(gpu, "free_gpus", lambda *_: pytest.fail("asked"))
    local_node.orders = {"chat": Order(generation=4, phase=PREPARE, argv=SLEEP)}
    local_node.tick()

    assert local_node.report()["chat"].prepared == 4


def test_a_hanging_driver(local_node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent continues, and does not query it again meanwhile."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    requests: list[int] = []
    over = threading.Event()
    monkeypatch.setattr(
        gpu, "free_gpus", lambda *_: requests.append(1) or (over.wait(60) and None) or (8, "")
    )
    local_node.orders = {"chat": Order(generation=4, phase=PREPARE, argv=SLEEP, share=0.9)}
    for _ in range(20):
        local_node.tick()

    assert (requests, over.is_set()) == ([1], False)
    over.set()


def test_lost_gpus_restart_the_container(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if no working server would be affected."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)

    def gone(*_: object) -> str:
        raise gpu.GpuLost("Failed to initialize NVML")

    monkeypatch.setattr(gpu, "free_gpus", gone)
    order = Order(generation=1, phase=PREPARE, argv=SLEEP, share=0.9)
    text = turn(local_node, "chat", lambda report: report.waits, chat=order)
    until(lambda: local_node.tick() or local_node.why, "it is lost")  # type: ignore[attr-defined, func-returns-value]

    assert (
        text.waits
        == local_node.why[0]
        == "this container has lost its GPUs: Failed to initialize NVML"
    )  # type: ignore[attr-defined]


HANDLE = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 5",
            "the NVIDIA driver was upgraded but not loaded: run `sudo reboot` on this node:"
            " Failed to initialize NVML: Driver/library version mismatch",
        ),
        (
            f"0, GPU-a, 81559, 10\n{HANDLE}",
            f"the driver has lost a GPU: run `sudo reboot` on this node: {HANDLE}",
        ),
    ],
)
def test_what_a_restart_cannot_mend_restarts_no_container(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch, messages: str, reason: str
) -> None:
    """Docker could not start it again: the start waits for a reboot, and says so."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(gpu.children, "run", lambda *_: (18, messages))
    order = Order(generation=1, phase=PREPARE, argv=SLEEP, share=0.9, count=2)
    text = turn(local_node, "chat", lambda report: report.waits, chat=order)
    for _ in range(20):
        local_node.tick()

    assert text.waits == reason
    assert (text.prepared, local_node.why) == (0, [])  # type: ignore[attr-defined]


def test_gpus_that_work_allow_another_restart(
    local_node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last restart has helped."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "free_gpus", lambda *_: (1, ""))
    (tmp_path / node.RESTARTED).touch()
    order = Order(generation=1, phase=PREPARE, argv=SLEEP, share=0.9, count=1)
    turn(local_node, "chat", lambda report: report.prepared == 1, chat=order)

    assert not (tmp_path / node.RESTARTED).exists()


def test_lost_gpus_do_not_stop_ranks_of_ray(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no engines of this agent, and may still compute."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)

    def gone(*_: object) -> str:
        raise gpu.GpuLost("Failed to initialize NVML")

    monkeypatch.setattr(gpu, "free_gpus", gone)
    neighbour = Order(generation=1, phase=KEEP, pids=(os.getpid(),))
    turn(local_node, "embed", lambda report: report.ranks, embed=neighbour)
    order = Order(generation=1, phase=PREPARE, argv=SLEEP, share=0.9, count=1)
    turn(local_node, "chat", lambda report: report.waits, chat=order, embed=neighbour)
    for _ in range(20):
        local_node.tick()

    assert local_node.why == []  # type: ignore[attr-defined]
    local_node.servers["embed"].order = Order(generation=1, phase=KEEP)
    local_node.servers["embed"]._pids = ()


def test_new_gpus_are_checked_before_a_start(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may have reserved other GPUs than the free ones."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    full = {(2,): "GPU 2 is held"}
    monkeypatch.setattr(gpu, "free_gpus", lambda _, gpus, __: (1, full.get(gpus, "")))
    order = Order(generation=4, phase=PREPARE, argv=SLEEP, share=0.9, count=1)
    turn(local_node, "chat", lambda report: report.prepared == 4, chat=order)
    local_node.orders = {"chat": dataclasses.replace(order, gpus=(2,))}
    local_node.tick()
    assert local_node.report()["chat"].prepared == 0
    text = turn(local_node, "chat", lambda report: report.waits, **local_node.orders)

    assert (text.waits, text.prepared) == ("GPU 2 is held", 0)


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.processes
def test_an_engine_is_started_once(local_node: LocalNode) -> None:
    """Orders describe a state: a repeated order changes nothing, and "run on" starts nothing."""
    local_node.orders = {"chat": Order(generation=1, phase=KEEP, argv=SLEEP)}
    local_node.tick()
    assert local_node.report() == {}

    run = Order(generation=1, phase=RUN, argv=SLEEP)
    pid = turn(local_node, "chat", lambda report: report.pid, chat=run).pid
    text = turn(
        local_node,
        "chat",
        lambda report: report.pid,
        chat=Order(generation=1, phase=KEEP, argv=SLEEP),
    )
    assert (text.pid, text.state, text.last) == (pid, "running", 1)

    os.kill(pid, 9)
    text = turn(local_node, "chat", lambda report: report.state == "idle", chat=run)
    local_node.tick()
    assert text.ended.startswith("was killed by SIGKILL")
    assert local_node.report()["chat"].state == "idle"
    turn(
        local_node,
        "chat",
        lambda report: report.state == "running" and report.last == 2,
        chat=Order(generation=2, phase=RUN, argv=SLEEP),
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "then",
    [
        None,
        Order(generation=2, phase=PREPARE, argv=SLEEP),
        Order(generation=2, phase=KEEP, argv=SLEEP),
    ],
)
def test_an_engine_without_an_order_is_stopped(local_node: LocalNode, then: Order | None) -> None:
    """Its spec was removed, or another engine is about to start."""
    pid = turn(
        local_node,
        "chat",
        lambda report: report.pid,
        chat=Order(generation=1, phase=RUN, argv=SLEEP),
    ).pid
    turn(
        local_node,
        "chat",
        lambda report: report.state == "idle",
        **({"chat": then} if then else {}),
    )

    assert not lives(pid)
    assert list(local_node.report()) == (["chat"] if then else [])


@pytest.mark.processes
def test_a_stopped_process_is_reported(
    local_node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it continues: of the engine, or of a rank that Ray has placed on this node."""
    monkeypatch.setattr(node, "_CHECK_SECONDS", 0.0)
    order = Order(generation=1, phase=RUN, argv=SLEEP)
    pid = turn(local_node, "chat", lambda report: report.pid, chat=order).pid
    assert pid is not None
    orders = {"chat": order, "embed": Order(generation=1, phase=KEEP, pids=(pid,))}
    os.kill(pid, signal.SIGSTOP)
    for name in orders:
        report = turn(local_node, name, lambda report: report.stopped, **orders)
        assert report.stopped[0].startswith(f"process {pid} (")
    os.kill(pid, signal.SIGCONT)
    for name in orders:
        turn(local_node, name, lambda report: not report.stopped, **orders)


@pytest.mark.processes
def test_servers_are_independent(local_node: LocalNode) -> None:
    """They have their own processes, logs and orders."""
    run = Order(generation=1, phase=RUN, argv=SLEEP)
    first = turn(local_node, "chat", lambda report: report.pid, chat=run, embed=run).pid
    second = local_node.report()["embed"].pid
    turn(local_node, "chat", lambda report: report == NOTHING, embed=run)

    assert (lives(first), lives(second)) == (False, True)
    assert local_node.report()["embed"].state == "running"


def test_only_a_new_answer_clears_errors(tmp_path: Path) -> None:
    """The same count of answers proves nothing about lines printed since."""
    server = LocalServer("chat", str(tmp_path), Order(generation=1, phase=RUN, argv=SLEEP))
    server.engine.state = RUNNING
    cleared: list[int] = []
    for answers in (0, 1, 1, 2):
        server.engine.mark_healthy = lambda at=answers: cleared.append(at)  # type: ignore[method-assign]
        server._note_answers(SimpleNamespace(answers=answers))  # type: ignore[arg-type]

    assert cleared == [1, 2]


@pytest.mark.processes
def test_shared_memory_is_swept_after_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if /dev/shm is the container's own."""
    swept: list[bool] = []
    for private in (False, True):
        monkeypatch.setattr(
            leftovers, "remove_leftovers", lambda private=private: swept.append(private)
        )
        created = LocalNode(str(tmp_path / str(private)), private_shm=private, on_gpus_lost=print)
        turn(
            created,
            "chat",
            lambda report: report.pid,
            chat=Order(generation=1, phase=RUN, argv=SLEEP),
        )
        turn(created, "chat", lambda report: report == NOTHING)

    assert swept == [True]


@pytest.mark.processes
@pytest.mark.parametrize(
    "then", [None, Order(generation=2, phase=PREPARE, grace=0.2)], ids=["stopped", "again"]
)
def test_hanging_ranks_of_ray_are_killed(local_node: LocalNode, then: Order | None) -> None:
    """Their driver has exited, and Ray cannot reach them; reused process numbers are left alone."""
    hang = (
        "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(1,"
        " flush=True); time.sleep(60)"
    )
    started = []
    for title in ("ray::RayWorkerProc", "python3"):
        renamed = f'exec -a {title} {sys.executable} -S -c "{hang}"'
        process = subprocess.Popen(["bash", "-c", renamed], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
    local_node.orders = {
        "chat": Order(generation=1, phase=KEEP, pids=tuple(item.pid for item in started), grace=0.2)
    }
    local_node.tick()
    orders = {"chat": then} if then else {}
    assert turn(local_node, "chat", lambda report: report.state == "stopping", **orders)
    turn(local_node, "chat", lambda report: report.state == "idle", **orders)

    assert started[0].wait(60) == -9
    assert started[1].poll() is None
    started[1].kill()
    started[1].wait()
    for element in started:
        assert element.stdout is not None
        element.stdout.close()
