"""The engines on this node: starts and stops what the keeper orders, and reports their state.

It decides nothing.

Orders are a level, not an edge: always all servers that should be here; a server that is not
among them is stopped. Without new orders nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import gpu, leftovers, process, state
from .background import Background
from .blame import Sample
from .inspection import Inspection, Target
from .probe import Probe, ProbeReport
from .process import IDLE, RUNNING, STOPPING, Engine

# What an order asks for. keep: go on if it runs, and start nothing; prepare: see whether it could
# start; run: start it.
KEEP, PREPARE, RUN = "keep", "prepare", "run"
LOST = "the GPUs are lost to this container"
OUTDATED = "the NVIDIA driver was upgraded while the old one runs: run `sudo reboot` on this node"
_ONCE = "free once"
_LOOK = 2.0  # seconds between two looks at the ranks' processes, or at a GPU's memory


@dataclass(frozen=True)
class Order:
    """The part of one server that should run here.

    `argv` is empty where other nodes run it and only its ranks' `pids` are watched. `behind` is the
    range of the numbers of the replicas behind its API, empty where the server has only one.

    `share` is the part of a GPU's memory that must be free (None: any), on `count` GPUs of those
    that `gpus` names (None: all); with `inspect` the ranks are sampled.
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
    """One server on one node; the defaults are those of a node that has nothing of it.

    `last` is the generation that was started last, `prepared` the one that may start, `waits` what
    it waits for. `ended`, `evidence` and `cause` say how the engine ended, what it printed and its
    first error; `pid` is its process while it runs, `ranks` are the processes of its ranks that
    live. `room` has a generation and how many GPUs are free for it.
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
    room: tuple[int, int] | None = None
    probe: ProbeReport = field(default_factory=ProbeReport)
    inspection: Sample | None = None


NOTHING = ServerReport()


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a node's agent: its `number` since this `boot` of the agent, and the number of
    the orders of the head's agent (`head_boot`) that are `done`.
    """

    node: str
    boot: str
    number: int
    head_boot: str
    done: int
    servers: Mapping[str, ServerReport]


