"""The program of one node: reads what is wanted on its standard input, tells what becomes of it on
its standard output, a JSON object a line each, and ends with its input.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any

from . import images, place, wire
from .fetch import NotFetched, download, resolve
from .files import STATE, Manifest, Unsafe, state_folder
from .give import PATIENCE, Listener, serve
from .look import look
from .record import Known
from .secure import Tls
from .source import Altered, Cache, Reader
from .store import Store
from .take import Streams, Upstream

_REPORT_INTERVAL = 0.5  # seconds between two words of how far it is
_SPACE_MARGIN = 1.02  # how much more room is asked for than the bytes that are missing
_lock = threading.Lock()
_RENEW_INTERVAL = 2.0  # seconds
_STALE_AFTER = 8.0  # seconds without a touch, after which a writer counts as dead


def emit_event(event: str, **more: Any) -> None:
    """Print an event; nobody who reads is a reason to end."""
    with _lock:
        try:
            sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            os._exit(1)


def main(request: dict[str, Any]) -> int:
    """Do what the request says; returns the exit code."""
    try:
        if request["verb"] == "look":
            emit_event("seen", **look(request))
        elif request["verb"] == "resolve":
            emit_event("resolved", **resolve(request))
        elif request["verb"] == "export":
            _exit_with_input()
            emit_event("exported", **images.export(request))
        elif request["verb"] == "drop":
            images.drop(request["root"], request["top"])
            emit_event("dropped")
        elif request["verb"] == "download":
            _exit_with_input()
            emit_event("downloaded", **download(request, emit_event))
        elif request["verb"] == "remove":
            there = [root for root in request["roots"] if os.path.lexists(root)]
            emit_event("removed", bytes=sum(place.remove(root) for root in there))
        else:
            _run_copy(request)
    except (OSError, Unsafe, Altered, NotFetched, ValueError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        emit_event("failed", why=_describe_error(error), full=full)
        return 1
    return 0


def _exit_with_input() -> None:
    """End when nobody waits any more."""

    def wait() -> None:
        while sys.stdin.readline():
            pass
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()


def _run_copy(request: dict[str, Any]) -> None:
    claim = None
    if "load" in request:
        images.own(request["root"], request["top"])
    if not request["source"]:
        os.makedirs(request["root"], exist_ok=True)
        state_folder(request["root"], "parts")
        copy = hashlib.sha256(request["certificate"].encode()).hexdigest()[:16]
        try:
            claim = Claim(request["root"], copy, request["node"])
        except FolderBusyError as error:
            if not error.shared:
                raise
            emit_event("shared", who=error.node)
            return
    try:
        _NodeCopy(request, claim).run()
    finally:
        if claim is not None:
            claim.release()


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__


class _NodeCopy:
    """One node's part in a copy, from the request to the end."""

    def __init__(self, request: dict[str, Any], claim: Claim | None) -> None:
        self._request, self._claim = request, claim
        signal.signal(signal.SIGTERM, lambda *_: self._exit(143))
        self._tls = Tls(request["certificate"], plain=not request["encrypt"])
        self._streams = int(request["streams"])
        self._root = request["root"]
        manifest = Manifest.read(request["manifest"])
        place.check(request)
        known = Known(self._root, believed=not request.get("compare"))
        self._store = Store(self._root, manifest, known, self._streams)
        self._store.begin(source=bool(request["source"]))
        self._reader: Reader | None = None
        if request["source"]:
            self._reader = Reader(self._store, alone=bool(request.get("alone")))
        self._upstream = Upstream(emit_event)
        self._fetcher = Streams(self._store, self._tls, self._streams, self._upstream, self._wake)
        self._cache = None if request.get("cached") else Cache(self._store)
        self._source_read = not request["source"]  # the reader has read all, and all is right
        self._error: BaseException | None = None
        self._finished = False
        self._start_cpu = 0.0  # seconds of processors until it began
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        """Listen, say so, and do what is ordered; raises what the disk refuses, and Altered."""
        self._check_space()
        listener = None
        if "listen" in self._request:
            host, port = self._request["listen"]
            rate = int(self._request.get("rate", 0)) // self._streams
            listener = Listener(
                self._store, self._tls, (host, port), self._fetcher.given, rate=rate
            )
        threading.Thread(target=self._read_orders, daemon=True).start()
        have = self._store.bytes
        emit_event("listening", port=listener.port if listener else 0, have=have)
        told = False
        while True:
            with contextlib.suppress(queue.Empty):
                self._execute_order(self._orders.get(timeout=_REPORT_INTERVAL))
            for error in (self._fetcher.broken, self._error):
                if error is not None:
                    raise error
            if self._finished:
                cpu, start = round(time.process_time(), 2), round(self._start_cpu, 2)
                emit_event("finished", sent=self._store.sent, cpu=cpu, start=start)
                return
            if self._claim is not None:
                self._claim.renew()
            self._report_progress()
            if not told and self._source_read and self._store.complete():
                told = True
                root = self._store.root_digest()
                emit_event("complete", root=root, received=self._store.received)

    def _check_space(self) -> None:
        """Raise OSError when the disk cannot take what is missing."""
        if self._request["source"]:
            return
        place_ = os.statvfs(self._root)
        missing = self._store.manifest.bytes - self._store.bytes
        missing -= place.unfinished(self._root)
        for at, each in enumerate(self._store.manifest.files):
            if self._store.whole[at] and not self._is_recorded(at):
                missing -= each.size
        free = place_.f_bavail * place_.f_frsize
        if missing > 0 and missing * _SPACE_MARGIN > free:
            text = f"{missing} bytes are missing, and {free} are free"
            raise OSError(errno.ENOSPC, text, self._root)

    def _is_recorded(self, at: int) -> bool:
        numbers = self._store.manifest.chunks_of(at)
        return all(self._store.states[number] == wire.HAVE for number in numbers)

    def _read_orders(self) -> None:
        """Take orders from the standard input; its end is ours."""
        for line in sys.stdin:
            with contextlib.suppress(ValueError):
                self._orders.put(json.loads(line))
        self._exit(3)

    def _exit(self, code: int) -> None:
        """End at once: what is there stays, and the same copy goes on with it."""
        if self._claim is not None:
            self._claim.release()
        os._exit(code)

    def _execute_order(self, order: dict[str, Any]) -> None:
        """Do as ordered."""
        if order["order"] == "go":
            self._begin()
        elif order["order"] == "before":
            self._upstream.order(order["peers"])
        elif order["order"] == "give":
            for stream in range(self._streams):
                args = (stream, order["host"], order["port"])
                threading.Thread(target=self._push_stream, args=args, daemon=True).start()
        elif order["order"] == "doubt":
            self._recheck_chunk(int(order["number"]))
        elif order["order"] == "finish":
            # Beside the signs of life: a disk may take minutes to write what is still in memory.
            threading.Thread(target=self._finish_copy, daemon=True).start()

    def _begin(self) -> None:
        """Begin: read, or fetch."""
        self._start_cpu = time.process_time()
        work = [self._fetcher.start if self._reader is None else self._read_source]
        if self._cache is not None:
            work.append(self._cache.follow)
        for each in work:
            threading.Thread(target=each, daemon=True).start()

    def _recheck_chunk(self, number: int) -> None:
        """Look at a chunk whose bytes were wrong where they came; raises Altered when it is here
        that they went wrong: then nothing of this disk can be believed.
        """
        if not self._store.sound(number):
            at = self._store.manifest.place(number)[0]
            name = self._store.manifest.files[at].name
            raise Altered(f"{name} has other bytes on the disk than were written or read before")

    def _finish_copy(self) -> None:
        try:
            if "load" in self._request:
                images.load(self._store, self._request["load"])
                images.drop(self._root, self._request["top"])
            elif self._reader is None:
                place.finish(self._store, self._request)
            else:
                self._write_record()
            if self._cache is not None:
                self._cache.forget()
            self._finished = True
        # the main thread tells of it
        except BaseException as error:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        """Have the main thread look how far it is, without waiting for the next time."""
        self._orders.put({"order": "look"})

    def _write_record(self) -> None:
        """Write down what was read, where the source may be written: it is no loss where not."""
        if self._request.get("label"):
            from .record import keep

            with contextlib.suppress(OSError, Unsafe):
                digests = bytes(self._store.digests)
                keep(self._root, self._request["label"], self._store.manifest, digests)

    def _read_source(self) -> None:
        try:
            if self._reader is not None:
                self._reader.run()
                self._source_read = True
        # the main thread tells of it
        except BaseException as error:
            self._error = error
        self._wake()

    def _push_stream(self, stream: int, host: str, port: int) -> None:
        """Bring a stream to a node that cannot reach us, again and again until it has all."""
        while True:
            try:
                with socket.create_connection((host, port), PATIENCE) as sock:
                    connection = self._tls.connect(sock, PATIENCE)
                    wire.patient(connection, 60.0, 60.0)
                    wire.send_purpose(connection, wire.GIVE)
                    connection.sendall(bytes([stream]))
                    serve(self._store, connection)
            except OSError:
                pass
            time.sleep(0.5)

    def _report_progress(self) -> None:
        store = self._store
        emit_event(
            "progress",
            have=store.bytes,
            received=store.received,
            sent=store.sent,
            source=self._upstream.current,
        )


