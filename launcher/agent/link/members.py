"""Agent of a node that is not the head, and its connection to the head's agent: HTTP over mutual
TLS.

Engines go on while the head is away. `leader.py` is the other side.
"""

from __future__ import annotations

import http.client
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .. import records, state
from ..front.haproxy import Rotation
from ..log import LimitedLog, say
from ..processes.node import AgentReport, LocalNode, Order, ServerReport
from .certificates import Certificates, describe_error

EVERY = 1.0  # seconds between two reports
_QUICK = 0.2  # seconds between two reports while other orders are likely
_LIKELY = 3.0  # seconds after a change of a state
_CONNECT = 5.0  # seconds for a connection to the head
_ANSWER = 10.0  # seconds for an answer
_LARGEST = 1 << 20  # bytes of an answer; orders of several servers have a tenth of it


class ConnectionLost(Exception):
    """A broken connection; the text has the reason."""


@dataclass(frozen=True, kw_only=True)
class ReportReply:
    """The head's answer to a report: all orders of a node, numbered within its `head_boot`, and an
    id that changes with each start of Ray's head, and the states of servers for the node's front.
    """

    head_boot: str = ""
    number: int = 0
    orders: Mapping[str, Order] = field(default_factory=dict)
    ray: str = ""
    front: Mapping[str, str] = field(default_factory=dict)


class Member:
    """Agent of a node that is not the head.

    A thread posts its reports, of which only the newest counts, and calls `wake` when the answer
    has changed.
    """

    def __init__(
        self,
        name: str,
        node: LocalNode,
        host: str,
        port: int,
        certificates: Certificates,
        wake: Callable[[], object],
    ) -> None:
        self.name, self.node, self.host, self.port, self._wake = name, node, host, port, wake
        self.boot = secrets.token_hex(8)
        self.answer = ReportReply()
        self._certificates = certificates
        self._report: tuple[
            Mapping[str, ServerReport], Mapping[str, Rotation] | None, ReportReply
        ] = ({}, None, self.answer)
        self._state: object = None
        self._changed = self._posted = 0.0
        self._due = threading.Event()
        self._connection: http.client.HTTPSConnection | None = None
        self._head_boot = ""  # of the agent at the other end of the connection
        self._count = 0  # reports since this agent started
        self._log = LimitedLog()
        self._closing = False
        self._thread = threading.Thread(target=self._post_all, daemon=True, name="reports")

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def close(self) -> None:
        """Disconnect, which the head notices."""
        self._closing = True
        self._due.set()
        self._thread.join()

    @property
    def changing(self) -> bool:
        """True while new orders are likely."""
        return self.node.changing or time.monotonic() - self._changed < _LIKELY

    def tick(self) -> None:
        """Carry out the last orders; report at once when a state changes, else periodically."""
        answer = self.answer
        self.node.orders = answer.orders
        self.node.tick()
        self.node.front.tick(answer.front)
        front = self.node.front.report
        servers, now = self.node.report(), time.monotonic()
        states = {
            name: (report.state, report.last, report.prepared, report.waits, report.stopped)
            for name, report in servers.items()
        }
        rotations = (
            {name: (server.state, server.requests > 0) for name, server in front.items()}
            if front
            else front
        )
        last, self._state = self._state, (answer.head_boot, answer.number, states, rotations)
        if self._state != last:
            self._changed = now
        elif now - self._posted < (_QUICK if self.changing else EVERY):
            return
        self._report, self._posted = (servers, front, answer), now
        self._due.set()

    def _post_all(self) -> None:
        while self._due.wait() and not self._closing:
            self._due.clear()
            try:
                self._exchange()
            except Exception as error:  # whatever it is, the next report is posted
                self._disconnect()
                self._log.say(
                    f"no connection to the head's agent at {self.host} port {self.port}:"
                    f" {describe_error(error)}; local processes keep running"
                )
                time.sleep(EVERY)
        self._disconnect()

    def _exchange(self) -> None:
        """Post a report and process the answer; raises many exceptions."""
        new = self._connection is None
        if new:
            self._connect()
            # The first answer has only the boot of the head's agent, so that it takes no report,
            # and this agent no orders, of another boot.
            self._head_boot = self._post({}, None, 0).head_boot
        servers, front, done = self._report
        number = done.number if done.head_boot == self._head_boot else 0
        answer = self._post(servers, front, number)
        last = self.answer
        if answer.head_boot != self._head_boot:
            raise ConnectionLost("it was restarted meanwhile")
        if answer.head_boot == last.head_boot and answer.number < last.number:
            raise ConnectionLost(f"it sent orders {answer.number} after orders {last.number}")
        if not all(map(state.NAME.fullmatch, answer.orders)):
            raise ConnectionLost("it sent orders for a server with an invalid name")
        self.answer = answer
        if answer != last:
            self._wake()
        if new:
            self._log = LimitedLog()
            say("connected to the head's agent")

    def _post(
        self,
        servers: Mapping[str, ServerReport],
        front: Mapping[str, Rotation] | None,
        done: int,
    ) -> ReportReply:
        assert self._connection is not None  # noqa: S101 - `_exchange` has made it
        self._count += 1
        report = AgentReport(
            node=self.name,
            boot=self.boot,
            number=self._count,
            head_boot=self._head_boot,
            done=done,
            servers=servers,
            program=state.program_digest(),
            front=front,
        )
        self._connection.request("POST", "/report", records.as_bytes(report))
        response = self._connection.getresponse()
        data = response.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ConnectionLost("its answer is too long")
        if response.status != 200:
            raise ConnectionLost(f"it refused the report: {data[:300].decode(errors='replace')}")
        return records.parse_record(ReportReply, data, "answer", complete=True)

    def _connect(self) -> None:
        """Connect; the head's certificate must have its address. Raises OSError, ConnectionLost."""
        context = self._certificates.context()
        if context is None:
            raise ConnectionLost("this node has no certificate yet")
        self._connection = http.client.HTTPSConnection(
            self.host, self.port, timeout=_CONNECT, context=context
        )
        self._connection.connect()
        self._connection.auto_open = 0  # another connection begins with the head's boot
        self._connection.sock.settimeout(_ANSWER)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._head_boot = None, ""
