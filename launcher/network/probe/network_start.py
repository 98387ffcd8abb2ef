"""Common start of all nodes' probes: they connect to the head's probe, which releases them once all
ranks have imported torch, and stay connected until their ranks have met.

Standard library only; imported by `network.py`. Connections use mutual TLS 1.3 with the run's
certificate, except in exported pods, which have none. The head's probe listens at the rendezvous
port before any rank imports torch: a node that cannot connect is unreachable, not slow. The ranks'
store uses the same port later. A probe disconnects as soon as one of its ranks exits: the head does
not wait for that node, and no node waits for a head without its ranks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import tls

GREETING_TIMEOUT = 10.0  # seconds to complete the handshake and the greeting
PAUSE = 0.1
LINE = 200
# Begins the error of a rank that stops because another has ended; `network/suspects.py` reads it.
STOPPED = "stopped: "


class RendezvousError(Exception):
    """This node's ranks cannot meet the others; the message has the reason."""


class Ranks(Protocol):
    """Ranks of this node. The first two methods raise RendezvousError for an early exit."""

    def have_torch(self) -> bool:
        """True once all have imported torch."""

    def have_met(self) -> bool:
        """True once all have met those of the other nodes."""

    def release(self, absent: Sequence[str]) -> None:
        """Let them meet the ranks of all nodes but the absent ones."""

    def lose(self, node: str) -> None:
        """Let them stop waiting for a released node."""


class Gathering:
    """The head's side: nodes with a connected probe, and those whose ranks have torch."""

    def __init__(
        self,
        listener: socket.socket,
        nonce: str,
        others: list[str],
        ranks: Ranks,
        certificate: str = "",
    ) -> None:
        self.listener, self.nonce, self.others, self.ranks = listener, nonce, others, ranks
        self.context = tls.contexts(certificate)[0] if certificate else None
        self.missing, self.connected, self.ready = set(others), set[str](), set[str]()
        self.lock, self.released = threading.Lock(), threading.Event()
        self.failure = ""
        listener.listen(len(others) + 16)
        listener.setblocking(False)

    def meet(self, reach: float, torch: float) -> None:
        """Accept probes for `reach` seconds, wait up to `torch` seconds for all ranks, release the
        connected nodes, and stay until the head's ranks have met the others.

        Raises RendezvousError if a rank of the head exits, after informing the other nodes.
        """
        began = time.monotonic()
        try:
            while (elapsed := time.monotonic() - began) < torch and (
                not self.ranks.have_torch() or self.is_waiting(elapsed < reach)
            ):
                self.accept()
            with self.lock:
                self.released.set()
                self.ranks.release([name for name in self.others if name not in self.connected])
            self.listener.close()
            while not self.ranks.have_met():
                time.sleep(PAUSE)
        except RendezvousError as error:
            self.dismiss(str(error).removeprefix(STOPPED), began + reach)
            raise

    def is_waiting(self, accepting: bool) -> bool:
        """True if a connected node is not ready, or a missing one may still connect."""
        return bool(self.connected - self.ready or (accepting and self.missing))

    def accept(self) -> None:
        """Admit the next client, if one connects within `PAUSE`."""
        if select.select([self.listener], [], [], PAUSE)[0]:
            with contextlib.suppress(OSError):
                client = self.listener.accept()[0]
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def dismiss(self, reason: str, deadline: float) -> None:
        """Report to all connected nodes, and to later ones before the deadline, that their ranks
        will not meet the head's.
        """
        self.failure, deadline = reason, max(deadline, time.monotonic() + GREETING_TIMEOUT)
        while time.monotonic() < deadline:
            if not self.released.is_set() and self.missing:
                self.accept()
            elif self.connected:
                time.sleep(PAUSE)
            else:
                break

    def serve(self, client: socket.socket) -> None:
        """Admit a client of this run, and stay with it until its ranks have met the others."""
        client.settimeout(GREETING_TIMEOUT)
        name, met = "", False
        with (
            contextlib.suppress(OSError),
            secure_connection(client, self.context, server_side=True) as probe,
        ):
            if name := self.admit(read_line(probe)):
                probe.sendall(f"{self.nonce} here\n".encode())
                met = self.attend(probe, name)
        with self.lock:
            self.connected.discard(name)
            lost = name and not met and self.released.is_set()
        if lost and not self.failure:
            self.ranks.lose(name)

    def admit(self, line: str) -> str:
        """Return the node in a client's first line; empty if it is refused."""
        nonce, _, name = line.partition(" ")
        with self.lock:
            if nonce != self.nonce or name not in self.missing or self.released.is_set():
                return ""
            self.connected.add(name)
            self.missing.remove(name)
            return name

    def attend(self, probe: socket.socket, name: str) -> bool:
        """Record when a node's ranks are ready, and release it with the others; return whether its
        ranks have met them. Raises OSError.
        """
        released = False
        while not self.failure:
            if self.released.is_set() and not released:
                probe.sendall(b"go\n")
                released = True
            line = next_line(probe)
            if line == "ready":
                self.ready.add(name)
            elif line is not None:
                return line == "met"
        probe.sendall(f"no {self.failure}\n".encode())
        return False


