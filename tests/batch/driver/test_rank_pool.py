"""Ranks as processes: placement, deadlines, blame for failures, and cleanup."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import rank_pool
from launcher.batch.driver.job_file import Failed, parse_job
from launcher.batch.driver.rank import RankProcess, RankSettings
from launcher.batch.driver.results import Converter


class Died(Exception):
    """Ray's exception for an exited actor."""


class Ref:
    """A reference to a call's result; a pending one never resolves."""

    def __init__(self, value: Any = None, *, pending: bool = False) -> None:
        self.value, self.pending = value, pending


class Method:
    """A method of an actor, or a function, called on a node."""

    def __init__(self, ray: Ray, node: str, name: str) -> None:
        self.ray, self.node, self.name = ray, node, name

    def remote(self, *args: Any) -> Ref:
        self.ray.called.append((self.node, self.name, args))
        return self.ray.answers(self.node, self.name, args)


class Remote:
    """A fake of `ray.remote` on a class or a function."""

    def __init__(self, ray: Ray, what: Any) -> None:
        self.ray, self.what = ray, what
        self.actor_options: dict[str, Any] = {}

    def options(self, **kwargs: Any) -> Remote:
        remote = Remote(self.ray, self.what)
        remote.actor_options = kwargs
        return remote

    def remote(self, *args: Any) -> Any:
        node = self.actor_options["scheduling_strategy"]
        if not isinstance(self.what, type):
            return Method(self.ray, node, self.what.__name__).remote(*args)
        self.ray.started.append((node, self.actor_options["num_gpus"], args[1]))
        return SimpleNamespace(
            **{name: Method(self.ray, node, name) for name in ("hello", "load", "answer")},
            node=node,
        )


class Ray(ModuleType):
    """A fake with two nodes; calls return their entry of `results` at once."""

    exceptions = SimpleNamespace(RayActorError=Died, NodeDiedError=Died, OutOfMemoryError=Died)

    def __init__(self) -> None:
        super().__init__("ray")
        self.started: list[tuple[str, float, bool]] = []
        self.called: list[tuple[str, str, tuple[Any, ...]]] = []
        self.killed: list[str] = []
        self.results: dict[tuple[str, str], Ref] = {}

    def answers(self, node: str, name: str, args: tuple[Any, ...]) -> Ref:
        usual = {
            "hello": RankProcess(pid=len(node) + 1000, log=f"/logs/{node}"),
            "read_tail": [f"end of {args}"],
            "kill_group": [],
        }
        return self.results.get((node, name), Ref(usual.get(name, args)))

    def nodes(self) -> list[dict[str, Any]]:
        calls = [("one", "10.0.0.1", True), ("two", "10.0.0.2", True), ("gone", "10.0.0.3", False)]
        return [
            {"NodeID": name, "NodeManagerAddress": ip, "Alive": alive} for name, ip, alive in calls
        ]

    def remote(self, what: Any) -> Remote:
        return Remote(self, what)

    def wait(
        self, refs: list[Ref], num_returns: int, timeout: float
    ) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if not ref.pending]
        if len(ready) < min(1, num_returns):
            time.sleep(timeout)
        return ready[:num_returns], []

    def get(self, ref: Ref, timeout: float) -> Any:
        assert timeout
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.node)


class Progress:
    """Fake progress that records its updates."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.warned: list[str] = []

    def set(self, state: str, text: str) -> None:
        self.states.append((state, text))

    def replicas(self, ready: int, target: int, loading: int = 0) -> None:
        self.states.append((ready, target))

    def warn(self, text: str) -> None:
        self.warned.append(text)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """A fake of Ray."""
    module = Ray()
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr(rank_pool, "node_affinity", lambda node: node)
    monkeypatch.setattr(rank_pool, "GRACE", 0.01)
    return module


@pytest.fixture
def progress() -> Progress:
    """The recorded progress."""
    return Progress()


def hired(
    progress: Progress, *, timeout: float = 60.0, ips: tuple[str, ...] = ("10.0.0.1", "10.0.0.2")
) -> rank_pool.RankPool:
    """A pool for a job on two nodes."""
    job = parse_job(
        {
            "job": "j",
            "cluster": "c",
            "mode": "data-parallel",
            "work": "/w",
            "engine": {"tp": 2, "pp": 2},
            "read": {"paths": ["/i"], "format": "jsonl"},
            "limits": {"stall": 0.05},
            "data_parallel": {"size": 2, "timeout": timeout},
            "rank_port": 1,
            "write": "/o",
        }
    )
    return rank_pool.RankPool(
        Converter(job, {}),
        [rank_pool.RankSlot(rank=rank, ip=ip) for rank, ip in enumerate(ips)],
        progress,
        together=True,
    )


SETTINGS = [RankSettings(arguments={"rank": 0}), RankSettings(arguments={"rank": 1})]


def test_ranks_start_on_their_nodes_with_their_settings(ray: Ray, progress: Progress) -> None:
    """With a whole rank's accelerators, and progress reports."""
    with hired(progress) as pool:
        pool.start(SETTINGS, "two of them")

    assert ray.started == [("one", 4, True), ("two", 4, True)]
    loads = [call for call in ray.called if call[1] == "load"]
    assert loads == [("one", "load", (SETTINGS[0],)), ("two", "load", (SETTINGS[1],))]
    assert progress.states == [
        (0, 2),
        ("waiting", "two of them: waiting for 4 free accelerators for each"),
        (0, 2),
        ("loading", "two of them"),
        (2, 2),
        ("running", "two of them"),
    ]


