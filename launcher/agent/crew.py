"""The agents of a cluster, as the head's sees them: which are connected, what each reports, and
what each is ordered.

A member posts a report each second over mutual TLS, as the node that its certificate names (CN),
and the answer has all its orders, so that a message that is lost is only late. A connection that
breaks ends nothing: engines go on, and their states are compared when it is back. `members.py` is
the other side.
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

from . import records
from .certificates import Certificates, name_in
from .log import LimitedLog, say
from .members import Answer
from .node import NOTHING, Node, Order, Report, ServerReport
from .server import Site

_FRESH = 5.0  # seconds for which a report holds
SILENCE = 60.0  # seconds without a report until a connection counts as broken
_RETURN = 10.0  # seconds for an agent whose connection was closed to come back
_BOOT = 40  # letters of a boot
_BOOTS = 1000  # starts of a node's agent that are remembered
_RETRY = 0.02  # seconds between two attempts to get the agent's lock
_HANGS = 5.0  # seconds for which its main loop may hold it; members wait longer for an answer


class Refused(ValueError):
    """A report that changes nothing; the text says why."""


@dataclass
class Member:
    """A node's agent that is connected, and its last report, which came at `heard`.

    `boot` is another one after each start of its container. `done` is the number of the orders that
    it had carried out by then.
    """

    boot: str
    connection: asyncio.BaseTransport
    heard: float
    servers: Mapping[str, ServerReport] = field(default_factory=dict)
    done: int = 0


class Lead:
    """All agents, as the head's sees them; its own node is one of them."""

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.node = name, node
        self.boot = secrets.token_hex(8)
        self.members: dict[str, Member] = {}
        self.lost: dict[str, tuple[float, str]] = {}  # since when a node counts as gone, and why
        self.orders: dict[str, dict[str, Order]] = {}
        self.ray = ""  # another word each time that Ray's head is started
        self._answers: dict[str, Answer] = {}  # to each node
        # of each node the boots of its agent, newest last, and the number of the last report
        self._boots: dict[str, dict[str, int]] = {}
        self._own = Member(self.boot, asyncio.BaseTransport(), heard=math.inf)

    def here(self, node: str) -> bool:
        """True when a node's agent is connected."""
        return self._find(node) is not None

    def fresh(self, node: str) -> bool:
        """True when a node reported a moment ago: an older report may not hold any more."""
        member = self._find(node)
        return member is not None and time.monotonic() - member.heard < _FRESH

    def settled(self, node: str) -> bool:
        """True when a node had carried out its last orders before its last report."""
        member = self._find(node)
        return member is not None and member.done == self.number(node)

    def report(self, node: str, server: str) -> ServerReport:
        """Return a node's report of a server; NOTHING where it has none, or is not here."""
        member = self._find(node)
        return member.servers.get(server, NOTHING) if member else NOTHING

    def boot_of(self, node: str) -> str:
        """Return a word that changes when a node's container is restarted; empty while it is not
        here.
        """
        member = self._find(node)
        return member.boot if member else ""

    def _find(self, node: str) -> Member | None:
        return self._own if node == self.name else self.members.get(node)

    def gone(self, node: str) -> str:
        """Say why a node that was here is gone, once it has had time to come back; empty while it
        is here, or may be soon.
        """
        since, why = self.lost.get(node, (0.0, ""))
        return why if why and not self.here(node) and time.monotonic() >= since else ""

    def heard(self) -> dict[str, float]:
        """Return the seconds since the last report of each node's agent."""
        now = time.monotonic()
        return {
            self.name: 0.0,
            **{name: round(now - member.heard, 1) for name, member in list(self.members.items())},
        }

    def number(self, node: str) -> int:
        """Return the number of a node's orders, which grows when they change."""
        return self._answers[node].number if node in self._answers else 0

    def turn(self) -> None:
        """Order, and part with members that have gone or are silent."""
        self.node.orders = self.orders.get(self.name, {})
        self.node.turn()
        self._own.servers = self.node.report()
        now = time.monotonic()
        for name, member in list(self.members.items()):
            if self.orders.get(name, {}) != self._answers[name].orders:
                self._order(name)
            if now - member.heard > SILENCE:
                self._lose(name, f"it has been silent for {SILENCE:g} s")
            elif member.connection.is_closing():
                self._lose(name, "its connection was closed")

    def exchange(self, name: str, report: Report, connection: asyncio.BaseTransport) -> Answer:
        """Take a report of the node that the connection's certificate names; return its orders.

        A report that names no boot of this agent is answered with that alone. Raises Refused.
        """
        if name == self.name:
            raise Refused(f"{name} is this node itself")
        if report.node != name:
            raise Refused(f"the certificate of {name} came with a report of {report.node}")
        if report.head_boot == "":
            return Answer(head_boot=self.boot)
        if report.head_boot != self.boot:
            raise Refused(f"{name} reports to another start of the head's agent")
        if not 0 < len(report.boot) <= _BOOT:
            raise Refused(
                f"{name} sent an invalid report: its 'boot' has {len(report.boot)} letters"
            )
        self._count(name, report.boot, report.number)
        member = self._member(name, report.boot, connection)
        member.connection, member.heard = connection, time.monotonic()
        member.servers, member.done = report.servers, report.done
        return replace(self._answers[name], ray=self.ray)

    def _count(self, name: str, boot: str, number: int) -> None:
        """Note a report's number; raises Refused for one that came before, or too late."""
        boots = self._boots.setdefault(name, {})
        if boot in boots and boot != next(reversed(boots)):
            raise Refused(f"{name} sent a report of an earlier start of its agent")
        if number <= boots.get(boot, 0):
            raise Refused(f"{name} sent report {number} after report {boots.get(boot, 0)}")
        boots[boot] = number
        if len(boots) > _BOOTS:
            del boots[next(iter(boots))]

    def _member(self, name: str, boot: str, connection: asyncio.BaseTransport) -> Member:
        """Return a node's agent; the orders of a new one get another number, so that it counts as
        settled only when it has carried them out.
        """
        member = self.members.get(name)
        if member is not None and member.boot != boot:
            self._lose(name, "it was restarted")
            member = None
        if member is None:
            member = self.members[name] = Member(boot, connection, time.monotonic())
            self.lost.pop(name, None)
            self._order(name)
            say(f"the agent of {name[:100]} is here")
        return member

    def _order(self, name: str) -> None:
        """Give a node's orders the next number."""
        orders, number = self.orders.get(name, {}), self.number(name) + 1
        self._answers[name] = Answer(head_boot=self.boot, number=number, orders=orders)

    def _lose(self, name: str, why: str) -> None:
        member = self.members.pop(name)
        now = time.monotonic()
        # Silence has lasted long enough already; an agent whose connection was closed may just have
        # been cut off for a moment.
        self.lost[name] = (now if now - member.heard > SILENCE else now + _RETURN, why)
        say(f"the agent of {name[:100]} is gone: {why}")


def site(
    lead: Lead, lock: threading.RLock, certificates: Certificates, host: str, port: int
) -> Site:
    """Return the site to which members post; `lock` is held while the agent changes."""
    log = LimitedLog()

    async def take(request: web.Request) -> web.Response:
        """Take a report, and answer with the node's orders."""
        body, transport = await request.read(), request.transport
        try:
            if transport is None or (
                transport.get_extra_info("sslcontext") is not certificates.context()
            ):  # accepted with files that have been replaced since
                raise Refused("its connection is older than this node's certificates")
            name = name_in(transport.get_extra_info("peercert"))
            report = records.read(Report, body, "report")
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

    return Site(
        name="the agents of other nodes",
        routes=[web.post("/report", take)],
        host=host,
        port=port,
        certificates=certificates,
        log=log,
    )


async def _acquire(lock: threading.RLock) -> None:
    """Acquire the agent's lock, and let other answers go on until it is free; raises Refused where
    the agent's main loop does not release it.
    """
    deadline = time.monotonic() + _HANGS
    while not lock.acquire(blocking=False):
        if time.monotonic() > deadline:
            raise Refused("the main loop of the head's agent hangs")
        await asyncio.sleep(_RETRY)
