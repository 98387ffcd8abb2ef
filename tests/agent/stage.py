"""A supervisor on a stage: nodes that obey orders, a scripted engine, and a manual clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.agent import records, state
from launcher.agent.desired import Desired
from launcher.agent.front.haproxy import Rotation
from launcher.agent.observed import Observed
from launcher.agent.processes.node import NOTHING, PREPARE, RUN, Order, ServerReport
from launcher.agent.processes.ray_view import Culprit, RayRank
from launcher.agent.supervise.supervisor import Supervisor

KILLED = "was killed by SIGKILL (by hand, or for lack of memory)"
HEAD = "gpu1"


class Clock:
    """Replacement of the module `time`."""

    def __init__(self) -> None:
        self.now, self.step = 10_000.0, 0.0  # `step`: of the host's clock

    def monotonic(self) -> float:
        """Return the seconds since the host's boot."""
        return self.now

    def time(self) -> float:
        """Return the seconds since 1970."""
        return 1e9 + self.now + self.step


@dataclass
class Node:
    """An agent's state and its reports of the server. `slow`: seconds until its engine exits;
    `waits`: the reason why a start waits.
    """

    boot: str = "b1"
    state: str = "idle"
    last: int = 0
    prepared: int = 0
    waits: str = ""
    ended: dict[str, str] = field(default_factory=dict)
    evidence: str = ""
    slow: float = 0.0
    until: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)  # while it runs
    ranks: list[int] = field(default_factory=list)  # processes of Ray on this node
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # per rank, innermost first
    number: int = 0  # of the ranks to sample; `sampled` counts the samples
    sampled: float = 0.0
    idle: dict[str, Any] = field(default_factory=dict)  # reported in any case

    def obey(self, order: Order | None, now: float) -> None:
        """Carry out an order."""
        if self.state == "running" and (
            order is None or order.phase == PREPARE or order.generation != self.last
        ):
            self.state, self.until = "stopping", now + self.slow
        elif (
            order is not None
            and order.phase == RUN
            and order.argv
            and self.state == "idle"
            and order.generation > self.last
        ):
            self.state, self.last, self.ended = "running", order.generation, {}
        if self.state == "stopping" and now >= self.until:
            self.state = "idle"
        if order is not None and order.phase == PREPARE and not self.waits:
            self.prepared = order.generation
        if order is None or not order.inspect or not self.stacks:
            self.number = 0
        elif not self.number or now - self.sampled >= 10:
            self.number, self.sampled = self.number + 1, now

    def report(self) -> dict[str, Any]:
        """Return the agent's report."""
        payload: dict[str, Any] = {
            "state": self.state,
            "last": self.last,
            "prepared": self.prepared,
            **self.ended,
            **self.idle,
        }
        if self.waits:
            payload["waits"] = self.waits
        if self.ranks:
            payload["ranks"] = self.ranks
        if self.state == "running":
            payload |= {
                "pid": 100,
                "evidence": self.evidence,
                "cause": "",
            }
        if self.number:
            payload["inspection"] = {
                "number": self.number,
                "at": self.sampled,
                "bytes": {"eth0": [0, 0]},
                "ranks": [
                    {"pid": pid, "rank": rank, "frames": frames}
                    for pid, (rank, frames) in enumerate(self.stacks.items(), start=41)
                ],
            }
        return {**payload, **self.extra} if self.state == "running" else payload


class Lead:
    """Replacement of the head's `Leader`."""

    name = HEAD

    def __init__(self) -> None:
        self.ray = "b1.1"
        self.nodes: dict[str, Node] = {}
        # disconnected nodes, and why they count as gone; empty: not yet
        self.away: dict[str, str] = {}
        self.patience = 0.0  # longest extra time to reconnect that has passed, in seconds
        self.stale: set[str] = set()  # connected, but silent
        self.late: set[str] = set()  # with pending orders
        self.reports: dict[str, ServerReport] = {}
        self.rotations: dict[str, dict[str, Rotation]] = {}  # in the fronts of nodes

    def is_connected(self, node: str) -> bool:
        """Return whether a node's agent is connected."""
        return node in self.nodes and node not in self.away

    def is_reporting(self, node: str) -> bool:
        """Return whether a node's agent has reported recently."""
        return self.is_connected(node) and node not in self.stale

    def report(self, node: str, _: str) -> ServerReport:
        """Return a node's last report."""
        return self.reports.get(node, NOTHING) if self.is_connected(node) else NOTHING

    def fronts(self) -> dict[str, dict[str, Rotation]]:
        """Return the servers in the fronts of connected nodes."""
        return {node: front for node, front in self.rotations.items() if node not in self.away}

    def orders_done(self, node: str) -> bool:
        """Return whether a node has carried out its last orders."""
        return self.is_connected(node) and node not in self.late

    def boot_of(self, node: str) -> str:
        """Return an ID of the container's start."""
        return self.nodes[node].boot if self.is_connected(node) else ""

    def gone_reason(self, node: str, patience: float = 0.0) -> str:
        """Return the reason why a node counts as gone."""
        return self.away.get(node, "") if patience <= self.patience else ""