def test_no_process_of_the_ranks_remains(ray: Ray, progress: Progress) -> None:
    """For any outcome they are killed, and their nodes cleaned up; survivors are reported."""
    ray.results["one", "kill_group"] = Ref(["processes of a rank are still there: 7"])
    ray.results["two", "kill_group"] = Ref(Died("The node died."))

    with pytest.raises(ZeroDivisionError), hired(progress) as pool:
        pool.start(SETTINGS, "")
        raise ZeroDivisionError

    assert ray.killed == ["one", "two"]
    assert [(node, args[0]) for node, name, args in ray.called if name == "kill_group"] == [
        ("one", 1003),
        ("two", 1003),
    ]
    assert progress.warned[0] == "processes of a rank are still there: 7"
    assert progress.warned[1].startswith("could not check a node")


def test_a_node_missing_in_ray_is_named(ray: Ray, progress: Progress) -> None:
    """Even if it was in Ray before."""
    with pytest.raises(Failed, match=r"rank 1 on 10.0.0.3: Ray has no such node") as failed:
        hired(progress, ips=("10.0.0.1", "10.0.0.3")).start(SETTINGS, "")

    assert failed.value.evidence == "Ray's nodes: 10.0.0.1, 10.0.0.2"
    assert ray.started == []


def test_ranks_answer_in_submission_order(ray: Ray, progress: Progress) -> None:
    """Answers have the call's tag; a busy rank does not block another."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    ray.results["one", "answer"] = Ref(pending=True)
    pool.submit(0, "slow", [{}])
    pool.submit(1, "first", [{}])
    pool.submit(1, "second", [{}])

    assert pool.finished() == [(1, "first", ([{}],))]
    assert pool.finished() == [(1, "second", ([{}],))]
    assert (pool.load(0), pool.load(1), pool.busy) == (1, 0, True)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("hello", "rank 1 on 10.0.0.2 has not started within 0.05 s", "vlaunch jobs"),
        ("load", "rank 1 on 10.0.0.2 has not loaded the model within 0.05 s", "limits.stall"),
    ],
)
def test_starting_and_loading_have_a_longer_deadline(
    ray: Ray,
    progress: Progress,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    message: str,
    hint: str,
) -> None:
    """A rank may queue for its place for days, and then load for `limits.stall`."""
    monkeypatch.setattr(rank_pool, "QUEUE_TIMEOUT", 0.05)
    ray.results["two", name] = Ref(pending=True)

    with pytest.raises(Failed, match=message) as failed, hired(progress) as pool:
        pool.start(SETTINGS, "")
    assert hint in failed.value.hint
    assert ray.killed == ["one", "two"]


def test_a_rank_that_takes_too_long_is_named_with_its_log(ray: Ray, progress: Progress) -> None:
    """With other unanswered ranks: they may wait for it, or it for them."""
    pool = hired(progress, timeout=0.05)
    pool.start(SETTINGS, "")
    ray.results = {("one", "answer"): Ref(pending=True), ("two", "answer"): Ref(pending=True)}
    pool.submit(0, None, [{}, {}])
    pool.submit(1, None, [])

    with pytest.raises(
        Failed, match=r"rank 0 on 10.0.0.1 has not answered 2 rows within 0.05 s"
    ) as failed:
        pool.finished()
    assert failed.value.evidence == "end of ('/logs/one', 400)\nnor has rank 1 on 10.0.0.2"
    assert "data_parallel.timeout" in failed.value.hint


def test_time_runs_from_the_start_of_a_call(ray: Ray, progress: Progress) -> None:
    """Not from its submission behind the rank's other calls."""
    pool = hired(progress, timeout=3)
    pool.start(SETTINGS, "")
    pool.submit(0, "first", [])
    ray.results["one", "answer"] = Ref(pending=True)
    pool.submit(0, "second", [])
    pool.tasks[0][1].began -= 100

    assert [tag for _, tag, _ in pool.finished()] == ["first"]
    assert time.monotonic() - pool.tasks[0][0].began < 100
    with pytest.raises(Failed, match="within"):
        pool.finished()


