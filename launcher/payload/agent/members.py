"""A node's agent that is not the head's, and its connection to the head's: HTTP over mutual TLS.

Engines go on while the head is away. Standard library only; `reports.py` is the other side.
"""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import node as nodes
from . import records
from .certificates import Certificates, Troubles, cause
from .log import say
from .node import Node, Order, Report, ServerReport

EVERY = 1.0  # seconds between two reports
_CONNECT = 5.0  # seconds for a connection to the head
_ANSWER = 10.0  # seconds for an answer
HOLD = 20.0  # seconds for which the head holds a question for orders that have not changed
_LARGEST = 1 << 20  # bytes of an answer; orders of several servers have a tenth of it


class Lost(Exception):
    """The connection is of no use any more; the text says why."""


@dataclass(frozen=True)
class Orders:
    """All that the head's agent orders this node, numbered within that agent's start."""

    head_boot: str = ""
    number: int = 0
    servers: Mapping[str, Order] = field(default_factory=dict)
    ray: str = ""  # which start of Ray's head it told of


class Follower:
    """An agent that is not the head's."""

    def __init__(self, node: Node, link: Link) -> None:
        self.node, self.link = node, link
        self.orders = Orders()
        self._told: object = None
        self._again = 0.0

    @property
    def ray(self) -> str:
        """Which start of Ray's head the head's agent told of last."""
        return self.orders.ray

    def turn(self) -> None:
        """Do what was ordered last; report each second, and at once when a state changes."""
        self.orders = self.link.orders
        self.node.orders = self.orders.servers
        self.node.turn()
        reports, now = self.node.report(), time.monotonic()
        states = {
            name: (report.state, report.last, report.prepared, report.waits)
            for name, report in reports.items()
        }
        told = (self.orders.head_boot, self.orders.number, states)
        if told != self._told or now >= self._again:
            self._told, self._again = told, now + EVERY
            self.link.post(reports, self.orders)


class Link:
    """The connection to the head's agent.

    One thread posts reports, of which only the newest counts; orders come in the answers. Another
    asks for other orders, which the head answers only when there are, and has a report posted then.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        certificates: Certificates,
        wake: Callable[[], object],
    ) -> None:
        self.name, self.host, self.port, self._wake = name, host, port, wake
        self.boot = secrets.token_hex(8)
        self.orders = Orders()
        self._certificates = certificates
        self._report: tuple[Mapping[str, ServerReport], Orders] = ({}, self.orders)
        self._due, self._answered = threading.Event(), threading.Event()
        self._connection: http.client.HTTPSConnection | None = None
        self._head_boot = ""  # whose the connection is; empty until it has said so
        self._count = 0  # of reports since this agent started
        self._troubles = Troubles()
        self._over = False
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._post_all, self._ask_all)
        ]

    def start(self) -> None:
        """Connect, and stay connected."""
        for each in self._threads:
            each.start()

    def close(self) -> None:
        """Connect no more; the head notices."""
        self._over = True
        self._due.set()
        self._answered.set()
        for each in self._threads:
            each.join()

    def post(self, servers: Mapping[str, ServerReport], done: Orders) -> None:
        """Report how the servers are, after those orders were carried out."""
        self._report = servers, done
        self._due.set()

    # --- reports

    def _post_all(self) -> None:
        while self._due.wait() and not self._over:
            self._due.clear()
            try:
                self._exchange()
            except Exception as error:  # whatever it is, the next report is posted
                self._lose(cause(error))
                time.sleep(EVERY)
                continue
            self._answered.set()
        self._close()

    def _exchange(self) -> None:
        """Post a report and take the orders; raises many things."""
        if self._connection is None:
            self._connection = self._connect(_ANSWER)
        new = not self._head_boot
        if new:
            # The first answer only tells which start of the head's agent this is, so that nothing
            # of another one can be taken for its own.
            self._head_boot = str(self._post({}, 0).get("head_boot") or "")[:40]
        servers, done = self._report
        number = done.number if done.head_boot == self._head_boot else 0
        found = _orders(self._post(servers, number))
        if found.head_boot != self._head_boot:
            raise Lost("it answered as another start of itself")
        last = self.orders
        if found.head_boot == last.head_boot and found.number < last.number:
            raise Lost(f"it sent orders {found.number} after orders {last.number}")
        self.orders = found
        if (found.head_boot, found.number, found.ray) != (last.head_boot, last.number, last.ray):
            self._wake()
        if new:
            self._troubles = Troubles()
            say("the head's agent is here")

    def _post(self, servers: Mapping[str, ServerReport], done: int) -> dict[str, Any]:
        assert self._connection is not None  # noqa: S101 - `_exchange` has made it
        self._count += 1
        report = Report(
            node=self.name,
            boot=self.boot,
            number=self._count,
            head_boot=self._head_boot,
            done=done,
            servers=servers,
        )
        return _request(self._connection, "POST", "/report", records.as_bytes(report))

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        """Connect; the head's certificate must have its address. Raises OSError or Lost."""
        context = self._certificates.context()
        if context is None:
            raise Lost("this node has no certificate yet")
        made = http.client.HTTPSConnection(self.host, self.port, timeout=_CONNECT, context=context)
        try:
            made.connect()
        except BaseException:
            made.close()
            raise
        made.auto_open = 0  # another connection begins anew
        made.sock.settimeout(timeout)
        return made

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._head_boot = None, ""

    def _lose(self, why: str) -> None:
        self._close()
        self._tell(why)

    def _tell(self, why: str) -> None:
        self._troubles.say(
            f"no connection to the head's agent at {self.host} port {self.port}: {why}; what"
            " runs here goes on"
        )

    # --- orders that change

    def _ask_all(self) -> None:
        while self._answered.wait() and not self._over:
            self._answered.clear()
            try:
                self._ask()
            except Exception as error:
                if isinstance(error, ssl.SSLError):  # the other thread's connection may be fine
                    self._tell(cause(error))

    def _ask(self) -> None:
        """Ask for orders other than the last, until the connection ends."""
        connection = self._connect(HOLD + _ANSWER)
        try:
            while not self._over:
                self._answered.clear()
                had = self.orders
                path = f"/orders?head_boot={had.head_boot}&number={had.number}"
                if _request(connection, "GET", path).get("changed"):
                    self._due.set()
                    self._answered.wait(_ANSWER)
        finally:
            connection.close()


def _request(
    connection: http.client.HTTPSConnection, method: str, path: str, body: bytes | None = None
) -> dict[str, Any]:
    """Return what the head's agent answers; raises many things."""
    connection.request(method, path, body)
    response = connection.getresponse()
    data = response.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise Lost("its answer is too long")
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Lost(f"its answer of {response.status} is no JSON object")
    if response.status != 200:
        raise Lost(f"it refuses: {str(said.get('error'))[:300]}")
    return said


def _orders(said: Mapping[str, Any]) -> Orders:
    """Read orders; raises ValueError where it is none."""
    number = said.get("number")
    if not isinstance(number, int):
        raise ValueError("its answer has no orders")
    return Orders(
        head_boot=str(said.get("head_boot"))[:40],
        number=number,
        servers=nodes.read(said.get("orders")),
        ray=str(said.get("ray") or "")[:40],
    )
