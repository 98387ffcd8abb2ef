"""Monitor of a job's replicas: their number, the resources they wait for, and the restart limit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...agent import cause
from ..job import PlacedJob
from .job_file import Failed
from .progress import Tracker
from .ray_internals import Actor, query_actors

INTERVAL = 2.0  # seconds between checks
LOAD_TIMEOUT = 7200.0  # seconds for the first replica to load the model, once it is placed
QUEUE_TIMEOUT = 7 * 86400.0  # seconds to wait for resources that other jobs hold
QUERY_TIMEOUT = 10  # seconds for a query to Ray
LINES = 15  # lines shown of a dead replica's log
# Ray's actor states: running, and starting
UP_STATES = ("ALIVE",)
STARTING_STATES = ("PENDING_CREATION", "RESTARTING", "DEPENDENCIES_UNREADY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """The replicas at one moment.

    `placed` counts those that have a process somewhere but still load.
    """

    ready: int = 0
    placed: int = 0
    waiting: int = 0
    restarts: int = 0
    # running actor → node and pid
    processes: Mapping[str, tuple[str, int]] | None = None
    causes: tuple[str, ...] = ()


def count_replicas(table: Mapping[str, Actor], kind: str) -> ReplicaCounts:
    """Count the replicas among Ray's actors: those with `kind` in their names."""
    replicas = {name: actor for name, actor in table.items() if kind in actor.name}
    running = filter_by_state(replicas, UP_STATES)
    starting = filter_by_state(replicas, STARTING_STATES)
    placed = sum(
        replica.state == "PENDING_CREATION" and replica.node != "" for replica in starting.values()
    )
    return ReplicaCounts(
        ready=len(running),
        placed=placed,
        waiting=len(starting) - placed,
        restarts=sum(actor.restarts for actor in replicas.values()),
        processes={name: (actor.node, actor.pid) for name, actor in running.items()},
        causes=tuple(
            actor.death for name, actor in replicas.items() if name not in running and actor.death
        ),
    )


def filter_by_state(table: Mapping[str, Actor], states: Collection[str]) -> dict[str, Actor]:
    """Return the actors in one of these states."""
    return {name: actor for name, actor in table.items() if actor.state in states}


@dataclass(slots=True, kw_only=True)
class Budget:
    """Time and restarts left before the job is given up; pure, fed with observations."""

    restarts: int
    stall: float
    started: float
    total: int = 0  # restarts so far
    idle: int = 0  # restarts since a row was finished
    rows: int = 0
    least: int = 1  # replicas that must be up before the first row
    placed: float | None = None  # time since which `least` replicas are placed
    up: float | None = None  # time at which `least` replicas were ready
    moved: float = 0.0  # time of the last finished row

    def judge(self, now: float, rows: int, counts: ReplicaCounts) -> Failed | None:
        """Record an observation; return the failure that should end the job, if any."""
        self.note(now, rows, counts)
        if self.idle > self.restarts:
            hint = (
                "fix the cause below; raise `limits.restarts` only if more restarts"
                " would have helped"
            )
            return Failed(
                f"replicas were restarted {self.idle} times and no row was finished in between",
                hint=hint,
            )
        if self.up is None:
            return self.judge_start(now, counts)
        if now - max(self.up, self.moved) > self.stall:
            hint = (
                "run the job again: it continues with the remaining rows; raise `limits.stall` if"
                " rows take this long"
            )
            died = f", and replicas were restarted {self.idle} times" if self.idle else ""
            return Failed(f"no row was finished for {self.stall:.0f} seconds{died}", hint=hint)
        return None

    def note(self, now: float, rows: int, counts: ReplicaCounts) -> None:
        """Record rows, restarts, and the time at which enough replicas were up."""
        if rows > self.rows:
            self.rows, self.moved, self.idle = rows, now, 0
        if self.up is None and (counts.ready >= self.least or self.rows):
            self.up = now
        new_restarts = max(0, counts.restarts - self.total)
        self.total += new_restarts
        self.idle += new_restarts

    def judge_start(self, now: float, counts: ReplicaCounts) -> Failed | None:
        """Return the failure of replicas that took too long to start, if any."""
        # Loaded replicas keep their places and wait for the last: while it queues, their clock
        # stops.
        if counts.ready + counts.placed < self.least:
            self.placed = None
            if now - self.started > QUEUE_TIMEOUT:
                hint = "check free resources with `ray status`; the same command waits again"
                return Failed(
                    f"no resources were free for a replica within {QUEUE_TIMEOUT / 86400:.0f} days",
                    hint=hint,
                )
            return None
        if self.placed is None:
            self.placed = now
        if now - self.placed > LOAD_TIMEOUT:
            hint = "check that the model loads with `vlaunch serve`"
            return Failed(f"no replica was ready within {LOAD_TIMEOUT / 60:.0f} minutes", hint=hint)
        return None