class Server:
    """One server's part on this node."""

    def __init__(self, name: str, folder: str, order: Order) -> None:
        self.order = order
        self.engine = Engine(name, state.path(name, state.LOG, folder))
        self.probe: Probe | None = None
        self.prepared, self.waits = 0, ""  # the generation that may start, or what it waits for
        self.room: tuple[int, int] | None = None  # of a generation, how many GPUs are free for it
        self.ranks: tuple[int, ...] = ()  # the living processes of what Ray runs here
        self.inspection = Inspection()
        self._pids: tuple[int, ...] = ()
        self._ending: float | None = None
        self._answers, self._looked = 0, 0.0
        self._check: Background[None] | None = None  # whether the GPUs have room

    def turn(self, order: Order | None) -> None:
        """Look once, and do what follows."""
        self.engine.poll()
        self._obey(order)
        self._end_ranks(order)
        if order is not None and order.gpus != self.order.gpus:
            self.prepared = 0  # other GPUs were checked
        self.order = order or self.order
        if self.probe is not None:
            self._note_answers(self.probe)
        target = None
        if order is not None and order.inspect:
            target = Target(self.engine.pid, order.pids, order.count, order.gpus, order.argv)
        self.inspection.turn(target)
        if order is None:
            return
        if order.phase != PREPARE:
            self.waits = ""
        elif order.share is None:
            self.prepared = order.generation
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look(order)

    def _obey(self, order: Order | None) -> None:
        """End or start the engine, where it is not as ordered."""
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
                self.probe = Probe(*order.api, range(*order.behind), order.canary)

    def _end_ranks(self, order: Order | None) -> None:
        """End ranks whose driver has gone and that do not go themselves: one that hangs does not
        hear Ray either.
        """
        if order is not None and order.phase != PREPARE:
            self._pids, self._ending = order.pids, None
            return
        self._pids = tuple(process.ray_workers({*self._pids, *(order.pids if order else ())}))
        now = time.monotonic()
        self._ending = (self._ending or now) if self._pids else None
        if self._ending is not None and now - self._ending >= self.order.grace:
            process.kill(self._pids)

    def _note_answers(self, probe: Probe) -> None:
        if self.engine.state != RUNNING:
            probe.stop()
            self.probe = None
            return
        if probe.answers != self._answers:
            self._answers = probe.answers
            self.engine.well()

    def _look(self, order: Order) -> None:
        """See which ranks live, and whether the GPUs have room."""
        self.ranks = tuple(filter(process.lives, order.pids))
        over = self._check is None or self._check.over
        if order.phase == PREPARE and self.prepared != order.generation and over:
            # a driver that hangs must not stop the agent
            self._check = Background(lambda: self._prepare(order))

    def _prepare(self, order: Order) -> None:
        self.room = None
        try:
            free, waits = gpu.room(order.share or 0.0, order.gpus, order.count)
            self.room = None if free is None else (order.generation, free)
        except gpu.Lost as why:
            waits = f"{OUTDATED if gpu.OUTDATED in str(why) else LOST}: {why}"
        if order.gpus != self.order.gpus:
            return
        if waits:
            self.waits = waits
        elif self.waits and self.waits != _ONCE:
            self.waits = _ONCE  # memory is freed by and by: what is free twice in a row stays free
        else:
            self.prepared, self.waits = order.generation, ""

    def report(self) -> ServerReport:
        """Return its state."""
        engine = self.engine
        runs = engine.state == RUNNING
        prints = engine.ended or runs
        return ServerReport(
            state=STOPPING if engine.state == IDLE and not self.idle else engine.state,
            last=engine.last,
            prepared=self.prepared,
            waits="" if self.waits == _ONCE else self.waits,
            ended=engine.ended,
            evidence=engine.evidence if prints else "",
            cause=engine.cause if prints else "",
            pid=engine.pid if runs else None,
            ranks=self.ranks if self.order.pids else (),
            room=self.room,
            probe=self.probe.report() if self.probe is not None else ProbeReport(),
            inspection=self.inspection.sample,
        )

    @property
    def idle(self) -> bool:
        """True when nothing of it runs here."""
        return self.engine.state == IDLE and self._ending is None


class Node:
    """All servers' parts on this node."""

    def __init__(self, folder: str, *, private_shm: bool, lost: Callable[[str], None]) -> None:
        self.folder, self.private_shm, self._lost = folder, private_shm, lost
        self.orders: Mapping[str, Order] = {}
        self.servers: dict[str, Server] = {}
        self._stopping = False

    def turn(self) -> None:
        """Do what was ordered last."""
        for name, order in self.orders.items():
            if name not in self.servers and order.phase != KEEP:
                self.servers[name] = Server(name, self.folder, order)
        for name, server in list(self.servers.items()):
            self._turn(server, None if self._stopping else self.orders.get(name))
            if name not in self.orders and server.idle:
                del self.servers[name]

    def _turn(self, server: Server, order: Order | None) -> None:
        """Let a server do what was ordered; then see to what it left behind, or lacks."""
        was = server.engine.state
        server.turn(order)
        if was == STOPPING and server.idle and self.private_shm:
            leftovers.sweep()
        ranks = any(other.ranks for other in self.servers.values())
        if server.waits.startswith(LOST) and not self.runs and not ranks:
            # a restart of the container hurts nothing that works
            self._lost(server.waits)

    def report(self) -> dict[str, ServerReport]:
        """Return the state of all of them."""
        return {name: server.report() for name, server in self.servers.items()}

    def leave(self) -> bool:
        """Stop everything; true when it has."""
        self._stopping = True
        self.turn()
        return not self.runs

    @property
    def changing(self) -> bool:
        """True while an engine is being prepared or ended."""
        return any(
            server.engine.state == STOPPING or server.order.phase == PREPARE
            for server in self.servers.values()
        )

    @property
    def runs(self) -> bool:
        """True while an engine is here."""
        return any(not server.idle for server in self.servers.values())
