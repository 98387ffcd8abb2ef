"""Engines on this node: starts and stops them on the supervisor's orders, and reports their state.

Orders are complete: they have all servers that should run, and any other is stopped. Without new
orders nothing changes. This node itself decides if its GPUs have room, and when it kills ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .. import state
from ..background import Background
from ..front.haproxy import Front, Rotation
from ..health.probe import ApiProbe, ProbeReport
from . import gpu, leftovers, process
from .blame import NodeSample
from .inspection import Inspection, InspectionTarget
from .process import IDLE, RUNNING, STOPPING, LocalEngine

# Phases of an order. keep: leave a running engine alone, start nothing; prepare: stop it, and
# check if a new one has room; run: start it.
KEEP, PREPARE, RUN = "keep", "prepare", "run"
GPUS_LOST = "this container has lost its GPUs"
GPU_LOST = "the driver has lost a GPU: run `sudo reboot` on this node"
RESTARTED = "restarted-for-gpus"  # exists while the last restart for lost GPUs has not helped
DRIVER_OUTDATED = "the NVIDIA driver was upgraded but not loaded: run `sudo reboot` on this node"
_FREE_ONCE = "free once"
_MOST_STOPPED = 3  # processes in a report
_CHECK_SECONDS = 2.0  # between two checks of the ranks' processes, or of GPU memory


@dataclass(frozen=True)
class Order:
    """Part of one server that should run on this node.

    `argv` is empty if other nodes run it and only its ranks' `pids` are watched. `grace` is the
    time before SIGKILL and `canary` the interval of test requests, in seconds. `api` is a host and
    port, `behind` the range (first, end) of replica numbers behind it, (0, 0) if the server has
    only one. `share` is the part of a GPU's memory, 0 to 1, that must be free (None: not checked)
    on `count` of the `gpus` (None: all); with `inspect` the ranks are sampled.
    """

    generation: int
    phase: str
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 10.0
    api: tuple[str, int] | None = None
    behind: tuple[int, int] = (0, 0)
    canary: float = 5.0
    pids: tuple[int, ...] = ()
    share: float | None = None
    count: int = 0
    gpus: tuple[int, ...] | None = None
    inspect: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server on one node; the defaults describe a node without it.

    `last` is the generation started last, `prepared` the one that may start, `waits` the reason why
    it may not yet. `ended`, `evidence` and `cause` are how the engine exited, its output and its
    first error; `pid` is its running process, `ranks` are the living processes of its ranks,
    `stopped` describes processes that a signal has stopped. `room` is a generation and the number
    of GPUs with enough free memory for it.
    """

    state: str = IDLE
    last: int = 0
    prepared: int = 0
    waits: str = ""
    ended: str = ""
    evidence: str = ""
    cause: str = ""
    pid: int | None = None
    ranks: tuple[int, ...] = ()
    stopped: tuple[str, ...] = ()
    room: tuple[int, int] | None = None
    probe: ProbeReport = field(default_factory=ProbeReport)
    inspection: NodeSample | None = None


NOTHING = ServerReport()


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """Report of a node's agent, its `number`th since this `boot`; `done` is the sequence number of
    the last orders of the head's agent (`head_boot`) that it carried out, `program` the sha256 of
    the agent's archive. `front` has the servers in the node's front, None without one.
    """

    node: str
    boot: str
    number: int
    head_boot: str
    done: int
    servers: Mapping[str, ServerReport]
    program: str = ""
    front: Mapping[str, Rotation] | None = None


