"""Fetcher of a chain's node: several streams from the node before this one, or, when that fails or
sends wrong bytes, from the next one upstream.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...core.tls import reason
from . import wire
from .connection import Connection, Tls
from .files import UnsafeName
from .server import SILENCE_TIMEOUT
from .store import ChunkStore, FileHandle

_CONNECT_TIMEOUT = 3.0  # seconds
_RETRY_DELAYS = (0.2, 0.4, 0.8, 1.6, 3.0)  # seconds, by the number of a peer's failures
_IDLE_INTERVAL = 0.1  # seconds between checks for missing chunks
THIS_MACHINE = "this machine"  # the launcher's machine, which pushes chunks; no node has this name
_MAX_WRONG = 2  # wrong chunks after which a peer is avoided


class WrongBytes(OSError):
    """Chunk `number` does not match its digest."""

    def __init__(self, number: int) -> None:
        super().__init__(f"chunk {number} does not match its checksum")
        self.number = number


class Upstream:
    """The nodes before this one, nearest first; failed ones are skipped for a while."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._peers: list[tuple[str, str, int]] = []
        self._failed: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._wrong: dict[str, int] = {}
        self.current = ""  # the node that answered last

    def set_peers(self, peers: Sequence[Sequence[Any]]) -> None:
        """Set the nodes to fetch from: name, host and port, nearest first."""
        with self._lock:
            self._peers = [(str(name), str(host), int(port)) for name, host, port in peers]

    def choose_peer(self, now: float) -> tuple[str, str, int] | None:
        """Return the peer to fetch from; None while all are skipped."""
        with self._lock:
            available = [peer for peer in self._peers if self._not_before.get(peer[0], 0.0) <= now]
            trusted = [peer for peer in available if self._wrong.get(peer[0], 0) < _MAX_WRONG]
        return next(iter(trusted or available), None)

    def record_failure(self, name: str, error: OSError, now: float) -> None:
        """Skip a peer for a while after an error."""
        with self._lock:
            count = self._failed.get(name, 0)
            self._failed[name] = count + 1
            self._not_before[name] = now + _RETRY_DELAYS[min(count, len(_RETRY_DELAYS) - 1)]
            if isinstance(error, WrongBytes):
                self._wrong[name] = self._wrong.get(name, 0) + 1
                if self._wrong[name] < _MAX_WRONG:
                    self._not_before[name] = 0.0  # retry: the network may have damaged it
        if isinstance(error, WrongBytes):
            self._emit("wrong", who=name, why=describe_error(error), number=error.number)
        else:
            self._emit("lost", who=name, why=describe_error(error))

    def record_success(self, name: str) -> None:
        """Make an answering node the current peer."""
        with self._lock:
            self._failed.pop(name, None)
            self.current = name


def describe_error(error: OSError) -> str:
    """Describe why a connection failed."""
    if isinstance(error, (BlockingIOError, socket.timeout)):
        return f"silent for {SILENCE_TIMEOUT:g} s"
    return reason(error)


class Streams:
    """The streams of one node; `error` is a failure of its own disk. `on_end` is called when a
    stream ends.
    """

    def __init__(
        self,
        store: ChunkStore,
        tls: Tls,
        streams: int,
        upstream: Upstream,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._tls, self._streams, self._on_end = store, tls, streams, on_end
        self._upstream = upstream
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start to fetch."""
        for stream in range(self._streams):
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True).start()

    def _run_stream(self, stream: int) -> None:
        buffer = memoryview(bytearray(self._store.manifest.chunk_size))
        handle = FileHandle(self._store)
        try:
            # Another stream may reset a file, so that this one must fetch chunks of it again.
            while not self._store.is_complete():
                if self._store.count_missing(stream, self._streams):
                    self._fetch_once(stream, handle, buffer)
                else:
                    time.sleep(_IDLE_INTERVAL)
        # an error of the disk or a bug: the main thread reports it
        except BaseException as error:
            self.error = error
        finally:
            handle.close()
            self._on_end()

    def _fetch_once(self, stream: int, handle: FileHandle, buffer: memoryview) -> None:
        peer = self._upstream.choose_peer(time.monotonic())
        if peer is None:
            time.sleep(0.05)
            return
        name, host, port = peer
        try:
            with socket.create_connection((host, port), _CONNECT_TIMEOUT) as sock:
                connection = self._tls.connect(sock, _CONNECT_TIMEOUT)
                wire.set_timeouts(connection, SILENCE_TIMEOUT, SILENCE_TIMEOUT)
                wire.send_purpose(connection, wire.PULL)
                self._upstream.record_success(name)
                self._fetch_chunks(connection, stream, handle, buffer)
        except _DiskError as error:
            raise error.args[0] from None
        except OSError as error:
            self._upstream.record_failure(name, error, time.monotonic())

    def receive_stream(self, connection: Connection) -> None:
        """Fetch from a peer that has connected to this node; raises OSError."""
        buffer = memoryview(bytearray(self._store.manifest.chunk_size))
        handle = FileHandle(self._store)
        try:
            wire.set_timeouts(connection, SILENCE_TIMEOUT, SILENCE_TIMEOUT)
            stream = connection.receive_exactly(1)[0]
            if stream < self._streams:
                self._fetch_chunks(connection, stream, handle, buffer)
        except _DiskError as error:
            self.error = error.args[0]
        except WrongBytes as error:
            self._upstream.record_failure(THIS_MACHINE, error, time.monotonic())
        finally:
            handle.close()

    def _fetch_chunks(
        self, connection: Connection, stream: int, handle: FileHandle, buffer: memoryview
    ) -> None:
        store = self._store
        with store.lock:
            states = bytes(store.states)
        wire.send_request(connection, stream, self._streams, store.manifest.identity, states)
        remaining = sum(1 for state in states[stream :: self._streams] if state != wire.HAVE)
        receive = connection.receive_plain if connection.plain else connection.receive
        while remaining:
            kind, number, digest = wire.HEAD.unpack(connection.receive_exactly(wire.HEAD.size))
            if kind == wire.ALIVE:
                continue
            if number >= store.manifest.chunk_count or number % self._streams != stream:
                raise wire.ProtocolError("it sent data that was not requested")
            remaining -= 1
            view = buffer[: store.manifest.locate_chunk(number)[2]]
            if kind == wire.BYTES:
                receive(view)
                store.received += len(view)
                if hashlib.sha256(view).digest() != digest:
                    raise WrongBytes(number)
            with _disk_errors():
                if kind == wire.BYTES:
                    store.write_chunk(number, view, digest, handle)
                else:
                    store.verify_chunk(number, digest, handle, buffer)


class _DiskError(Exception):
    """Wrapper that separates errors of the disk from those of connections."""


@contextlib.contextmanager
def _disk_errors() -> Any:
    try:
        yield
    except (OSError, UnsafeName) as error:
        raise _DiskError(error) from None