class PendingQuery:
    """A query to Ray, which may never answer: waits up to `QUERY_TIMEOUT`, one at a time."""

    def __init__(self, query: Callable[[], Any]) -> None:
        self.query = query
        self.future: Future[Any] | None = None

    def __call__(self) -> Any:
        """Return the answer, possibly to the query of an earlier call.

        Raises TimeoutError, and the errors of the query.
        """
        if self.future is None:
            self.future = Future()
            threading.Thread(
                target=self.wait, args=(self.future,), name="question", daemon=True
            ).start()
        future = self.future
        try:
            return future.result(timeout=QUERY_TIMEOUT)
        finally:
            if future.done():
                self.future = None

    def wait(self, future: Future[Any]) -> None:
        try:
            future.set_result(self.query())
        except Exception as problem:
            future.set_exception(problem)


class ReplicaMonitor:
    """A thread that checks the replicas every two seconds.

    `verdict` is the failure that should end the job, once there is one; `current` has this monitor
    while it runs.
    """

    def __init__(
        self,
        job: PlacedJob,
        progress: Tracker,
        actor: str,
        replicas: tuple[int, int],
        needs: Mapping[str, float],
        current: CurrentMonitor,
    ) -> None:
        self.current = current
        self.progress, self.actor, self.replicas, self.needs = progress, actor, replicas, needs
        self.budget = Budget(
            restarts=job.limits.restarts,
            stall=job.limits.stall,
            least=replicas[0],
            started=time.monotonic(),
        )
        self.rows = 0
        self.verdict: Failed | None = None
        self.state: tuple[str, str] | None = None
        self.last = ReplicaCounts()
        self.table = PendingQuery(query_actors)
        self.shortage_query = PendingQuery(lambda: query_shortage(needs, replicas[0]))
        self.shortage, self.shortage_time = "", float("-inf")
        self.processes: dict[str, tuple[str, int]] = {}
        self.gone: list[tuple[str, int]] = []  # processes of replicas that died
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="budget", daemon=True)

    def __enter__(self) -> ReplicaMonitor:
        self.current.monitor = self
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(timeout=2 * QUERY_TIMEOUT)
        self.current.monitor = None

    def finished(self, rows: int) -> None:
        """Count rows from the pipeline."""
        self.rows += rows

    def watch(self) -> None:
        while not self.stop.wait(INTERVAL if self.state else 0):
            try:
                self.last = count_replicas(self.table(), self.actor)
            except Exception as problem:  # a silent Ray stops neither monitor nor clock
                sys.stderr.write(f"budget: {type(problem).__name__}: {problem}\n")
            try:
                self.update(self.last)
            except Exception as problem:
                self.state = self.state or ("", "")
                sys.stderr.write(f"budget: {type(problem).__name__}: {problem}\n")

    def update(self, counts: ReplicaCounts) -> None:
        """Report the counts to the progress and judge them."""
        processes = dict(counts.processes or {})
        self.gone += [
            process for name, process in self.processes.items() if processes.get(name) != process
        ]
        self.processes = processes
        self.progress.replicas(counts.ready, self.replicas[1], counts.placed)
        self.progress.restarted(counts.restarts)
        self.report_state(counts)
        failure = self.budget.judge(time.monotonic(), self.rows, counts)
        if failure and self.verdict is None:
            failure.evidence = "\n".join([*self.last_lines(), *counts.causes[:1]])
            self.verdict = failure

    def report_state(self, counts: ReplicaCounts) -> None:
        """Report the job's state when it changes; refresh the shortage of a waiting job."""
        if counts.ready and (counts.ready >= self.replicas[0] or self.rows):
            state, text = "running", ""
        elif counts.placed and counts.ready + counts.placed >= self.replicas[0]:
            state, text = "loading", f"{counts.ready} of {self.replicas[0]} replicas are ready"
        elif counts.waiting:
            state, text = "waiting", self.describe_wait()
        else:
            state, text = "loading", "starting replicas"
        if self.rows == 0 and state == "running":
            text = "waiting for the first rows"
        if (state, text) != self.state:
            self.state = (state, text)
            self.progress.set(state, text)

    def describe_wait(self) -> str:
        """Return the resources that replicas wait for, queried every ten seconds."""
        if time.monotonic() - self.shortage_time > QUERY_TIMEOUT:
            self.shortage = query_or(self.shortage_query, self.shortage)
            self.shortage_time = time.monotonic()
        return self.shortage

    def last_lines(self) -> list[str]:
        """Return the last log lines of the replica that died last."""
        for node, pid in reversed(self.gone):
            lines = query_or(partial(read_log_end, node, pid), [])
            if lines:
                return [f"the log of process {pid} has:", *lines]
        return []