def follow(
    ranks: Ranks,
    master: str,
    port: int,
    nonce: str,
    node: str,
    reach: float,
    torch: float,
    certificate: str = "",
) -> None:
    """Connect to the head's probe within `reach` seconds, report when this node's ranks have torch,
    release them with the others within `torch` seconds, and stay until they have met.

    Raises RendezvousError, and OSError for an invalid certificate.
    """
    address, deadline = f"{master}:{port}", time.monotonic() + reach + torch
    context = tls.contexts(certificate)[1] if certificate else None
    sock = connect(master, port, reach)
    sock.settimeout(GREETING_TIMEOUT)
    with contextlib.ExitStack() as stack:
        try:
            head = stack.enter_context(secure_connection(sock, context))
            head.sendall(f"{nonce} {node}\n".encode())
            greeted = read_line(head) == f"{nonce} here"
            reason = "it is not this run's probe"
        except OSError as error:
            greeted, reason = False, tls.reason(error)
        if not greeted:
            raise RendezvousError(f"something else answers at {address}: {reason}")
        try:
            attend(head, ranks, deadline)
        except OSError as error:
            text = f"the head's probe at {address} ended before all ranks had met"
            raise RendezvousError(f"{STOPPED}{text}: {tls.reason(error)}") from None


def attend(head: socket.socket, ranks: Ranks, deadline: float) -> None:
    """Stay with the head's probe until this node's ranks have met the others.

    Raises RendezvousError if one of them exits, and OSError if the head's probe does.
    """
    ready = released = False
    while not (released and ranks.have_met()):
        if not ready and ranks.have_torch():
            head.sendall(b"ready\n")
            ready = True
        line = next_line(head)
        if line == "go":
            released = True
            ranks.release(())
        elif line is not None:
            raise ConnectionResetError(line.removeprefix("no ") or "it closed the connection")
        elif not released and time.monotonic() > deadline:
            raise TimeoutError("it did not release them in time")
    with contextlib.suppress(OSError):
        head.sendall(b"met\n")


def secure_connection(
    sock: socket.socket, context: ssl.SSLContext | None, *, server_side: bool = False
) -> socket.socket:
    """Return the connection after the TLS handshake, if it has TLS; raise OSError, closing it."""
    return context.wrap_socket(sock, server_side=server_side) if context else sock


def next_line(connection: socket.socket) -> str | None:
    """Return the next line; None if none begins within `PAUSE`, empty at the connection's end."""
    connection.settimeout(PAUSE)
    try:
        first = connection.recv(1)
    except TimeoutError:
        return None
    finally:
        connection.settimeout(GREETING_TIMEOUT)
    return read_line(connection, first) if first else ""


def read_line(connection: socket.socket, line: bytes = b"") -> str:
    """Return the next line after its beginning `line`; incomplete at the connection's end."""
    while not line.endswith(b"\n") and len(line) < LINE and (byte := connection.recv(1)):
        line += byte
    return line.decode(errors="replace").rstrip("\n")


def connect(host: str, port: int, window: float) -> socket.socket:
    """Connect to the head as soon as it listens.

    Raises RendezvousError with the system's error message after `window` seconds.
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
    raise RendezvousError(f"the head did not open {host}:{port} within {window:.0f} s: {reason}")
