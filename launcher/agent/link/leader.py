"""The agents of a cluster from the head's point of view: connections, reports and orders.

A member posts a report each second over mutual TLS, as the node in its certificate's CN. The answer
has all its orders, so a lost message only delays them. A broken connection stops nothing: engines
go on, and states are compared after the reconnection. `members.py` is the other side.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aiohttp import web

from .. import records, state
from ..front.haproxy import Rotation
from ..log import LimitedLog, say
from ..processes.node import KEEP, NOTHING, AgentReport, LocalNode, Order, ServerReport
from .certificates import Certificates, common_name
from .members import ReportReply
from .server import HttpSite

_FRESH = 5.0  # seconds for which a report holds
SILENCE = 60.0  # seconds without a report until a connection counts as broken
_RETURN = 10.0  # seconds for an agent to reconnect
_BOOT_LENGTH = 40  # letters of a boot
_DIGEST_LENGTH = 64  # letters of a sha256
_MAX_BOOTS = 1000  # starts of a node's agent that are remembered
_RETRY = 0.02  # seconds between two attempts to get the agent's lock
_HANGS = 5.0  # seconds for which its main loop may hold it; members wait longer for an answer


class ReportRejected(ValueError):
    """A rejected report; the text has the reason."""


@dataclass
class ConnectedAgent:
    """A node's connected agent, and its last report, received at `last_report_at`.

    `boot` changes with each start of its container. `done` is the number of the orders that it had
    carried out by then, `program` the sha256 of its archive (empty: of an older version). `front`
    has the servers in its node's front, None without one.
    """

    boot: str
    connection: asyncio.BaseTransport
    last_report_at: float
    servers: Mapping[str, ServerReport] = field(default_factory=dict)
    done: int = 0
    program: str = ""
    front: Mapping[str, Rotation] | None = None


class Leader:
    """All agents, from the head's point of view; its own node is one of them."""

    def __init__(self, name: str, node: LocalNode) -> None:
        self.name, self.node = name, node
        self.boot = secrets.token_hex(8)
        self.members: dict[str, ConnectedAgent] = {}
        self.lost: dict[str, tuple[float, str]] = {}  # since when a node counts as gone, and why
        self.orders: dict[str, dict[str, Order]] = {}
        self.front_states: Mapping[str, str] = {}  # of servers, see `front.py`
        self.left_alone: set[str] = set()  # servers whose engines get no other orders
        self.ray = ""  # another word each time that Ray's head is started
        self._answers: dict[str, ReportReply] = {}  # to each node
        # of each node the boots of its agent, newest last, and the number of the last report
        self._boots: dict[str, dict[str, int]] = {}
        self._own = ConnectedAgent(
            self.boot,
            asyncio.BaseTransport(),
            last_report_at=math.inf,
            program=state.program_digest(),
        )

    def is_connected(self, node: str) -> bool:
        """True if a node's agent is connected."""
        return self._find_agent(node) is not None

    def is_reporting(self, node: str) -> bool:
        """True if a node's last report is recent enough to be relied on."""
        member = self._find_agent(node)
        return member is not None and time.monotonic() - member.last_report_at < _FRESH

    def orders_done(self, node: str) -> bool:
        """True if a node's last report confirms that it has carried out all of its orders."""
        member = self._find_agent(node)
        return member is not None and member.done == self.order_number(node)

    def report(self, node: str, server: str) -> ServerReport:
        """Return a node's report of a server; NOTHING without a report or a connection."""
        member = self._find_agent(node)
        return member.servers.get(server, NOTHING) if member else NOTHING

    def boot_of(self, node: str) -> str:
        """Return an id that changes when a node's container restarts; empty while disconnected."""
        member = self._find_agent(node)
        return member.boot if member else ""

    def _find_agent(self, node: str) -> ConnectedAgent | None:
        return self._own if node == self.name else self.members.get(node)

    def gone_reason(self, node: str, patience: float = 0.0) -> str:
        """Return why a node is gone; empty while it is connected, or may return. It gets `patience`
        seconds more than usual to reconnect.
        """
        since, why = self.lost.get(node, (0.0, ""))
        over = not self.is_connected(node) and time.monotonic() >= since + patience
        return why if over else ""

    def report_ages(self) -> dict[str, float]:
        """Return the seconds since the last report of each node's agent."""
        now = time.monotonic()
        return {
            self.name: 0.0,
            **{
                name: round(now - member.last_report_at, 1)
                for name, member in list(self.members.items())
            },
        }

    def programs(self) -> dict[str, str]:
        """Return the sha256 of each connected agent's archive; empty for an older version."""
        agents = {self.name: self._own, **self.members}
        return {name: agent.program for name, agent in list(agents.items())}

    def fronts(self) -> dict[str, Mapping[str, Rotation]]:
        """Return the servers in the fronts of connected nodes, by node."""
        agents = {self.name: self._own, **self.members}
        return {name: agent.front for name, agent in agents.items() if agent.front is not None}

    def order_number(self, node: str) -> int:
        """Return the number of a node's orders, which grows with each change."""
        return self._answers[node].number if node in self._answers else 0

    def tick(self) -> None:
        """Update the orders, and drop members that are closed or silent."""
        self.node.orders = self._orders_for(self.name, self._own.servers)
        self.node.tick()
        self._own.servers = self.node.report()
        self.node.front.tick(self.front_states)
        self._own.front = self.node.front.report
        now = time.monotonic()
        for name, member in list(self.members.items()):
            if self._orders_for(name, member.servers) != self._answers[name].orders:
                self._advance_orders(name, member.servers)
            if now - member.last_report_at > SILENCE:
                self._drop_agent(name, f"no report for {SILENCE:g} s")
            elif member.connection.is_closing():
                self._drop_agent(name, "its connection closed")

    def exchange(
        self, name: str, report: AgentReport, connection: asyncio.BaseTransport
    ) -> ReportReply:
        """Process a report of the node in the connection's certificate; return its orders.

        A report without a boot of this agent is answered with that boot alone. Raises
        ReportRejected.
        """
        if name == self.name:
            raise ReportRejected(f"{name} is this node itself")
        if report.node != name:
            raise ReportRejected(f"the certificate of {name} came with a report of {report.node}")
        if report.head_boot == "":
            return ReportReply(head_boot=self.boot)
        if report.head_boot != self.boot:
            raise ReportRejected(f"{name} reports to another start of the head's agent")
        if not 0 < len(report.boot) <= _BOOT_LENGTH:
            raise ReportRejected(
                f"{name} sent an invalid report: its 'boot' has {len(report.boot)} letters"
            )
        self._check_number(name, report.boot, report.number)
        member = self._join(name, report, connection)
        member.connection, member.last_report_at = connection, time.monotonic()
        member.servers, member.done = report.servers, report.done
        member.program, member.front = report.program[:_DIGEST_LENGTH], report.front
        states = {} if report.front is None else self.front_states
        return replace(self._answers[name], ray=self.ray, front=states)

    def _check_number(self, name: str, boot: str, number: int) -> None:
        """Record a report's number; raise ReportRejected for an old one."""
        boots = self._boots.setdefault(name, {})
        if boot in boots and boot != next(reversed(boots)):
            raise ReportRejected(f"{name} sent a report of an earlier start of its agent")
        if number <= boots.get(boot, 0):
            raise ReportRejected(f"{name} sent report {number} after report {boots.get(boot, 0)}")
        boots[boot] = number
        if len(boots) > _MAX_BOOTS:
            del boots[next(iter(boots))]

    def _join(
        self, name: str, report: AgentReport, connection: asyncio.BaseTransport
    ) -> ConnectedAgent:
        """Return a node's agent; a new one gets its orders under a new number, so that it counts as
        settled only after carrying them out.
        """
        member = self.members.get(name)
        if member is not None and member.boot != report.boot:
            self._drop_agent(name, "it was restarted")
            member = None
        if member is None:
            member = self.members[name] = ConnectedAgent(report.boot, connection, time.monotonic())
            self.lost.pop(name, None)
            self._advance_orders(name, report.servers)
            say(f"agent of {name[:100]} connected")
        return member

    def _orders_for(self, name: str, servers: Mapping[str, ServerReport]) -> dict[str, Order]:
        """Return a node's orders; a reported engine that is left alone stays as it is."""
        unchanged = {
            server: Order(generation=report.last, phase=KEEP)
            for server, report in servers.items()
            if server in self.left_alone
        }
        return unchanged | self.orders.get(name, {})

    def _advance_orders(self, name: str, servers: Mapping[str, ServerReport]) -> None:
        """Number a node's current orders."""
        orders, number = self._orders_for(name, servers), self.order_number(name) + 1
        self._answers[name] = ReportReply(head_boot=self.boot, number=number, orders=orders)

    def _drop_agent(self, name: str, why: str) -> None:
        member = self.members.pop(name)
        now = time.monotonic()
        # Silence has lasted long enough already; an agent whose connection was closed may just have
        # been cut off for a moment.
        self.lost[name] = (now if now - member.last_report_at > SILENCE else now + _RETURN, why)
        say(f"agent of {name[:100]} disconnected: {why}")


