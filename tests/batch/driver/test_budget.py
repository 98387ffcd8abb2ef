"""Limits of a job's replicas, the reported shortage, and the counted actors."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest

from launcher.batch.driver import budget, ray_internals
from launcher.batch.driver.budget import Budget, ReplicaCounts


def actor(
    state: str, restarts: int = 0, node: str = "a1", name: str = "MapWorker(MapBatches(Replica))"
) -> ray_internals.Actor:
    """Return an actor as in Ray's table."""
    return ray_internals.parse_actor(
        {
            "ActorClassName": name,
            "State": state,
            "NumRestarts": restarts,
            "Address": {"NodeID": node},
            "Pid": 7,
            "DeathCause": None,
        }
    )


def budgeted(**changes: Any) -> Budget:
    return Budget(**{"restarts": 2, "stall": 60.0, "started": 0.0, **changes})


def test_only_replicas_are_counted() -> None:
    """Without actors of a preprocess stage or of Ray Data itself; an ID of all f is no node."""
    result = budget.count_replicas(
        {
            "1": actor("ALIVE", restarts=1),
            "2": actor("PENDING_CREATION"),
            "3": actor("PENDING_CREATION", node="ffff"),
            "4": actor("RESTARTING", restarts=3),
            "5": actor("ALIVE", name="MapWorker(MapBatches(Preprocess))"),
            "6": actor("DEAD", 2),
        },
        "Replica",
    )
    assert (result.ready, result.placed, result.waiting, result.restarts) == (1, 1, 2, 6)
    assert result.processes == {"1": ("a1", 7)}


def test_restarts_without_a_finished_row_fail_the_job() -> None:
    """A finished row resets the count."""
    watched = budgeted()
    assert watched.judge(1, 10, ReplicaCounts(ready=1, restarts=0)) is None
    assert watched.judge(2, 10, ReplicaCounts(ready=1, restarts=2)) is None
    assert watched.judge(3, 11, ReplicaCounts(ready=1, restarts=2)) is None
    assert watched.judge(4, 11, ReplicaCounts(ready=1, restarts=4)) is None
    ended = watched.judge(5, 11, ReplicaCounts(ready=0, waiting=1, restarts=5))
    assert ended is not None
    assert ended.message == "replicas were restarted 3 times and no row was finished in between"


def test_the_stall_limit() -> None:
    """From the last row, or from the first ready replica: loading does not count."""
    watched = budgeted()
    assert watched.judge(1_000, 0, ReplicaCounts(placed=1)) is None
    assert watched.judge(1_010, 0, ReplicaCounts(ready=1)) is None
    assert watched.judge(1_069, 5, ReplicaCounts(ready=1)) is None
    assert watched.judge(1_128, 5, ReplicaCounts(ready=1)) is None
    ended = watched.judge(1_130, 5, ReplicaCounts(ready=1))
    assert ended is not None
    assert ended.message == "no row was finished for 60 seconds"


def test_loading_has_its_own_limit() -> None:
    """A long one."""
    watched = budgeted()
    assert watched.judge(5_000, 0, ReplicaCounts(waiting=1)) is None
    assert watched.judge(9_000, 0, ReplicaCounts(placed=1)) is None
    assert watched.judge(9_000 + budget.LOAD_TIMEOUT, 0, ReplicaCounts(placed=1)) is None
    ended = watched.judge(9_001 + budget.LOAD_TIMEOUT, 0, ReplicaCounts(placed=1))
    assert ended is not None
    assert ended.message == "no replica was ready within 120 minutes"


def test_replicas_at_the_gate_do_not_count_as_loading() -> None:
    """They keep their GPUs; those of the last replica may be used by another job for days."""
    watched = budgeted(least=2)
    assert watched.judge(0, 0, ReplicaCounts(placed=1, waiting=1)) is None
    assert watched.judge(2 * budget.LOAD_TIMEOUT, 0, ReplicaCounts(placed=1, waiting=1)) is None
    assert watched.judge(2 * budget.LOAD_TIMEOUT, 0, ReplicaCounts(placed=2)) is None
    assert watched.judge(3 * budget.LOAD_TIMEOUT + 1, 0, ReplicaCounts(placed=2)) is not None


def test_the_stall_limit_applies_once_all_replicas_are_up() -> None:
    """Ready replicas get no rows while others load."""
    watched = budgeted(least=2)
    assert watched.judge(100, 0, ReplicaCounts(ready=1, placed=1)) is None
    assert watched.judge(1_000, 0, ReplicaCounts(ready=1, placed=1)) is None
    assert watched.judge(1_001, 0, ReplicaCounts(ready=2)) is None
    assert watched.judge(1_062, 0, ReplicaCounts(ready=2)) is not None


def test_waiting_for_room_may_take_days() -> None:
    """A queued job outlasts other jobs, but not the queue timeout."""
    watched = budgeted()
    assert watched.judge(budget.QUEUE_TIMEOUT, 0, ReplicaCounts(waiting=1)) is None
    ended = watched.judge(budget.QUEUE_TIMEOUT + 1, 0, ReplicaCounts(waiting=1))
    assert ended is not None
    assert ended.message == "no resources were free for a replica within 7 days"


def test_a_waiting_job_reports_the_shortage() -> None:
    """Free and total amounts, and the users by name, without repetition."""
    text = budget.describe_shortage(
        {"GPU": 2.0, "CPU": 1.0},
        2,
        {"CPU": 6.0},
        {"GPU": 2.0, "CPU": 8.0},
        ["serve (2 GPU)", "serve (2 GPU)"],
    )
    assert (
        text
        == "waiting for 2 GPU and 1 CPU for each of 2 replicas; 0 of 2 GPU free, 6 of 8 CPU free;"
        " used by serve (2 GPU)"
    )


