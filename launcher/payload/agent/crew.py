"""The agents of a cluster, as the head's sees them: who is there, what each reports, and what each
is ordered.

A member posts a report each second, and receives all its orders in the answer, so that a message
that is lost is only late. A connection that breaks ends nothing: engines go on, and what they are
is compared when it is back. Standard library only; `members.py` has the connections.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .log import say
from .node import NOTHING, Node, Order, Report, ServerReport

_FRESH = 5.0  # seconds for which a report holds
SILENCE = 60.0  # seconds without one until a connection counts as broken
_RETURN = 10.0  # seconds for an agent whose connection was closed to come back
_BOOT = 40  # letters of a boot
_BOOTS = 1000  # starts of a node's agent that are remembered


class Refused(Exception):
    """A report that changes nothing; the text says why."""


class Connection(Protocol):
    """The connection over which a report came."""

    def is_closing(self) -> bool:
        """Return whether it has ended."""


@dataclass
class Member:
    """A node's agent that is connected, and what it reported last.

    `boot` is another one after each start of its container. `done` is the number of the orders that
    it had carried out by then.
    """

    boot: str
    connection: Connection
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
        self.changed = False  # a member came or went
        self.ray = ""  # another word each time that Ray's head is started
        self.ordered: Callable[[str], object] = lambda _: None  # told of a node with new orders
        self._sent: dict[str, Any] = {}
        self._number: dict[str, int] = {}  # of the orders of each node
        # of each node the starts of its agent, newest last, and the number of the last report
        self._boots: dict[str, dict[str, int]] = {}
        self._own: Mapping[str, ServerReport] = {}

    # --- what the keeper asks

    def here(self, node: str) -> bool:
        """True when a node's agent is connected."""
        return node == self.name or node in self.members

    def fresh(self, node: str) -> bool:
        """True when a node has been heard a moment ago: what it reported before that may not hold
        any more.
        """
        member = self.members.get(node)
        return node == self.name or (
            member is not None and time.monotonic() - member.heard < _FRESH
        )

    def settled(self, node: str) -> bool:
        """True when a node's report is of after it had carried out what it was ordered last."""
        return node == self.name or (
            node in self.members and self.members[node].done == self.number(node)
        )

    def report(self, node: str, server: str) -> ServerReport:
        """Return a node's report of a server; NOTHING where it has none, or is not here."""
        member = self.members.get(node)
        servers = self._own if node == self.name else member.servers if member else {}
        return servers.get(server, NOTHING)

    def boot_of(self, node: str) -> str:
        """Return a word that changes when a node's container starts anew; empty while it is not
        here.
        """
        return (
            self.boot
            if node == self.name
            else self.members[node].boot
            if node in self.members
            else ""
        )

    def gone(self, node: str) -> str:
        """Say why a node that was here is gone, once it has had time to come back; empty while it
        is here, or may be soon.
        """
        since, why = self.lost.get(node, (0.0, ""))
        return why if why and not self.here(node) and time.monotonic() >= since else ""

    def heard(self) -> dict[str, float]:
        """Return how many seconds ago each node's agent was heard."""
        now = time.monotonic()
        return {
            self.name: 0.0,
            **{name: round(now - each.heard, 1) for name, each in self.members.items()},
        }

    # --- members

    def turn(self) -> None:
        """Order, and part with those who have gone or are silent."""
        self.node.orders = self.orders.get(self.name, {})
        self.node.turn()
        self._own = self.node.report()
        now = time.monotonic()
        for name, member in list(self.members.items()):
            self._order(name)
            if now - member.heard > SILENCE:
                self._lose(name, f"it has been silent for {SILENCE:g} s")
            elif member.connection.is_closing():
                self._lose(name, "its connection was closed")

    def number(self, node: str) -> int:
        """Return the number of a node's orders, which grows when they change."""
        return self._number.get(node, 0)

    def exchange(self, name: str, report: Report, connection: Connection) -> dict[str, Any]:
        """Take a report of the node that the connection's certificate names; return its orders.

        A report that names no start of this agent is answered with that alone. Raises Refused.
        """
        if name == self.name:
            raise Refused(f"{name} is this node itself")
        if report.node != name:
            raise Refused(f"the certificate of {name} came with a report of {report.node}")
        if report.head_boot == "":
            return {"head_boot": self.boot}
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
        return {
            "head_boot": self.boot,
            "number": self.number(name),
            "orders": self._sent[name],
            "ray": self.ray,
        }

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

    def _member(self, name: str, boot: str, connection: Connection) -> Member:
        """Return a node's agent as it is known; one that is new here is ordered anew."""
        member = self.members.get(name)
        if member is not None and member.boot != boot:
            self._lose(name, "it was started anew")
            member = None
        if member is None:
            member = self.members[name] = Member(boot, connection, time.monotonic())
            self.changed = True
            self.lost.pop(name, None)
            self._sent.pop(name, None)
            self._order(name)
            say(f"the agent of {name[:100]} is here")
        return member

    def _order(self, name: str) -> None:
        """Give a node's orders the next number when they have changed."""
        orders = {server: vars(order) for server, order in self.orders.get(name, {}).items()}
        if orders != self._sent.get(name):
            self._sent[name], self._number[name] = orders, self.number(name) + 1
            self.ordered(name)

    def _lose(self, name: str, why: str) -> None:
        member = self.members.pop(name)
        now = time.monotonic()
        # Silence has lasted long enough already; whose end was closed may just have been cut off
        # for a moment.
        self.lost[name] = (now if now - member.heard > SILENCE else now + _RETURN, why)
        self.changed = True
        say(f"the agent of {name[:100]} is gone: {why}")