@dataclass
class Engine:
    """The engine's behaviour: answers, steps for other clients, and messages of its API. `mute`
    replicas neither answer nor complete steps; `failing` is the status and text of failed canaries.
    """

    takes: float = 3.0  # seconds until its first answer
    answers: bool = True
    works: bool = False
    counts: bool = True
    health: int = 200
    failing: tuple[int, str] | None = None
    mute: tuple[str, ...] = ()
    resting: str = ""
    task: str = "chat"
    refused: str = ""
    open: int = 0  # requests of other clients
    failed: float = 0.0
    capacity: dict[str, str] = field(default_factory=dict)


class Stage:
    """A server on connected nodes."""

    def __init__(self, folder: Path, clock: Clock, spec: Desired, *args: str) -> None:
        self.folder, self.clock, self.lead, self.engine = folder, clock, Lead(), Engine()
        self.answered = self.steps = 0
        self.asking = self.failing = 0.0
        self.waits: dict[str, float] = {}  # age of the canary of every mute replica
        self.began: dict[int, float] = {}
        self.transitions: list[tuple[str, str]] = []  # states, with the current activity
        self.mute: set[str] = set()  # nodes with an API that has never answered
        for node in dict.fromkeys(
            (HEAD, *(process.node for process in spec.processes), *spec.places, *args)
        ):
            self.lead.nodes[node] = Node()
        self.store_spec(spec)
        self.keeper = self.boot()

    def boot(self) -> Supervisor:
        """Start the head's agent."""
        self.keeper = Supervisor("chat", str(self.folder), self.lead, self.clock)  # type: ignore[arg-type]
        return self.keeper

    def store_spec(self, server: Desired | None) -> None:
        """Store a spec, or remove it."""
        file = self.folder / "chat" / "desired.json"
        if server is None:
            file.unlink()
        else:
            self.spec = server
            state.write_json(str(file), server.as_json(), durable=False)

    @property
    def status(self) -> Observed:
        """The recorded status."""
        status = state.read_status("chat", str(self.folder))
        assert status is not None
        return status

    @property
    def orders(self) -> dict[str, Order]:
        """The current orders."""
        return self.keeper.orders()

    @property
    def phases(self) -> dict[str, str]:
        """The phase of every node's order."""
        return {node: item.phase for node, item in self.orders.items()}

    @property
    def history(self) -> list[str]:
        """IDs of the servers in the history."""
        file = self.folder / "chat" / "history.json"
        return (
            [load["desired"]["id"] for load in json.loads(file.read_text())]
            if file.exists()
            else []
        )

    def kill(self, node: str, how: str = KILLED, cause: str = "", evidence: str = "") -> None:
        """Kill the engine's process on a node."""
        self.lead.nodes[node].state = "idle"
        self.lead.nodes[node].ended = {"ended": how, "cause": cause, "evidence": evidence}

    def step(self, seconds: float = 0.5) -> None:
        """Advance the clock, and run everything once."""
        self.clock.now += seconds
        for node, item in self.lead.nodes.items():
            if node not in self.lead.away:
                item.obey(self.orders.get(node), self.clock.now)
        self._serve(seconds)
        self.lead.reports |= {
            node: records.parse_record(ServerReport, self._report(node, item), "report")
            for node, item in self.lead.nodes.items()
            if self.lead.is_reporting(node)
        }
        self.keeper.tick()
        observed = self.keeper.status
        if observed is not None and (
            not self.transitions or self.transitions[-1] != (observed.state, observed.doing)
        ):
            self.transitions.append((observed.state, observed.doing))

    def run(self, seconds: float, step: float = 0.5) -> None:
        """Advance the clock by some seconds."""
        for _ in range(round(seconds / step)):
            self.step(step)

    def until(self, *states: str, within: float = 60.0, step: float = 0.5) -> Observed:
        """Advance the clock until the server reaches a state; return its record."""
        for _ in range(round(within / step)):
            self.step(step)
            if self.status.state in states:
                return self.status
        raise AssertionError(f"not {states} within {within} s: {self.status}\n{self.transitions}")

    def _serve(self, seconds: float) -> None:
        """Let the engine answer if all of its processes run."""
        nodes = [self.lead.nodes[process.node] for process in self.spec.processes]
        alive = all(node.state == "running" for node in nodes)
        began = self.began.setdefault(nodes[0].last, self.clock.now)
        failing = self.failing + seconds if self.engine.failing else 0.0
        self.failing = failing
        if not alive:
            return
        if self.engine.answers and self.clock.now - began >= self.engine.takes and not failing:
            self.answered += 1
            self.steps += 1
            self.asking = 0.0
        elif self.answered and not failing:
            self.asking += seconds
        self.steps += self.engine.works
        self.waits = {key: self.waits.get(key, 0.0) + seconds for key in self.engine.mute}

    def _report(self, name: str, node: Node) -> dict[str, Any]:
        report = node.report()
        generation = self.began.get(node.last)
        apis = {api.node: api for api in self.spec.apis}
        if name in apis and node.state == "running" and generation is not None:
            behind = self.spec.replicas_behind(apis[name])
            report["probe"] = {**self.probe(*map(str, behind)), **report.get("probe", {})}
            if self.clock.now - generation < self.engine.takes or name in self.mute:
                report["probe"]["answers"] = {}
        return report

    def probe(self, *replicas: str) -> dict[str, Any]:
        """Return the state of an API and of the replicas behind it."""
        engine, keys = self.engine, ("", *replicas)
        came = {key: [self.answered, 0.1 + self.asking] for key in keys}
        waits = {key: wait for key, wait in self.waits.items() if key in replicas}
        if len(replicas) == 1 and waits:  # a single replica behind an API has no number
            waits = {"": waits[replicas[0]]}
        mute = {*waits, *self.engine.mute}
        came |= {key: [1, 0.1 + sum(waits.values())] for key in keys if key in mute}
        first = {"model": "m", "refused": engine.refused, "seconds": 0.1, "replicas": []}
        payload: dict[str, Any] = {
            "answers": came if self.answered else {},
            "asking": {**({"": self.asking} if self.asking else {}), **waits},
            "seconds": 0.1,
            "failing": {"": [self.failing, *engine.failing]} if engine.failing else {},
            "health": engine.health,
            "rests": engine.resting,
            "task": engine.task if self.answered else "",
            "first": first if self.answered else None,
        }
        if engine.counts:
            progress = dict.fromkeys(keys, str(self.steps)) | dict.fromkeys(mute & {*keys}, "-")
            payload |= {"counted": 0.1, "progress": progress}
            payload["counters"] = {
                "progress": [],
                "running": engine.open,
                "waiting": 1 if self.asking else 0,
                "tokens": float(self.answered),
                "failed": engine.failed,
                "held": engine.capacity,
            }
        return payload


class Now:
    """Replacement of `supervisor.Background`: runs work at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.value, self.error, self.done, self.began = None, "", True, 0.0
        try:
            self.value = work()
        except OSError as error:
            self.error = str(error)


Make = Callable[..., Stage]


class View:
    """Replacement of `RayView`."""

    lacks: Any = ""
    looked: list[int]
    placed: Any = ()
    blamed: Culprit | None = None

    def __init__(self, *_: object) -> None:
        View.looked = []

    def missing_reason(self, looks: int) -> str:
        """Return the reason why a start waits."""
        View.looked.append(looks)
        if isinstance(View.lacks, Exception):
            raise View.lacks
        return str(View.lacks)

    def query_ranks(self, driver: int) -> list[RayRank]:
        """Return the ranks."""
        assert driver == 100
        return list(View.placed)

    def find_culprit(self, ranks: list[RayRank], _: str) -> Culprit | None:
        """Return the first dead rank."""
        assert ranks
        return View.blamed
