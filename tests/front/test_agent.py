"""The agent's changes of HAProxy at run time, with HAProxy."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.front.haproxy import DRAIN, MAINT, READY, STATES, Front, Rotation
from launcher.front.configuration import FrontServer, Replica
from tests.front.running import Running, StandIn, running, wait_for
from tests.ports import free_port

Stage = tuple[Running, StandIn, StandIn, Front]


@pytest.fixture
def stage(haproxy: None) -> Iterator[Stage]:
    """A front with two replicas of one server, and the agent's part."""
    with running(hold=60.0) as (front, first, second):
        front.add_key("any")
        addresses = (f"127.0.0.1:{item.port}" for item in (first, second))
        names = ("chat", "chat.2:gpu02")
        replicas = (Replica(name=n, address=a) for n, a in zip(names, addresses, strict=True))
        front.servers = (FrontServer(name="chat", replicas=tuple(replicas)),)
        front.reload()
        yield front, first, second, connect(front)


def connect(front: Running) -> Front:
    """Return the agent's part of a front."""
    part = Front("")
    part.folder = str(front.folder)
    return part


def until(part: Front, expected: Mapping[str, tuple[str, int]], states: Any = None) -> None:
    """Run rounds until the report is as expected."""

    def matches() -> bool:
        part.tick(states or {})
        if part.report is None:
            return False
        return {n: (r.state, r.requests) for n, r in part.report.items()} == expected

    wait_for(matches)


def ask(front: Running, name: str, **body: Any) -> int:
    """Return the status of a completion."""
    return front.post("/chat/v1/completions", {"id": name, **body}, key="sk-any")[0]


def begin(
    pool: ThreadPoolExecutor, front: Running, part: Front, count: int, delay: float
) -> list[Future[int]]:
    """Begin slow requests one after the other: HAProxy's threads may send two that arrive at the
    same time to one replica.
    """
    slow = []
    for number in range(count):
        slow.append(pool.submit(ask, front, f"slow{number}", delay=delay))

        def runs() -> bool:
            part.tick({})
            return sum(item.requests for item in (part.report or {}).values()) == len(slow)

        wait_for(runs)
    return slow


def answered_by(front: Running, count: int = 8) -> set[int]:
    """Return the ports of the servers that answer new requests."""
    replies = [front.post("/chat/v1/completions", {"id": "x"}, key="sk-any") for _ in range(count)]
    return {content["port"] for _, content in replies}


@pytest.mark.processes
def test_a_drained_replica_finishes_its_requests(stage: Stage) -> None:
    """It gets no new ones; the agent counts those in progress."""
    front, first, second, part = stage
    until(part, {"chat": (READY, 0), "chat.2": (READY, 0)})
    with ThreadPoolExecutor() as pool:
        slow = begin(pool, front, part, 4, delay=10)
        until(part, {"chat": (READY, 2), "chat.2": (READY, 2)})
        until(part, {"chat": (DRAIN, 2), "chat.2": (READY, 2)}, {"chat": DRAIN})
        assert answered_by(front) == {second.port}
        until(part, {"chat": (DRAIN, 0), "chat.2": (READY, 0)})
        assert [item.result() for item in slow] == [200] * 4
    until(part, {"chat": (READY, 0), "chat.2": (READY, 0)}, {"chat": READY})
    assert answered_by(front) == {first.port, second.port}


@pytest.mark.processes
def test_requests_wait_while_the_only_ready_replica_is_changed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one gets them as soon as the agent reports it, before HAProxy's own check."""
    front, first, _, part = stage
    until(part, {"chat": (DRAIN, 0), "chat.2": (MAINT, 0)}, {"chat": DRAIN, "chat.2": MAINT})
    with ThreadPoolExecutor(10) as pool:
        held = [pool.submit(ask, front, f"held{n}") for n in range(10)]
        wait_for(lambda: front.status()["stat"].count("HOLD,0,0,10,"))
        first.kill()
        until(part, {"chat": (MAINT, 0), "chat.2": (MAINT, 0)}, {"chat": MAINT})
        first.start()
        commands: list[str] = []
        query = part._query

        def record(name: str, command: str) -> str:
            commands.append(command)
            return query(name, command)

        monkeypatch.setattr(part, "_query", record)
        until(part, {"chat": (READY, 0), "chat.2": (MAINT, 0)}, {"chat": READY})
        assert [item.result() for item in held] == [200] * 10
    assert "set server chat/chat state ready; set server chat/chat health up" in commands
    assert len(first.ran) == 10