class CurrentMonitor:
    """The monitor of the running pipeline, if it has one, for the thread that writes the rows."""

    def __init__(self) -> None:
        self.monitor: ReplicaMonitor | None = None

    @property
    def verdict(self) -> Failed | None:
        """The failure that should end the job, if any."""
        monitor = self.monitor  # the pipeline's thread removes it
        return monitor.verdict if monitor is not None else None


def read_log_end(node: str, pid: int) -> list[str]:
    """Return the exception in a worker's log, else its last lines."""
    from ray.util.state import get_log

    lines: list[str] = []
    for suffix in ("out", "err"):
        text = "".join(
            get_log(node_id=node, pid=pid, suffix=suffix, tail=10 * LINES, timeout=QUERY_TIMEOUT)
        )
        # Ray's own markers start with `:`
        log_lines = [line for line in text.splitlines() if line and not line.startswith(":")]
        if raised := cause.find_exception(log_lines):
            return [f"{raised.process}: {raised.text}".removeprefix(": ")]
        lines += log_lines[-LINES:]
    return lines


def query_or(query: Callable[[], Any], default: Any) -> Any:
    """Return an answer, or a default on any error: the query only adds an explanation."""
    try:
        return query()
    except Exception:
        return default


def query_shortage(needs: Mapping[str, float], replicas: int) -> str:
    """Describe the missing resources and their holders."""
    free, total = query_or(query_resources, ({}, {}))
    return describe_shortage(needs, replicas, free, total, query_or(query_holders, ()))


def query_resources() -> tuple[dict[str, float], dict[str, float]]:
    """Return the cluster's free and total resources."""
    import ray

    return ray.available_resources(), ray.cluster_resources()


def describe_shortage(
    needs: Mapping[str, float],
    replicas: int,
    free: Mapping[str, float],
    total: Mapping[str, float],
    holders: Iterable[str],
) -> str:
    """Describe free and required resources and the holders of the rest."""
    wants = {name: amount for name, amount in needs.items() if amount}
    demand = " and ".join(format_amounts(wants)) or "a free process"
    requester = f"each of {replicas} replicas" if replicas > 1 else "one replica"
    have = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in wants
    )
    text = f"waiting for {demand} for {requester}; {have}"
    short = [name for name, amount in wants.items() if total.get(name, 0) < amount]
    if short:
        return f"{text}; all nodes together have fewer {' and '.join(short)} than one replica needs"
    names = "; ".join(dict.fromkeys(holders))
    return f"{text}; used by {names}" if names else text


def format_amounts(resources: Mapping[str, float]) -> list[str]:
    """Format resources for display: `2 GPU`."""
    return [f"{amount:g} {name}" for name, amount in resources.items()]


def query_holders() -> list[str]:
    """Return the other jobs that hold resources through actors, with amounts."""
    import ray
    from ray.util.state import list_actors

    names = query_job_names()
    own_job = ray.get_runtime_context().get_job_id()
    by_holder: dict[str, dict[str, float]] = {}
    for actor in list_actors(
        filters=[("state", "=", "ALIVE")], detail=True, limit=1000, timeout=QUERY_TIMEOUT
    ):
        if actor.job_id == own_job or not actor.required_resources:
            continue
        sums = by_holder.setdefault(names.get(str(actor.job_id)) or f"job {actor.job_id}", {})
        for name, amount in actor.required_resources.items():
            if name in ("CPU", "GPU"):
                sums[name] = sums.get(name, 0) + amount
    return [
        f"{holder} ({', '.join(format_amounts(sums))})"
        for holder, sums in by_holder.items()
        if sums
    ]


def query_job_names() -> dict[str, str]:
    """Return submission ids (or entrypoints) by Ray job id."""
    from ray.util.state import list_jobs

    jobs = list_jobs(limit=1000, timeout=QUERY_TIMEOUT)
    return {str(job.job_id): job.submission_id or job.entrypoint for job in jobs}
