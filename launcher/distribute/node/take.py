"""The side of a chain that fetches: several streams from the node before this one, or, when that is
dead or sends what it should not, from the next one up.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..tls import reason
from . import wire
from .files import Unsafe
from .give import PATIENCE
from .secure import Connection, Tls
from .store import Hand, Store

_CONNECT_TIMEOUT = 3.0  # seconds
_RETRY_DELAYS = (
    0.2,
    0.4,
    0.8,
    1.6,
    3.0,
)  # seconds until somebody is tried again, the more often it failed
_IDLE_INTERVAL = 0.1  # seconds between looks at whether there is more to do
THIS_MACHINE = "this machine"  # who brings chunks instead of being asked; a name that no node has
_MAX_WRONG = 2  # times that a node may send wrong bytes


class WrongBytes(OSError):
    """The bytes of chunk `number` are not those of its digest."""

    def __init__(self, number: int) -> None:
        super().__init__(f"chunk {number} has other bytes than were announced")
        self.number = number


class Upstream:
    """The nodes before this one, the nearest first; those that failed are skipped for a while."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._emit = tell
        self._lock = threading.Lock()
        self._peers: list[tuple[str, str, int]] = []
        self._failed: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._wrong: dict[str, int] = {}
        self.current = ""  # the node that answered last

    def set_peers(self, peers: Sequence[Sequence[Any]]) -> None:
        """Set the nodes to fetch from: name, host and port, the nearest first."""
        with self._lock:
            self._peers = [(str(name), str(host), int(port)) for name, host, port in peers]

    def choose_peer(self, now: float) -> tuple[str, str, int] | None:
        """Return whom to ask; None when nobody can be asked just now."""
        with self._lock:
            able = [each for each in self._peers if self._not_before.get(each[0], 0.0) <= now]
            good = [each for each in able if self._wrong.get(each[0], 0) < _MAX_WRONG]
        return next(iter(good or able), None)

    def record_failure(self, name: str, error: OSError, now: float) -> None:
        """Somebody could not be asked, or is gone: the next one is asked for a while."""
        with self._lock:
            count = self._failed.get(name, 0)
            self._failed[name] = count + 1
            self._not_before[name] = now + _RETRY_DELAYS[min(count, len(_RETRY_DELAYS) - 1)]
            if isinstance(error, WrongBytes):
                self._wrong[name] = self._wrong.get(name, 0) + 1
                if self._wrong[name] < _MAX_WRONG:
                    self._not_before[name] = 0.0  # once more: it may have been the way
        if isinstance(error, WrongBytes):
            self._emit("wrong", who=name, why=describe_error(error), number=error.number)
        else:
            self._emit("lost", who=name, why=describe_error(error))

    def record_success(self, name: str) -> None:
        """Note that a node answers."""
        with self._lock:
            self._failed.pop(name, None)
            self.current = name


def describe_error(error: OSError) -> str:
    """Put into words what became of a connection."""
    if isinstance(error, (BlockingIOError, socket.timeout)):
        return f"silent for {PATIENCE:g} s"
    return reason(error)


class Streams:
    """The streams of one node; `broken` is what its own disk refused. `over` is called when one
    has ended.
    """

    def __init__(
        self,
        store: Store,
        tls: Tls,
        streams: int,
        upstream: Upstream,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._tls, self._streams, self._on_end = store, tls, streams, over
        self._upstream = upstream
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to fetch."""
        for stream in range(self._streams):
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True).start()

    def _run_stream(self, stream: int) -> None:
        buffer = memoryview(bytearray(self._store.manifest.chunk))
        hand = Hand(self._store)
        try:
            # Another stream may find that a file is another one than it seemed, and so have chunks
            # of this one fetched again.
            while not self._store.complete():
                if self._store.lacks(stream, self._streams):
                    self._fetch_once(stream, hand, buffer)
                else:
                    time.sleep(_IDLE_INTERVAL)
        # what the disk refuses, or a mistake of ours: the main thread tells of it
        except BaseException as error:
            self.error = error
        finally:
            hand.close()
            self._on_end()

    def _fetch_once(self, stream: int, hand: Hand, buffer: memoryview) -> None:
        peer = self._upstream.choose(time.monotonic())
        if peer is None:
            time.sleep(0.05)
            return
        name, host, port = peer
        try:
            with socket.create_connection((host, port), _CONNECT_TIMEOUT) as sock:
                connection = self._tls.connect(sock, _CONNECT_TIMEOUT)
                wire.patient(connection, PATIENCE, PATIENCE)
                wire.send_purpose(connection, wire.PULL)
                self._upstream.well(name)
                self._fetch_chunks(connection, stream, hand, buffer)
        except _DiskError as error:
            raise error.args[0] from None
        except OSError as error:
            self._upstream.failed(name, error, time.monotonic())

    def receive_stream(self, connection: Connection) -> None:
        """Fetch from a node that has connected to this one; raises OSError."""
        buffer = memoryview(bytearray(self._store.manifest.chunk))
        hand = Hand(self._store)
        try:
            wire.patient(connection, PATIENCE, PATIENCE)
            stream = connection.receive_exactly(1)[0]
            if stream < self._streams:
                self._fetch_chunks(connection, stream, hand, buffer)
        except _DiskError as error:
            self.error = error.args[0]
        except WrongBytes as error:
            self._upstream.failed(THIS_MACHINE, error, time.monotonic())
        finally:
            hand.close()

    def _fetch_chunks(
        self, connection: Connection, stream: int, hand: Hand, buffer: memoryview
    ) -> None:
        store = self._store
        with store.lock:
            states = bytes(store.states)
        wire.send_request(connection, stream, self._streams, store.manifest.identity, states)
        left = sum(1 for state in states[stream :: self._streams] if state != wire.HAVE)
        receive = connection.receive_plain if connection.plain else connection.receive
        while left:
            kind, number, digest = wire.HEAD.unpack(connection.receive_exactly(wire.HEAD.size))
            if kind == wire.ALIVE:
                continue
            if number >= store.manifest.chunks or number % self._streams != stream:
                raise wire.Refused("it sends what was not asked for")
            left -= 1
            view = buffer[: store.manifest.place(number)[2]]
            if kind == wire.BYTES:
                receive(view)
                store.received += len(view)
                if hashlib.sha256(view).digest() != digest:
                    raise WrongBytes(number)
            with _disk_errors():
                if kind == wire.BYTES:
                    store.write(number, view, digest, hand)
                else:
                    store.prove(number, digest, hand, buffer)


class _DiskError(Exception):
    """Carries an error of our own disk past those of connections."""


@contextlib.contextmanager
def _disk_errors() -> Any:
    try:
        yield
    except (OSError, Unsafe) as error:
        raise _DiskError(error) from None
