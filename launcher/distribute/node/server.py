"""Server of a chain's node: sends requested chunks to other nodes as soon as they arrive."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from . import wire
from .connection import Connection, Tls
from .store import ChunkStore, FileHandle
from .wire import ALIVE, BYTES, DIGEST, HAVE, HEAD, WANT

SILENCE_TIMEOUT = 4.0  # seconds after which a silent peer counts as dead
_HEARTBEAT_INTERVAL = 1.0  # seconds between heartbeats
_SEND_TIMEOUT = 60.0  # seconds in which a receiver with a busy disk must accept data
_HANDSHAKE_TIMEOUT = 5.0  # seconds
_MAX_PENDING = 64  # connections in their handshake
_MAX_HEADS = 256  # heads per send
_BLOCK = 2**18  # bytes encrypted per call: fits a core's cache


class Listener:
    """Acceptor of connections; `on_giver` handles those that push chunks instead of fetching them.

    Raises OSError when the address is in use.
    """

    def __init__(
        self,
        store: ChunkStore,
        tls: Tls,
        address: tuple[str, int],
        on_giver: Callable[[Connection], None],
        *,
        rate: int = 0,
    ) -> None:
        self._store, self._tls, self._on_giver, self._rate = store, tls, on_giver, rate
        self._socket = socket.create_server(address, backlog=256)
        self._pending: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept_connections, daemon=True).start()

    @property
    def port(self) -> int:
        """The listening port."""
        return int(self._socket.getsockname()[1])

    def _accept_connections(self) -> None:
        while True:
            try:
                sock = self._socket.accept()[0]
            except OSError:
                time.sleep(0.05)  # too many open files, or the peer has closed
                continue
            with self._lock:
                self._pending.append(sock)
                if len(self._pending) > _MAX_PENDING:
                    # The oldest connection's thread then closes it.
                    with contextlib.suppress(OSError):
                        self._pending.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._handle_connection, args=(sock,), daemon=True).start()

    def _handle_connection(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            try:
                connection = self._tls.accept(sock, _HANDSHAKE_TIMEOUT)
                wire.set_timeouts(connection, _HANDSHAKE_TIMEOUT, _HANDSHAKE_TIMEOUT, self._rate)
                purpose = wire.confirm_purpose(connection)
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._pending.remove(sock)
            if purpose == wire.PULL:
                wire.set_timeouts(connection, _HANDSHAKE_TIMEOUT, _SEND_TIMEOUT)
                serve_chunks(self._store, connection)
            elif purpose == wire.GIVE:
                self._on_giver(connection)


def serve_chunks(store: ChunkStore, connection: Connection) -> None:
    """Send the requested chunks of one stream as they arrive; raises OSError."""
    identity, chunks = store.manifest.identity, store.manifest.chunk_count
    stream, streams, states = wire.receive_request(connection, identity, chunks)
    peer_states = bytearray(states)
    missing = sum(1 for state in peer_states[stream::streams] if state != HAVE)
    handle, position = FileHandle(store), 0
    block = None if connection.plain else memoryview(bytearray(_BLOCK))
    heads: list[bytes] = []  # heads without bytes are small, so many are sent at once
    try:
        while missing:
            wait = 0 if heads else _HEARTBEAT_INTERVAL
            position, number = _next_chunk(store, position, stream, streams, peer_states, wait)
            if number >= 0:
                kind = BYTES if peer_states[number] == WANT else DIGEST
                peer_states[number] = HAVE
                missing -= 1
                heads.append(HEAD.pack(kind, number, store.digest(number)))
                if kind == DIGEST and missing and len(heads) < _MAX_HEADS:
                    continue
            elif not heads:
                heads.append(HEAD.pack(ALIVE, len(store.arrived), bytes(32)))
            has_bytes = number >= 0 and kind == BYTES
            if has_bytes:
                wire.set_cork(connection, True)
            connection.sendall(b"".join(heads))
            heads.clear()
            if has_bytes:
                _send_chunk(store, connection, number, handle, block)
                wire.set_cork(connection, False)
    finally:
        handle.close()


def _next_chunk(
    store: ChunkStore, position: int, stream: int, streams: int, peer_states: bytearray, wait: float
) -> tuple[int, int]:
    """Return the position in the order of arrival and the number of the next chunk to send; -1 as
    the number when none arrived within `wait` seconds.
    """
    deadline = time.monotonic() + wait
    ready = store.stream_condition(stream)
    with ready:
        while True:
            while position < len(store.arrived):
                number = store.arrived[position]
                position += 1
                matches = number % streams == stream and peer_states[number] != HAVE
                if matches and store.states[number] == HAVE:
                    _advance_reader(store, position)
                    return position, number
            _advance_reader(store, position)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return position, -1
            ready.wait(remaining)


def _advance_reader(store: ChunkStore, position: int) -> None:
    if position > store.read_position:
        store.read_position = position
        store.reader_moved.notify_all()


def _send_chunk(
    store: ChunkStore, peer: Connection, number: int, handle: FileHandle, block: memoryview | None
) -> None:
    index, offset, remaining = store.manifest.locate_chunk(number)
    descriptor = handle.open(index)
    while remaining:
        if block is not None:
            count = os.preadv(descriptor, [block[:remaining]], offset)
            peer.sendall(block[:count])
        else:
            count = os.sendfile(peer.socket.fileno(), descriptor, offset, remaining)
        if not count:
            raise OSError(f"{store.path(index)} has become shorter")
        offset, remaining = offset + count, remaining - count
        store.sent += count
