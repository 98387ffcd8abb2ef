"""The common start of all nodes' probes: they connect to the head's probe, which releases them when
all ranks have imported torch.

Standard library only; imported by `network.py`. Connections use mutual TLS 1.3 with the run's
certificate, except in exported pods, which have none. The head's probe listens at the rendezvous
port before any rank imports torch: a node that cannot connect is unreachable, not slow. The ranks'
store uses the same port later.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

import tls

GREETING = 10.0  # seconds to complete the handshake and the greeting
PAUSE = 0.1
LINE = 200


class Unmet(Exception):
    """This node's ranks cannot meet the others; the message has the reason."""


class Gathering:
    """The head's side: the nodes whose probes have connected, and those whose ranks have torch."""

    def __init__(
        self, listener: socket.socket, nonce: str, others: list[str], certificate: str = ""
    ) -> None:
        self.listener, self.nonce, self.others = listener, nonce, others
        self.context = tls.contexts(certificate)[0] if certificate else None
        self.connected: set[str] = set()
        self.ready: set[str] = set()
        self.disconnected: set[str] = set()
        self.lock, self.released = threading.Lock(), threading.Event()
        listener.listen(len(others) + 16)
        listener.setblocking(False)

    def wait(self, head_ready: Callable[[], bool], reach: float, torch: float) -> list[str]:
        """Accept probes for `reach` seconds, wait up to `torch` seconds for all ranks, release the
        connected nodes, and return the others.

        `head_ready` returns whether the head's own ranks have torch.
        """
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < torch and (
            not head_ready() or self.is_waiting(elapsed < reach)
        ):
            if select.select([self.listener], [], [], PAUSE)[0]:
                with contextlib.suppress(OSError):
                    client = self.listener.accept()[0]
                    threading.Thread(target=self.serve, args=(client,), daemon=True).start()
        with self.lock:
            self.released.set()
            present = self.connected - self.disconnected
            return [name for name in self.others if name not in present]

    def is_waiting(self, accepting: bool) -> bool:
        """Return whether a connected node is not ready, or a missing one may still connect."""
        if self.connected - self.ready - self.disconnected:
            return True
        return accepting and len(self.connected) < len(self.others)

    def serve(self, client: socket.socket) -> None:
        """Admit a client that is a probe of this run, and stay with it until the release."""
        client.settimeout(GREETING)
        name = ""
        try:
            with secure_connection(client, self.context, server_side=True) as probe:
                if name := self.admit(read_line(probe)):
                    probe.sendall(f"{self.nonce} here\n".encode())
                    self.release(probe, name)
        except OSError:
            if name:
                self.disconnected.add(name)

    def admit(self, line: str) -> str:
        """Return the node that a client's first line introduces; empty if it is refused."""
        nonce, _, name = line.partition(" ")
        with self.lock:
            ours = nonce == self.nonce and name in self.others
            if not ours or name in self.connected or self.released.is_set():
                return ""
            self.connected.add(name)
            return name

    def release(self, probe: socket.socket, name: str) -> None:
        """Note when a node's ranks are ready, and release it with the others; raises OSError."""
        while not self.released.is_set():
            if select.select([probe], [], [], PAUSE)[0]:
                if read_line(probe) != "ready":
                    raise ConnectionResetError("it closed the connection")
                self.ready.add(name)
        probe.sendall(b"go\n")


def follow(
    master: str,
    port: int,
    nonce: str,
    node: str,
    ready: Callable[[], bool],
    reach: float,
    torch: float,
    certificate: str = "",
) -> None:
    """Connect to the head's probe within `reach` seconds, report when this node's ranks have torch
    (`ready`), and wait for the release, at most `torch` seconds.

    Raises Unmet, and OSError for an invalid certificate.
    """
    address, deadline = f"{master}:{port}", time.monotonic() + reach + torch
    context = tls.contexts(certificate)[1] if certificate else None
    sock = connect(master, port, reach)
    sock.settimeout(GREETING)
    with contextlib.ExitStack() as stack:
        try:
            head = stack.enter_context(secure_connection(sock, context))
            head.sendall(f"{nonce} {node}\n".encode())
            greeted = read_line(head) == f"{nonce} here"
            reason = "it does not speak as this run's probe"
        except OSError as error:
            greeted, reason = False, tls.reason(error)
        if not greeted:
            raise Unmet(f"something else answers at {address}: {reason}")
        while not ready() and time.monotonic() < deadline:
            time.sleep(PAUSE)
        head.settimeout(max(GREETING, deadline - time.monotonic()))
        try:
            head.sendall(b"ready\n")
            line, reason = read_line(head), "it closed the connection"
        except OSError as error:
            line, reason = "", tls.reason(error)
        if line != "go":
            raise Unmet(f"the head's probe at {address} ended before all ranks had torch: {reason}")


def secure_connection(
    sock: socket.socket, context: ssl.SSLContext | None, *, server_side: bool = False
) -> socket.socket:
    """Return the connection after the TLS handshake, if it has TLS; raise OSError, closing it."""
    return context.wrap_socket(sock, server_side=server_side) if context else sock


def read_line(connection: socket.socket) -> str:
    """Return the next line without its end; an incomplete one when the connection is closed."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE and (byte := connection.recv(1)):
        line += byte
    return line.decode(errors="replace").rstrip("\n")


def connect(host: str, port: int, window: float) -> socket.socket:
    """Connect to the head as soon as it listens.

    Raises Unmet with the system's error message after `window` seconds.
    """
    deadline, reason = time.monotonic() + window, "no answer"
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((host, port), timeout=min(5.0, window))
        except OSError as error:
            reason = (
                "no answer"
                if isinstance(error, TimeoutError)
                else (error.strerror or str(error)).lower()
            )
        time.sleep(2 * PAUSE)
    raise Unmet(f"the head did not open {host}:{port} within {window:.0f} s: {reason}")