@pytest.mark.processes
@pytest.mark.parametrize("how", ["restart", "reload"])
def test_states_survive(stage: Stage, how: str) -> None:
    """A restart and a reload with another configuration, without the agent."""
    front, _, second, part = stage
    until(part, {"chat": (DRAIN, 0), "chat.2": (READY, 0)}, {"chat": DRAIN})
    until_saved(front, part)
    if how == "restart":
        front.stop()
        until(part, {})
        front.start()
    else:
        front.settings = replace(front.settings, hold=61.0)
        front.reload()
    assert answered_by(front) == {second.port}
    until(connect(front), {"chat": (DRAIN, 0), "chat.2": (READY, 0)})


def until_saved(front: Running, part: Front) -> None:
    """Run rounds until the file of states has one."""

    def is_saved() -> bool:
        part.tick({})
        return bool((front.folder / STATES).read_text())  # or OSError, until it exists

    wait_for(is_saved)


@pytest.mark.processes
def test_a_replica_that_moved_keeps_its_state(stage: Stage) -> None:
    """And gets its requests at the new address once it is ready."""
    front, _, second, part = stage
    until(part, {"chat": (DRAIN, 0), "chat.2": (READY, 0)}, {"chat": DRAIN})
    until_saved(front, part)
    three = StandIn(front.folder, "three", free_port())
    three.start()
    try:
        chat, other = front.servers[0].replicas
        moved = replace(chat, address=f"127.0.0.1:{three.port}")
        front.servers = (FrontServer(name="chat", replicas=(moved, other)),)
        front.reload()
        assert answered_by(front) == {second.port}
        part = connect(front)
        until(part, {"chat": (READY, 0), "chat.2": (READY, 0)}, {"chat": READY})
        assert answered_by(front) == {second.port, three.port}
    finally:
        three.kill()


@pytest.mark.processes
def test_requests_from_before_a_reload_are_counted(stage: Stage) -> None:
    """HAProxy's old worker has them."""
    front, first, second, part = stage
    with ThreadPoolExecutor() as pool:
        slow = begin(pool, front, part, 2, delay=60)
        until(part, {"chat": (READY, 1), "chat.2": (READY, 1)})
        front.settings = replace(front.settings, hold=61.0)
        front.reload()
        until(part, {"chat": (DRAIN, 1), "chat.2": (READY, 1)}, {"chat": DRAIN})
        first.kill()
        until(part, {"chat": (DRAIN, 0), "chat.2": (READY, 1)})
        second.kill()
        assert [item.result() for item in slow] == [502] * 2


@pytest.mark.processes
def test_a_full_disk_costs_only_the_file_of_states(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report goes on, and the file is written once there is room."""
    front, _, _, part = stage

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        until(part, {"chat": (DRAIN, 0), "chat.2": (READY, 0)}, {"chat": DRAIN})
    assert not (front.folder / STATES).exists()
    assert "cannot save the states of the front's replicas: [Errno 28]" in capfd.readouterr().out
    until_saved(front, part)


def test_a_node_without_a_front(tmp_path: Path) -> None:
    """Nothing is reported; a front that does not run has no servers."""
    part = Front(str(tmp_path))
    part.tick({"chat": DRAIN})
    assert part.report is None
    (tmp_path / ".front").mkdir()
    until(part, {})
    assert part.report == {}


def test_a_front_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last report holds, and no round waits."""
    (tmp_path / ".front").mkdir()
    part = Front(str(tmp_path))
    part.report = {"chat": Rotation(state=DRAIN, requests=3)}

    over = threading.Event()

    def hang(*_: str) -> str:
        over.wait(60)
        raise TimeoutError("timed out")

    monkeypatch.setattr(part, "_query", hang)
    for _ in range(3):
        part.tick({})
    sync = part._sync
    assert sync is not None
    assert not sync.done
    over.set()
    wait_for(lambda: sync.done)
    part.tick({})
    assert part.report == {"chat": Rotation(state=DRAIN, requests=3)}
