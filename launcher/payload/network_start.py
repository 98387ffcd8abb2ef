"""The common start of all nodes' probes: they connect to the head's, which lets all go when every
rank has torch.

Standard library only; imported by `network.py`. Connections are mutual TLS 1.3 with the run's
certificate; in exported pods, which have none, they are in the clear. The head's probe answers at
the rendezvous port from its first moment, before anybody imports torch, so that who does not get
through is told from who is slow. Later the ranks' store takes the same port over.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import tls

GREETING = 10.0  # seconds within which a probe answers another one
PAUSE = 0.1
LINE = 200


class Unmet(Exception):
    """This node's ranks cannot meet the others; the text says why."""


class Gathering:
    """The head's side: which nodes have come, and whose ranks all have torch."""

    def __init__(
        self, held: socket.socket, nonce: str, others: list[str], certificate: str = ""
    ) -> None:
        self.held, self.nonce, self.others = held, nonce, others
        self.context = tls.contexts(certificate)[0] if certificate else None
        self.there: set[str] = set()
        self.ready: set[str] = set()
        self.ended: set[str] = set()
        self.lock, self.over = threading.Lock(), threading.Event()
        held.listen(len(others) + 16)
        held.setblocking(False)

    def wait(self, own, reach: float, torch: float) -> list[str]:
        """Let the others come, for `reach` seconds, and wait for torch, at most `torch` seconds;
        return the nodes whose ranks will not come, and let all others go.

        `own` tells whether the ranks of the head have torch.
        """
        began = time.monotonic()
        while (spent := time.monotonic() - began) < torch and self.waits(own(), spent, reach):
            if select.select([self.held], [], [], PAUSE)[0]:
                with contextlib.suppress(OSError):
                    caller = self.held.accept()[0]
                    threading.Thread(target=self.serve, args=(caller,), daemon=True).start()
        with self.lock:
            self.over.set()
            return [name for name in self.others if name not in self.there - self.ended]

    def waits(self, own: bool, spent: float, reach: float) -> bool:
        """Tell whether there is a node left to wait for."""
        if not own or self.there - self.ready - self.ended:
            return True
        return spent < reach and len(self.there) < len(self.others)

    def serve(self, caller: socket.socket) -> None:
        """Let one caller in, if it is a probe of this run, and tell it when to go on."""
        caller.settimeout(GREETING)
        name = ""
        try:
            with secured(caller, self.context, server_side=True) as probe:
                if name := self.let_in(said(probe)):
                    probe.sendall(f"{self.nonce} here\n".encode())
                    self.accompany(probe, name)
        except OSError:
            if name:
                self.ended.add(name)

    def let_in(self, line: str) -> str:
        """Return the node of a caller that introduces itself; nothing for any other one."""
        nonce, _, name = line.partition(" ")
        with self.lock:
            ours = nonce == self.nonce and name in self.others
            if not ours or name in self.there or self.over.is_set():
                return ""
            self.there.add(name)
            return name

    def accompany(self, probe: socket.socket, name: str) -> None:
        """Hear when a node's ranks have torch, and let it go with all others; raises OSError."""
        while not self.over.is_set():
            if select.select([probe], [], [], PAUSE)[0]:
                if said(probe) != "ready":
                    raise ConnectionResetError("it ended the connection")
                self.ready.add(name)
        probe.sendall(b"go\n")


def follow(
    master: str,
    port: int,
    nonce: str,
    node: str,
    own,
    reach: float,
    torch: float,
    certificate: str = "",
) -> None:
    """Come to the head's probe within `reach` seconds, tell it when this node's ranks have torch
    (`own`), and wait until it lets all go, at most `torch` seconds.

    Raises Unmet, and OSError for a certificate that is none.
    """
    where, until = f"{master}:{port}", time.monotonic() + reach + torch
    context = tls.contexts(certificate)[1] if certificate else None
    caller = knock(master, port, reach)
    caller.settimeout(GREETING)
    with contextlib.ExitStack() as stack:
        try:
            head = stack.enter_context(secured(caller, context))
            head.sendall(f"{nonce} {node}\n".encode())
            greeted = said(head) == f"{nonce} here"
            why = "it does not speak as this run's probe"
        except OSError as error:
            greeted, why = False, tls.reason(error)
        if not greeted:
            raise Unmet(f"something else answers at {where}: {why}")
        while not own() and time.monotonic() < until:
            time.sleep(PAUSE)
        head.settimeout(max(GREETING, until - time.monotonic()))
        try:
            head.sendall(b"ready\n")
            word, why = said(head), "it closed the connection"
        except OSError as error:
            word, why = "", tls.reason(error)
        if word != "go":
            raise Unmet(f"the head's probe at {where} ended before all ranks had torch: {why}")


def secured(sock: socket.socket, context, *, server_side: bool = False) -> socket.socket:
    """Return the connection as it is to be used; raises OSError, after closing it."""
    return context.wrap_socket(sock, server_side=server_side) if context else sock


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