class LocalServer:
    """One server's part on this node."""

    def __init__(self, name: str, folder: str, order: Order) -> None:
        self.order, self.folder = order, folder
        self.engine = LocalEngine(name, state.server_file(name, state.LOG, folder))
        self.probe: ApiProbe | None = None
        self.prepared, self.waits = 0, ""  # the generation that may start, or why it waits
        self.room: tuple[int, int] | None = None  # see `ServerReport`
        self.ranks: tuple[int, ...] = ()  # the living processes that Ray runs here
        self.stopped: tuple[str, ...] = ()  # see `ServerReport`
        self.inspection = Inspection()
        self._pids: tuple[int, ...] = ()
        self._ending_since: float | None = None
        self._answers, self._checked_at = 0, 0.0
        self._memory_check: Background[None] | None = None

    def tick(self, order: Order | None) -> None:
        """Run one round: poll, then apply the order."""
        self.engine.poll()
        self._apply_order(order)
        self._end_ranks(order)
        if order is not None and order.gpus != self.order.gpus:
            self.prepared = 0  # other GPUs were checked
        self.order = order or self.order
        if self.probe is not None:
            self._note_answers(self.probe)
        target = None
        if order is not None and order.inspect:
            target = InspectionTarget(
                self.engine.pid, order.pids, order.count, order.gpus, self.engine.argv
            )
        self.inspection.tick(target)
        if order is None:
            return
        if order.phase != PREPARE:
            self.waits = ""
        elif order.share is None:
            self.prepared = order.generation
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_SECONDS:
            self._checked_at = now
            self._check(order)

    def _apply_order(self, order: Order | None) -> None:
        """Stop or start the engine, if it differs from the order."""
        engine = self.engine
        if order is None or (
            engine.state == RUNNING and (order.phase == PREPARE or engine.last != order.generation)
        ):
            engine.stop(self.order.grace)
        elif (
            order.phase == RUN
            and order.argv
            and engine.state == IDLE
            and order.generation > engine.last
        ):
            engine.start(order.generation, order.argv, order.env)
            if order.api and engine.state == RUNNING:
                self.probe = ApiProbe(*order.api, range(*order.behind), order.canary)

    def _end_ranks(self, order: Order | None) -> None:
        """Kill ranks that outlive their driver: a hung one does not react to Ray either."""
        if order is not None and order.phase != PREPARE:
            self._pids, self._ending_since = order.pids, None
            return
        self._pids = tuple(process.ray_workers({*self._pids, *(order.pids if order else ())}))
        now = time.monotonic()
        self._ending_since = (self._ending_since or now) if self._pids else None
        if self._ending_since is not None and now - self._ending_since >= self.order.grace:
            process.kill(self._pids)

    def _note_answers(self, probe: ApiProbe) -> None:
        if self.engine.state != RUNNING:
            probe.stop()
            self.probe = None
            return
        if probe.answers != self._answers:
            self._answers = probe.answers
            self.engine.mark_healthy()

    def _check(self, order: Order) -> None:
        """Check which ranks are alive or stopped, and whether the GPUs have free memory."""
        self.ranks = tuple(filter(process.is_alive, order.pids))
        session = self.engine.pid if self.engine.state == RUNNING else None
        has_processes = session is not None or self.ranks
        stopped = process.stopped_processes(session, self.ranks) if has_processes else []
        self.stopped = tuple(stopped[:_MOST_STOPPED])
        over = self._memory_check is None or self._memory_check.done
        if order.phase == PREPARE and self.prepared != order.generation and over:
            # a driver that hangs must not stop the agent
            self._memory_check = Background(lambda: self._check_memory(order))

    def _check_memory(self, order: Order) -> None:
        self.room = None
        try:
            free, waits = gpu.free_gpus(order.share or 0.0, order.gpus, order.count)
            self.room = None if free is None else (order.generation, free)
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self.folder, RESTARTED))
        except gpu.GpuLost as why:
            waits = f"{_describe_loss(str(why))}: {why}"
        if order.gpus != self.order.gpus:
            return
        if waits:
            self.waits = waits
        elif self.waits and self.waits != _FREE_ONCE:
            self.waits = _FREE_ONCE  # memory is freed gradually: it must be free twice in a row
        else:
            self.prepared, self.waits = order.generation, ""

    def report(self) -> ServerReport:
        """Return the server's state on this node."""
        engine = self.engine
        runs = engine.state == RUNNING
        prints = engine.ended or runs
        return ServerReport(
            state=STOPPING if engine.state == IDLE and not self.idle else engine.state,
            last=engine.last,
            prepared=self.prepared,
            waits="" if self.waits == _FREE_ONCE else self.waits,
            ended=engine.ended,
            evidence=engine.evidence if prints else "",
            cause=engine.cause if prints else "",
            pid=engine.pid if runs else None,
            ranks=self.ranks if self.order.pids else (),
            stopped=self.stopped,
            room=self.room,
            probe=self.probe.report() if self.probe is not None else ProbeReport(),
            inspection=self.inspection.sample,
        )

    @property
    def idle(self) -> bool:
        """True if nothing of it runs on this node."""
        return self.engine.state == IDLE and self._ending_since is None


def _describe_loss(why: str) -> str:
    if gpu.DRIVER_MISMATCH in why:
        return DRIVER_OUTDATED
    return GPU_LOST if gpu.HANDLE_LOST in why else GPUS_LOST


class LocalNode:
    """All servers' parts on this node."""

    def __init__(
        self, folder: str, *, private_shm: bool, on_gpus_lost: Callable[[str], None]
    ) -> None:
        self.folder, self.private_shm, self._on_gpus_lost = folder, private_shm, on_gpus_lost
        self.orders: Mapping[str, Order] = {}
        self.servers: dict[str, LocalServer] = {}
        self.front = Front(folder)
        self._stopping = False

    def tick(self) -> None:
        """Carry out the last orders."""
        for name, order in self.orders.items():
            # Ray may have placed ranks here without an order to prepare.
            if name not in self.servers and (order.phase != KEEP or order.pids):
                self.servers[name] = LocalServer(name, self.folder, order)
        for name, server in list(self.servers.items()):
            self._tick_server(server, None if self._stopping else self.orders.get(name))
            if name not in self.orders and server.idle:
                del self.servers[name]

    def _tick_server(self, server: LocalServer, order: Order | None) -> None:
        """Apply a server's order; then clean up after it, or handle lost GPUs."""
        was = server.engine.state
        server.tick(order)
        if was == STOPPING and server.idle and self.private_shm:
            leftovers.remove_leftovers()
        ranks = any(other.ranks for other in self.servers.values())
        if server.waits.startswith(GPUS_LOST) and not self.has_engine and not ranks:
            self._on_gpus_lost(server.waits)

    def report(self) -> dict[str, ServerReport]:
        """Return the states of all servers on this node."""
        return {name: server.report() for name, server in self.servers.items()}

    def stop_all(self) -> bool:
        """Stop everything; True once it has stopped."""
        self._stopping = True
        self.tick()
        return not self.has_engine

    @property
    def changing(self) -> bool:
        """True while an engine is being prepared or stopped."""
        return any(
            server.engine.state == STOPPING or server.order.phase == PREPARE
            for server in self.servers.values()
        )

    @property
    def has_engine(self) -> bool:
        """True while an engine, or a rank that outlived one, runs."""
        return any(not server.idle for server in self.servers.values())