class FolderBusyError(OSError):
    """Somebody else writes there: another copy, or, with `shared`, another node of this one."""

    def __init__(self, node: str, *, shared: bool) -> None:
        super().__init__(f"another copy writes there just now, from {node}")
        self.node, self.shared = node, shared


class Claim:
    """The right to write below `root` for a node of the copy `copy`; raises Taken and OSError."""

    def __init__(self, root: str, copy: str, node: str) -> None:
        self._path = os.path.join(root, STATE, "writer")
        self._text = json.dumps({"copy": copy, "node": node})
        self._renewed = time.monotonic()
        until = time.monotonic() + 2 * _STALE_AFTER
        while not self._create():
            said, age = self._read_owner()
            if said.get("copy") == copy:
                raise FolderBusyError(str(said.get("node")), shared=True)
            if age > _STALE_AFTER:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            elif time.monotonic() > until:
                raise FolderBusyError(str(said.get("node", "somewhere")), shared=False)
            else:
                time.sleep(0.2)

    def renew(self) -> None:
        """Say that the writer lives; to be called often."""
        if time.monotonic() - self._renewed >= _RENEW_INTERVAL:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Let others write."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self._text)
        return True

    def _read_owner(self) -> tuple[dict[str, object], float]:
        """Return what the writer said, and for how many seconds it has been silent by the clock of
        the file system.
        """
        now = f"{self._path}.{os.getpid()}-{time.monotonic_ns()}"
        said: object = {}
        age = 0.0
        with contextlib.suppress(OSError, ValueError):
            with open(now, "w"):
                pass
            age = os.stat(now).st_mtime - os.stat(self._path).st_mtime
            with open(self._path, encoding="utf-8") as file:
                said = json.load(file)
        with contextlib.suppress(OSError):
            os.unlink(now)
        return said if isinstance(said, dict) else {}, age
