"""The common start of all nodes' probes: they connect to the head's, which lets all go when every
rank has torch.

Standard library only; imported by `network.py`. The head's probe answers at the rendezvous port
from its first moment, before anybody imports torch, so that who does not get through is told from
who is slow. Later the ranks' store takes the same port over.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

GREETING = 10.0  # seconds within which a probe answers another one
PAUSE = 0.1
LINE = 200


class Unmet(Exception):
    """This node's ranks cannot meet the others; the text says why."""


class Gathering:
    """The head's side: which nodes have come, and whose ranks all have torch."""

    def __init__(self, held: socket.socket, nonce: str, others: list[str]) -> None:
        self.held, self.nonce, self.others = held, nonce, others
        self.callers: dict[socket.socket, list[str]] = {}  # node, and what is not a line yet
        self.there: dict[str, socket.socket] = {}
        self.ready: set[str] = set()
        self.ended: set[str] = set()
        held.listen(len(others) + 16)
        held.setblocking(False)

    def wait(self, own, reach: float, torch: float) -> list[str]:
        """Let the others come, for `reach` seconds, and wait for torch, at most `torch` seconds;
        return the nodes whose ranks will not come, once all others were let go.

        `own` tells whether the ranks of the head have torch.
        """
        began = time.monotonic()
        while (spent := time.monotonic() - began) < torch and not self.over(own(), spent, reach):
            self.turn()
        gone = [name for name in self.others if name not in self.there or name in self.ended]
        for name, caller in self.there.items():
            if name not in self.ended:
                with contextlib.suppress(OSError):
                    caller.sendall(b"go\n")
        for caller in self.callers:
            caller.close()
        return gone

    def over(self, own: bool, spent: float, reach: float) -> bool:
        """Tell whether there is nobody left to wait for."""
        if not own or set(self.there) - self.ready - self.ended:
            return False
        return spent >= reach or len(self.there) == len(self.others)

    def turn(self) -> None:
        """Take in what came within a moment."""
        for each in select.select([self.held, *self.callers], [], [], PAUSE)[0]:
            with contextlib.suppress(OSError):
                if each is self.held:
                    caller, _ = self.held.accept()
                    caller.setblocking(False)
                    self.callers[caller] = ["", ""]
                else:
                    self.heard(each)

    def heard(self, caller: socket.socket) -> None:
        """Take in what a caller said, or that it ended."""
        try:
            data = caller.recv(LINE).decode(errors="replace")
        except ConnectionError:
            data = ""
        name, partial = self.callers[caller]
        *lines, partial = (partial + data).split("\n")
        self.callers[caller][1] = partial
        for line in lines:
            name = self.said(caller, name, line)
        if not data or len(partial) > LINE or (lines and not name):
            self.ended |= {name} if name else set()
            del self.callers[caller]
            caller.close()

    def said(self, caller: socket.socket, name: str, line: str) -> str:
        """Take in one line of a node's probe; return the node, nothing for a stranger."""
        if name:
            self.ready |= {name} if line == "ready" else set()
            return name
        nonce, _, new = line.partition(" ")
        if nonce != self.nonce or new not in self.others or new in self.there:
            return ""
        caller.sendall(f"{self.nonce} here\n".encode())
        self.callers[caller][0] = new
        self.there[new] = caller
        return new


def follow(master: str, port: int, nonce: str, node: str, own, reach: float, torch: float) -> None:
    """Come to the head's probe within `reach` seconds, tell it when this node's ranks have torch
    (`own`), and wait until it lets all go, at most `torch` seconds.

    Raises Unmet.
    """
    where, until = f"{master}:{port}", time.monotonic() + reach + torch
    with knock(master, port, reach) as head:
        head.settimeout(GREETING)
        try:
            head.sendall(f"{nonce} {node}\n".encode())
            greeted = said(head) == f"{nonce} here"
        except OSError:
            greeted = False
        if not greeted:
            raise Unmet(f"something else answers at {where}: it does not speak as this run's probe")
        while not own() and time.monotonic() < until:
            time.sleep(PAUSE)
        head.settimeout(max(GREETING, until - time.monotonic()))
        try:
            head.sendall(b"ready\n")
            word = said(head)
        except OSError:
            word = ""
        if word != "go":
            raise Unmet(f"the head's probe at {where} ended before all ranks had torch")


def said(connection: socket.socket) -> str:
    """Return the next line that the other side says; what there is of it when that ends."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE and (byte := connection.recv(1)):
        line += byte
    return line.decode(errors="replace").rstrip("\n")


def knock(host: str, port: int, window: float) -> socket.socket:
    """Return a connection to the head, as soon as it listens.

    Raises Unmet with the system's words when it does not within `window` seconds.
    """
    deadline, why = time.monotonic() + window, "no answer"
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((host, port), timeout=min(5.0, window))
        except OSError as error:
            why = (
                "no answer"
                if isinstance(error, TimeoutError)
                else (error.strerror or str(error)).lower()
            )
        time.sleep(2 * PAUSE)
    raise Unmet(f"the head did not open {host}:{port} within {window:.0f} s: {why}")
