"""Tells a gate (`network_gate.py`) that it comes late: the others of its group are past theirs, and
will not come to it again.

What starts behind the gates meets at ports of the first node: agents, ranks, or Ray's nodes. So
whoever listens there is past its gate, and so is whoever comes there; only a gate that waits there
says so. Pods that are being ended may do either for a while. Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

GATE = b'{"challenge": "gate"}\n'  # what a gate says at once: an agent answers it, a gate does not
EVERY = 1.0
ASKED = 1.0  # seconds for who comes to a gate to say something
HEARD = 5.0  # seconds for who listens to do so; gates have one caller after the other
LINE = 200
_RESET = struct.pack("ii", 1, 0)  # the port is free at once for who takes it over


class Late(Exception):
    """The others are past their gates; the text says how that is known."""


class Look:
    """Looks, while this node's gate waits, for who is past his, and for a first node that has
    another address than before; either ends the wait.

    `late` says how it is known that the others are past their gates, for `ending` seconds at least:
    so long may those be heard who are being ended.
    """

    def __init__(
        self, rank: int, name: str, address: str, ports: Sequence[int], ending: float
    ) -> None:
        self.rank, self.name, self.address = rank, name, address
        self.ports, self.ending = ports, ending
        self.late, self.moved = "", False
        self._since: float | None = None
        self._server: socket.socket | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def found(self) -> bool:
        """True when there is no use in waiting."""
        return bool(self.late) or self.moved

    def start(self, end: Callable[[], object]) -> None:
        """Begin to look; `end` is called once when there is no use in waiting."""
        if self.ports:
            self._thread = threading.Thread(target=self._run, args=(end,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more, and leave the ports to others."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._server is not None:
            self._server.close()

    def _run(self, end: Callable[[], object]) -> None:
        while not self._over.is_set():
            self.turn()
            if self.found:
                end()
                return

    def turn(self) -> None:
        """Look once, for about a second."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self._be_asked()
            return
        self.moved = self.address not in addresses(self.name, self.address)
        for port in self.ports:
            who = listens(self.address, port)
            if who == "gate":
                self._since = None
            elif who:
                self._seen(f"rank 0 serves on port {port} already")
                break
        self._over.wait(EVERY)

    def _be_asked(self) -> None:
        """Let the others come where they will look for the first node's processes."""
        (port, *_) = self.ports
        if self._server is None:
            self._over.wait(EVERY)  # before a retry, where the port is somebody else's
            family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
            self._server = socket.create_server((self.address, port), family=family, backlog=64)
            self._server.settimeout(EVERY)
        caller, where = self._server.accept()
        with caller:
            caller.settimeout(ASKED)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            caller.sendall(GATE)
            if caller.recv(LINE):
                self._seen(f"{where[0]} looks for the server on port {port} already")

    def _seen(self, what: str) -> None:
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self.ending:
            self.late = f"{what}, and did so {self.ending:.0f} s ago"


def addresses(name: str, known: str) -> set[str]:
    """Return the addresses of a name; the one that is known where nobody can say."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(name, None)}
    except OSError:
        return {known}


def listens(host: str, port: int) -> str:
    """Tell who listens there: `gate`, something that starts behind the gates (`past`), or nobody
    that one could tell.
    """
    said = b""
    try:
        with socket.create_connection((host, port), HEARD) as first:
            first.settimeout(HEARD)
            try:
                while not said.endswith(b"\n") and len(said) < LINE:
                    data = first.recv(LINE)
                    if not data:
                        return ""  # whoever closes at once says nothing of himself
                    said += data
            except TimeoutError:
                return "past"  # most servers wait to be spoken to
    except OSError:
        return ""
    return "gate" if said == GATE else "past"