def test_a_dead_rank_explains_the_rank_that_lost_it(ray: Ray, progress: Progress) -> None:
    """It is named with the end of its log and Ray's message, and so is the other one."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    died = (
        "The actor is dead.\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly"
        " exits."
    )
    ray.results = {
        ("one", "answer"): Ref(RuntimeError("the peer is gone")),
        ("two", "answer"): Ref(Died(died)),
    }
    pool.submit(0, None, [{}])
    pool.submit(1, None, [{}])

    with pytest.raises(Failed, match=r"rank 1 on 10.0.0.2 ended: its process was killed") as failed:
        pool.finished()
    assert failed.value.evidence.splitlines() == [
        "end of ('/logs/two', 400)",
        "Ray: Worker unexpectedly exits.",
        "rank 0 on 10.0.0.1 then failed too: RuntimeError: the peer is gone",
    ]
    assert "run the job again" in failed.value.hint


def test_a_warning_is_no_cause_of_a_killed_rank(ray: Ray, progress: Progress) -> None:
    """vLLM continues after it; the log of a killed process ends anywhere."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    ray.results = {
        ("two", "answer"): Ref(Died("The actor is dead.\nWorker unexpectedly exits.")),
        ("two", "read_tail"): Ref(["WARNING utils.cpp:76 numa_migrate_pages failed. errno: 1"]),
    }
    pool.submit(1, None, [])

    with pytest.raises(Failed, match=r"rank 1 on 10.0.0.2 ended: its process was killed"):
        pool.finished()


def test_a_recognized_cause_is_explained(ray: Ray, progress: Progress) -> None:
    """It may be in the log only; the engine's failure adds no information."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    ray.results = {
        ("two", "answer"): Ref(RuntimeError("Engine core failed")),
        ("two", "read_tail"): Ref(
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
        ),
    }
    pool.submit(1, None, [])

    with pytest.raises(Failed, match=r"rank 1 on 10.0.0.2 failed: .*out of memory") as failed:
        pool.finished()
    assert "gpu_memory_utilization" in failed.value.hint
    assert (
        failed.value.evidence
        == "rank 1 on 10.0.0.2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )


def test_the_same_error_of_two_ranks_is_reported_once(ray: Ray, progress: Progress) -> None:
    """From either log, for example for a wrong argument."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    failed = RuntimeError("Engine core initialization failed. See root cause above.")
    ray.results = {(node, "answer"): Ref(failed) for node in ("one", "two")} | {
        (node, "read_tail"): Ref([f"(EngineCore pid={pid}) KeyError: 'x'"])
        for node, pid in (("one", 7), ("two", 8))
    }
    pool.submit(0, None, [])
    pool.submit(1, None, [])

    with pytest.raises(Failed, match=r"rank 0 on 10.0.0.1 failed: KeyError: 'x'") as raised:
        pool.finished()
    assert raised.value.evidence == "rank 1 on 10.0.0.2 failed with the same error"


def test_an_unreadable_log_hides_no_failure(ray: Ray, progress: Progress) -> None:
    """Its node may be lost."""
    pool = hired(progress)
    pool.start(SETTINGS, "")
    ray.results = {
        ("two", "answer"): Ref(RuntimeError("Engine core failed")),
        ("two", "read_tail"): Ref(Died("The node died.")),
    }
    pool.submit(1, None, [])

    with pytest.raises(Failed, match="failed: RuntimeError: Engine core failed") as failed:
        pool.finished()
    assert failed.value.evidence == "(its log /logs/two cannot be read: Died: The node died.)"


def test_the_ranks_meet_at_a_free_port(ray: Ray, progress: Progress) -> None:
    """On the first rank's node; a port other than the job's is reported."""
    ray.results["one", "free_port"] = Ref(29600)
    assert hired(progress).port(29600) == 29600
    assert progress.warned == []

    ray.results["one", "free_port"] = Ref(29608)
    assert hired(progress).port(29600) == 29608
    assert progress.warned == ["port 29600 on 10.0.0.1 is in use: the ranks meet at 29608"]


def test_a_free_port_is_followed_by_free_ports() -> None:
    """Sockets in TIME_WAIT from an earlier run do not count."""
    with socket.socket() as first, socket.socket() as client:
        start = rank_pool.free_port(20_000)  # below the dynamic ports
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("", start))
        first.listen()
        assert rank_pool.free_port(start) != start
        assert rank_pool.free_port(start - rank_pool.PORT_COUNT + 1) > start

        client.connect(("127.0.0.1", start))
        accepted, _ = first.accept()
        accepted.close()  # the side that closes first waits
        first.close()
        assert rank_pool.free_port(start) == start


def test_remaining_processes_of_a_group_are_killed() -> None:
    """All of its processes except zombies."""
    script = "sleep 300 & sleep 300 & echo up; wait"
    leader = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    try:
        assert leader.stdout.readline() == b"up\n"
        assert len(rank_pool.group_members(leader.pid)) == 3

        assert rank_pool.kill_group(leader.pid, 10) == []

        assert rank_pool.group_members(leader.pid) == []
        assert leader.stdout.read() == b""  # closed by all processes
        assert leader.wait(60) == -signal.SIGKILL
        assert rank_pool.kill_group(leader.pid, 10) == []
    finally:
        leader.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait(60)


def test_surviving_processes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the kernel cannot be killed."""
    monkeypatch.setattr(rank_pool, "group_members", lambda group: [7, 8])
    monkeypatch.setattr(os, "killpg", lambda group, signal: None)

    assert rank_pool.kill_group(7, 0.1) == ["processes of a rank are still there: 7 8"]
