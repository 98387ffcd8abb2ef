"""Processes of a data-parallel run's ranks: start, tasks, end and logs."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...agent import cause
from . import failures
from .budget import QUEUE_TIMEOUT
from .job_file import Failed
from .postmortem import (
    SEARCHED_LINES,
    describe_exception,
    describe_failure,
    first_failed,
    is_process_gone,
    log_evidence,
    points_to_log,
    read_tail,
)
from .progress import Tracker
from .rank import Rank, RankProcess, RankSettings
from .results import Converter, Row

# seconds for the rank at fault to report before one that lost it is blamed
GRACE = 10.0
PORT_COUNT = 8  # vLLM uses several, starting at the given one
END_TIMEOUT = 20.0  # seconds for the processes of all ranks to exit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """A rank and the address of its node."""

    rank: int
    ip: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.ip}"


@dataclass(slots=True, kw_only=True)
class RankTask:
    """A task of a rank; `doing` describes it in messages, `tag` is the caller's."""

    ref: Any
    doing: str
    tag: Any = None
    limit: float
    hint: str = ""
    began: float = field(default_factory=time.monotonic)


class RankPool:
    """All ranks.

    A context manager that leaves no process behind.

    A rank works in order, so only its first task is checked; its time runs from when it became the
    first. Every failure ends the job: raises Failed, naming the rank, with the end of its log.
    """

    def __init__(
        self, converter: Converter, slots: Sequence[RankSlot], progress: Tracker, *, together: bool
    ) -> None:
        self.converter, self.job = converter, converter.job
        self.slots, self.progress, self.together = slots, progress, together
        self.actors: list[Any] = []
        self.nodes: list[str] = []
        self.processes: dict[int, RankProcess] = {}
        self.tasks: dict[int, deque[RankTask]] = {slot.rank: deque() for slot in slots}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, settings: Sequence[RankSettings], text: str) -> None:
        """Start the ranks and load the model; `text` describes them."""
        import ray

        self.locate()
        gpus = self.job.engine.tp * self.job.engine.pp
        stall = self.job.limits.stall
        actor = ray.remote(Rank)
        for node in self.nodes:
            options = actor.options(
                num_gpus=gpus, num_cpus=0, max_restarts=0, scheduling_strategy=node_affinity(node)
            )
            self.actors.append(options.remote(self.converter, self.together))
        self.progress.replicas(0, len(self.slots))
        self.progress.set(
            "waiting", f"{text}: waiting for {gpus} free accelerator{'s' * (gpus > 1)} for each"
        )
        hint = "`vlaunch jobs` shows what uses accelerators"
        for slot, actor in zip(self.slots, self.actors, strict=True):
            ref = actor.hello.remote()
            self.put(slot.rank, ref, doing="has not started", limit=QUEUE_TIMEOUT, hint=hint)
        while self.busy:
            self.processes.update((rank, process) for rank, _, process in self.finished())
        self.progress.replicas(0, len(self.slots), len(self.slots))
        self.progress.set("loading", text)
        hint = "raise `limits.stall` to wait longer"
        for slot, setting in zip(self.slots, settings, strict=True):
            ref = self.actors[slot.rank].load.remote(setting)
            self.put(slot.rank, ref, doing="has not loaded the model", limit=stall, hint=hint)
        ready = 0
        while self.busy:
            ready += len(self.finished())
            self.progress.replicas(ready, len(self.slots), len(self.slots) - ready)
        self.progress.set("running", text)

    def locate(self) -> None:
        """Resolve the Ray ids of the nodes."""
        self.nodes = self.nodes or [self.node(slot) for slot in self.slots]

    def port(self, first: int) -> int:
        """Return the ranks' rendezvous port: `first`, or the next free one on the first rank's
        node.
        """
        import ray

        self.locate()
        free = int(ray.get(self.call_on_node(0, free_port, first), timeout=60))
        if free != first:
            self.progress.warn(
                f"port {first} on {self.slots[0].ip} is in use: the ranks meet at {free}"
            )
        return free

    def node(self, slot: RankSlot) -> str:
        """Return the Ray id of a rank's node."""
        import ray

        alive = {
            node["NodeManagerAddress"]: str(node["NodeID"]) for node in ray.nodes() if node["Alive"]
        }
        if slot.ip not in alive:
            evidence = f"Ray's nodes: {', '.join(sorted(alive))}"
            hint = "run `vlaunch up`: it starts what is missing"
            raise Failed(f"{slot}: Ray has no such node", evidence, hint)
        return alive[slot.ip]

    def submit(self, rank: int, tag: Any, rows: Sequence[Row]) -> None:
        """Queue rows on a rank."""
        parallel = self.job.data_parallel
        assert parallel is not None  # noqa: S101 - the mode says so
        doing = f"has not answered {len(rows)} row{'s' * (len(rows) != 1)}"
        hint = "raise `data_parallel.timeout`, or lower `data_parallel.round_rows`"
        self.put(
            rank,
            self.actors[rank].answer.remote(rows),
            doing=doing,
            limit=parallel.timeout,
            hint=hint,
            tag=tag,
        )

    def put(
        self, rank: int, ref: Any, *, doing: str, limit: float, hint: str, tag: Any = None
    ) -> None:
        """Add a task to a rank."""
        self.tasks[rank].append(RankTask(ref=ref, doing=doing, limit=limit, hint=hint, tag=tag))

    @property
    def busy(self) -> bool:
        """True if any rank has a task."""
        return any(self.tasks.values())

    def load(self, rank: int) -> int:
        """Return a rank's number of queued tasks."""
        return len(self.tasks[rank])

    def finished(self) -> list[tuple[int, Any, Any]]:
        """Wait until a rank finishes a task; return rank, tag and result of all finished ones."""
        first = {rank: tasks[0] for rank, tasks in self.tasks.items() if tasks}
        ready = finished_refs(list(first.values()))
        results, lost = [], {}
        for rank, task in first.items():
            if task.ref not in ready:
                continue
            result = self.result(task)
            if isinstance(result, BaseException):
                lost[rank] = result
            else:
                self.advance(rank)
                results.append((rank, task.tag, result))
        if lost:
            self.raise_failure(lost)
        self.check_limits({rank: task for rank, task in first.items() if task.ref not in ready})
        return results

    def advance(self, rank: int) -> None:
        """Remove a rank's first task and start the clock of the next."""
        self.tasks[rank].popleft()
        if self.tasks[rank]:
            self.tasks[rank][0].began = time.monotonic()

    def check_limits(self, unfinished: dict[int, RankTask]) -> None:
        """Raise Failed if a rank's first task is overdue."""
        overdue = [
            rank for rank, task in unfinished.items() if time.monotonic() >= task.began + task.limit
        ]
        if overdue:
            task = unfinished[overdue[0]]
            notes = [f"nor has {self.slots[rank]}" for rank in overdue[1:]]
            message = f"{self.slots[overdue[0]]} {task.doing} within {task.limit:g} s"
            raise Failed(message, log_evidence(self.log(overdue[0]), notes), task.hint)

    def result(self, task: RankTask) -> Any:
        """Return a finished task's result or exception."""
        import ray

        try:
            return ray.get(task.ref, timeout=30)
        except Exception as problem:  # any kind: judged later by its source
            return problem

    def raise_failure(self, lost: dict[int, BaseException]) -> None:
        """Raise Failed for the rank that failed first, with the end of its log."""
        lost = {**lost, **self.other_failures(lost)}
        logs = {rank: self.log(rank) for rank in lost}
        rank = first_failed(lost, logs)
        problem, lines = lost[rank], logs[rank]
        gone, text = is_process_gone(problem), describe_exception(problem)
        failure = failures.match_failure("\n".join([text, *lines]), self.job.mode, certain=True)
        reasons = {number: describe_failure(lost[number], logs[number]) for number in lost}
        if failure:
            cause_text, hint = failure.message, failure.hint
        else:
            cause_text = reasons[rank]
            hint = "fix the cause, then run the job again: it continues where it stopped"
        notes = [f"Ray: {text}"[:400]] if gone else []
        raised = cause.find_exception(lines) if not gone and points_to_log(text) else None
        if failure and not gone:
            process = raised.process if raised else ""
            notes.append(f"{process or self.slots[rank]}: {raised.text if raised else text}")
        notes += [
            f"{self.slots[other]} failed with the same error"
            if reason == reasons[rank]
            else f"{self.slots[other]} then failed too: {reason}"
            for other, reason in reasons.items()
            if other != rank
        ]
        end = lines if gone or (points_to_log(text) and raised is None) else []
        message = f"{self.slots[rank]} {'ended' if gone else 'failed'}: {cause_text}"
        raise Failed(message, log_evidence(end, notes), hint) from problem

    def other_failures(self, lost: dict[int, BaseException]) -> dict[int, BaseException]:
        """Return the failures of other ranks within `GRACE` seconds."""
        import ray

        others = {
            rank: tasks[0] for rank, tasks in self.tasks.items() if tasks and rank not in lost
        }
        if not others:
            return {}
        refs = [task.ref for task in others.values()]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE)
        results = {rank: self.result(task) for rank, task in others.items() if task.ref in ready}
        return {
            rank: result for rank, result in results.items() if isinstance(result, BaseException)
        }

    def log(self, rank: int) -> list[str]:
        """Return the last lines of a rank's log, or the reason for none."""
        import ray

        if rank not in self.processes or not self.processes[rank].log:
            return []
        path = self.processes[rank].log
        try:
            ref = self.call_on_node(rank, read_tail, path, SEARCHED_LINES)
            return list(ray.get(ref, timeout=15))
        except Exception as problem:  # the failure itself matters more
            return [f"(its log {path} cannot be read: {describe_exception(problem)})"]

    def call_on_node(self, rank: int, function: Any, *args: Any) -> Any:
        """Call a function on a rank's node, outside the rank."""
        import ray

        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": node_affinity(self.nodes[rank]),
        }
        return ray.remote(function).options(**options).remote(*args)

    def end(self) -> None:
        """Kill all ranks, and wait for their engines' processes: the next run needs the devices."""
        import ray

        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        refs = [
            self.call_on_node(rank, kill_group, process.pid, END_TIMEOUT / 2)
            for rank, process in self.processes.items()
        ]
        self.actors, self.processes = [], {}
        count = len(refs)
        done, pending = ray.wait(refs, num_returns=count, timeout=END_TIMEOUT) if refs else ([], [])
        for ref in done:
            try:
                for line in ray.get(ref, timeout=5):
                    self.progress.warn(line)
            except Exception as problem:  # a dead node has no processes
                self.progress.warn(
                    f"could not check a node for processes that its rank left behind:"
                    f" {describe_exception(problem)}"
                )
        if pending:
            self.progress.warn("a node did not report whether its rank's processes are gone")


