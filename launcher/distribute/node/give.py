"""The serving side of a chain: sends nodes of the copy the chunks that they request, as soon as
these have arrived.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from . import wire
from .secure import Connection, Tls
from .store import Hand, Store
from .wire import ALIVE, BYTES, DIGEST, HAVE, HEAD, WANT

SILENCE_TIMEOUT = 4.0  # seconds of silence, until somebody is taken for dead
_HEARTBEAT_INTERVAL = 1.0  # seconds between two signs of life
_SEND_TIMEOUT = 60.0  # seconds in which a receiver whose disk is busy must take something
_HANDSHAKE_TIMEOUT = 5.0  # seconds for the handshake
_MAX_PENDING = 64  # connections before the end of their handshake
_MAX_HEADS = 256  # heads that are sent at once
_BLOCK = 2**18  # bytes that are encrypted at once: few enough to stay in a core's cache


class Listener:
    """Accepts connections; `given` takes over those that bring chunks instead of fetching them.

    Raises OSError where nobody can listen there.
    """

    def __init__(
        self,
        store: Store,
        tls: Tls,
        where: tuple[str, int],
        given: Callable[[Connection], None],
        *,
        rate: int = 0,
    ) -> None:
        self._store, self._tls, self._on_giver, self._rate = store, tls, given, rate
        self._socket = socket.create_server(where, backlog=256)
        self._pending: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept_connections, daemon=True).start()

    @property
    def port(self) -> int:
        """The port that is listened at."""
        return int(self._socket.getsockname()[1])

    def _accept_connections(self) -> None:
        while True:
            try:
                guest = self._socket.accept()[0]
            except OSError:
                time.sleep(0.05)  # too many open files, or a guest that has gone
                continue
            with self._lock:
                self._pending.append(guest)
                if len(self._pending) > _MAX_PENDING:
                    # The oldest one's thread sees the end, and closes it.
                    with contextlib.suppress(OSError):
                        self._pending.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._handle_connection, args=(guest,), daemon=True).start()

    def _handle_connection(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            try:
                guest = self._tls.accept(sock, _HANDSHAKE_TIMEOUT)
                wire.patient(guest, _HANDSHAKE_TIMEOUT, _HANDSHAKE_TIMEOUT, self._rate)
                purpose = wire.confirm_purpose(guest)
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._pending.remove(sock)
            if purpose == wire.PULL:
                wire.patient(guest, _HANDSHAKE_TIMEOUT, _SEND_TIMEOUT)
                serve_chunks(self._store, guest)
            elif purpose == wire.GIVE:
                self._on_giver(guest)


def serve_chunks(store: Store, guest: Connection) -> None:
    """Send the requested chunks of one stream as they arrive; raises OSError."""
    identity, chunks = store.manifest.identity, store.manifest.chunks
    stream, streams, states = wire.receive_request(guest, identity, chunks)
    left = bytearray(states)
    missing = sum(1 for state in left[stream::streams] if state != HAVE)
    hand, at = Hand(store), 0
    block = None if guest.plain else memoryview(bytearray(_BLOCK))
    heads: list[bytes] = []  # of digests alone: small, and many at a time
    try:
        while missing:
            at, number = _next_chunk(
                store, at, stream, streams, left, wait=0 if heads else _HEARTBEAT_INTERVAL
            )
            if number >= 0:
                kind = BYTES if left[number] == WANT else DIGEST
                left[number] = HAVE
                missing -= 1
                heads.append(HEAD.pack(kind, number, store.digest(number)))
                if kind == DIGEST and missing and len(heads) < _MAX_HEADS:
                    continue
            elif not heads:
                heads.append(HEAD.pack(ALIVE, len(store.arrived), bytes(32)))
            more = number >= 0 and kind == BYTES
            if more:
                wire.together(guest, True)
            guest.sendall(b"".join(heads))
            heads.clear()
            if more:
                _send_chunk(store, guest, number, hand, block)
                wire.together(guest, False)
    finally:
        hand.close()


def _next_chunk(
    store: Store, at: int, stream: int, streams: int, left: bytearray, *, wait: float
) -> tuple[int, int]:
    """Return the next chunk to send, and how far in the order of arrival that is; -1 when none came
    for so many seconds.
    """
    until = time.monotonic() + wait
    ready = store.ready(stream)
    with ready:
        while True:
            while at < len(store.arrived):
                number = store.arrived[at]
                at += 1
                wanted = number % streams == stream and left[number] != HAVE
                if wanted and store.states[number] == HAVE:
                    _advance_reader(store, at)
                    return at, number
            _advance_reader(store, at)
            patience = until - time.monotonic()
            if patience <= 0:
                return at, -1
            ready.wait(patience)


def _advance_reader(store: Store, at: int) -> None:
    if at > store.passed:
        store.passed = at
        store.room.notify_all()


def _send_chunk(
    store: Store, guest: Connection, number: int, hand: Hand, block: memoryview | None
) -> None:
    at, offset, left = store.manifest.place(number)
    descriptor = hand.open(at)
    while left:
        if block is not None:
            count = os.preadv(descriptor, [block[:left]], offset)
            guest.sendall(block[:count])
        else:
            count = os.sendfile(guest.socket.fileno(), descriptor, offset, left)
        if not count:
            raise OSError(f"{store.path(at)} has become shorter")
        offset, left = offset + count, left - count
        store.sent += count