def test_an_impossible_demand_is_reported() -> None:
    """No other job uses it: the cluster does not have it."""
    text = budget.describe_shortage(
        {"GPU": 4.0, "CPU": 0.0}, 1, {"GPU": 2.0}, {"GPU": 2.0}, ["serve (1 GPU)"]
    )
    assert (
        text == "waiting for 4 GPU for one replica; 2 of 2 GPU free; all nodes together have fewer"
        " GPU than one replica needs"
    )


class FakeTracker:
    """Fake progress that records its updates."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.loading: list[int] = []

    def set(self, state: str, text: str = "") -> None:
        self.states.append((state, text))

    def replicas(self, ready: int, target: int, loading: int = 0) -> None:
        self.ready = (ready, target)
        self.loading.append(loading)

    def restarted(self, restarts: int) -> None:
        self.restarts = restarts


class JobStub:
    """Fake job with only its limits."""

    class limits:
        restarts = 0
        stall = 60.0


def monitor(replicas: tuple[int, int]) -> budget.ReplicaMonitor:
    return budget.ReplicaMonitor(
        JobStub(), FakeTracker(), "Replica", replicas, {"GPU": 1.0}, budget.CurrentMonitor()
    )


@pytest.fixture
def watch() -> budget.ReplicaMonitor:
    return monitor((1, 2))


def test_states_are_reported_on_change(watch: budget.ReplicaMonitor) -> None:
    """Loading, waiting for the first rows, running."""
    for counts in (
        ReplicaCounts(placed=1),
        ReplicaCounts(placed=1),
        ReplicaCounts(ready=1),
        ReplicaCounts(ready=1),
    ):
        watch.update(counts)
    watch.finished(3)
    watch.update(ReplicaCounts(ready=2))
    assert watch.progress.states == [
        ("loading", "0 of 1 replicas are ready"),
        ("running", "waiting for the first rows"),
        ("running", ""),
    ]
    assert watch.progress.ready == (2, 2)
    assert watch.progress.loading == [1, 1, 0, 0, 0]


def test_a_job_with_an_unplaced_replica_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shortage, although another replica is loaded."""
    monkeypatch.setattr(budget, "query_shortage", lambda needs, replicas: "waiting for 1 GPU")
    watch = monitor((2, 2))
    watch.update(ReplicaCounts(placed=1, waiting=1))
    watch.update(ReplicaCounts(placed=2))

    assert watch.progress.states == [
        ("waiting", "waiting for 1 GPU"),
        ("loading", "0 of 2 replicas are ready"),
    ]


def test_limits_apply_while_ray_is_silent(
    watch: budget.ReplicaMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent store is no reason to wait forever."""

    def actors() -> dict[str, Any]:
        raise ConnectionError("no answer")

    monkeypatch.setattr(watch.table, "query", actors)
    monkeypatch.setattr(budget, "INTERVAL", 0.01)
    watch.last, watch.budget.stall = ReplicaCounts(ready=1), 0.0
    with watch:
        until = time.monotonic() + 60
        while watch.verdict is None and time.monotonic() < until:
            time.sleep(0.01)

    assert watch.verdict is not None
    assert watch.verdict.message.startswith("no row was finished")


def test_an_unanswered_query_does_not_block(
    watch: budget.ReplicaMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock continues; the query is not repeated, and a late answer counts."""
    answered, prompts = threading.Event(), list[int]()

    def actors() -> dict[str, Any]:
        prompts.append(1)
        answered.wait(60)
        return {"1": actor("ALIVE")}

    monkeypatch.setattr(watch.table, "query", actors)
    monkeypatch.setattr(budget, "INTERVAL", 0.01)
    monkeypatch.setattr(budget, "QUERY_TIMEOUT", 0.05)
    watch.last = ReplicaCounts(ready=2)
    with watch:
        until = time.monotonic() + 60
        while not prompts and time.monotonic() < until:
            time.sleep(0.01)
        watch.budget.stall = 0.0
        while watch.verdict is None and time.monotonic() < until:
            time.sleep(0.01)
        silent, times = watch.last, len(prompts)
        answered.set()
        while watch.last == silent and time.monotonic() < until:
            time.sleep(0.01)

    assert watch.verdict is not None
    assert watch.verdict.message.startswith("no row was finished")
    assert (silent.ready, times, watch.last.ready) == (2, 1, 1)


def test_the_verdict_is_final_and_carries_the_cause(watch: budget.ReplicaMonitor) -> None:
    """The first reason stays, with Ray's message about the dead replica."""
    watch.update(ReplicaCounts(ready=1))
    watch.update(ReplicaCounts(waiting=1, restarts=1, causes=("the worker crashed",)))
    verdict = watch.verdict
    assert verdict is not None
    assert verdict.evidence == "the worker crashed"
    watch.update(ReplicaCounts(waiting=1, restarts=9))
    assert watch.verdict is verdict


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("INFO x\n(EngineCore pid=5) ERROR x\n(EngineCore pid=5) KeyError: 1\nINFO y\n", 1),
        (":job_id:01\nINFO x\nINFO y\n", 0),
    ],
)
def test_the_log_of_a_dead_replica(
    monkeypatch: pytest.MonkeyPatch, out: str, expected: int
) -> None:
    """Its exception, else its last lines."""
    state = ModuleType("ray.util.state")
    state.get_log = lambda suffix, **_: [out if suffix == "out" else ""]  # type: ignore[attr-defined]
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.util.state", state)

    assert budget.read_log_end("node", 7) == (
        ["EngineCore pid=5: KeyError: 1"] if expected else ["INFO x", "INFO y"]
    )