def finished_refs(tasks: Sequence[RankTask]) -> list[Any]:
    """Wait until a task finishes or is overdue; return the references of all finished ones."""
    import ray

    end = min(task.began + task.limit for task in tasks)
    refs = [task.ref for task in tasks]
    ready, _ = ray.wait(refs, num_returns=1, timeout=max(0.0, end - time.monotonic()))
    if ready:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    return ready


def node_affinity(node: str) -> Any:
    """Return the scheduling strategy for this node only."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def free_port(first: int) -> int:
    """Return the first of `PORT_COUNT` consecutive free ports; runs on the first rank's node.

    vLLM takes the next port when one is in use, but only in the listening rank: the others would
    wait at the first forever.
    """
    import socket

    for start in range(first, min(first + 100 * PORT_COUNT, 65536 - PORT_COUNT), PORT_COUNT):
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(start, start + PORT_COUNT):
                    listener = sockets.enter_context(socket.socket())
                    # sockets left in TIME_WAIT by an earlier run count as free
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(("", port))
                return start
            except OSError:
                continue
    raise OSError(f"no {PORT_COUNT} free ports in a row from {first} on")


def kill_group(group: int, seconds: float) -> list[str]:
    """Kill a rank's remaining process group; return a line if some survive.

    Runs on the rank's node.
    """
    import os
    import signal

    end = time.monotonic() + seconds
    while remaining := group_members(group):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return []
        if time.monotonic() > end:
            return [f"processes of a rank are still there: {' '.join(map(str, remaining))}"]
        time.sleep(0.05)  # not this process's children: poll instead of waiting
    return []


def group_members(group: int) -> list[int]:
    """Return the running processes of a group; zombies hold nothing."""
    import os

    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, process_group = file.read().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state not in "ZX":
            pids.append(int(name))
    return pids