def members_site(
    lead: Leader, lock: threading.RLock, certificates: Certificates, host: str, port: int
) -> HttpSite:
    """Return the site to which members post; `lock` is held while the agent changes."""
    log = LimitedLog()

    async def take(request: web.Request) -> web.Response:
        """Take a report, and answer with the node's orders."""
        body, transport = await request.read(), request.transport
        try:
            if transport is None or (
                transport.get_extra_info("sslcontext") is not certificates.context()
            ):  # accepted with files that have been replaced since
                raise ReportRejected("its connection is older than this node's certificates")
            name = common_name(transport.get_extra_info("peercert"))
            report = records.parse_record(AgentReport, body, "report")
            await _acquire(lock)
            try:
                answer = lead.exchange(name, report, transport)
            finally:
                lock.release()
        except ValueError as error:
            log.say(f"refused a report from {request.remote}: {str(error)[:300]}")
            refusal = web.Response(text=str(error), status=403)
            refusal.force_close()
            return refusal
        return web.Response(body=records.as_bytes(answer), content_type="application/json")

    return HttpSite(
        name="the agents of other nodes",
        routes=[web.post("/report", take)],
        host=host,
        port=port,
        certificates=certificates,
        log=log,
    )


async def _acquire(lock: threading.RLock) -> None:
    """Acquire the agent's lock without blocking other responses; raise ReportRejected if the
    agent's main loop hangs.
    """
    deadline = time.monotonic() + _HANGS
    while not lock.acquire(blocking=False):
        if time.monotonic() > deadline:
            raise ReportRejected("the main loop of the head's agent hangs")
        await asyncio.sleep(_RETRY)
