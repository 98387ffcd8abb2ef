"""Entry point of the node program: reads a request and orders from standard input, prints events as
lines of JSON, and exits when its input closes.
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
from .connection import Tls
from .fetcher import Streams, Upstream
from .files import STATE, CopyManifest, UnsafeName, state_folder
from .hub import HubError, download_files, resolve_revision
from .models import scan_models
from .record import DigestRecords
from .server import SILENCE_TIMEOUT, Listener, serve_chunks
from .source import PageCache, SourceAltered, SourceReader
from .store import ChunkStore

_REPORT_INTERVAL = 0.5  # seconds between two progress events
_SPACE_MARGIN = 1.02  # space required per missing byte
_lock = threading.Lock()
_RENEW_INTERVAL = 2.0  # seconds
_STALE_AFTER = 8.0  # seconds without a renewal, after which a writer counts as dead


def emit_event(event: str, **fields: Any) -> None:
    """Print an event; exits when the reader is gone."""
    with _lock:
        try:
            sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            os._exit(1)


def main(request: dict[str, Any]) -> int:
    """Run a request; returns the exit code."""
    try:
        if request["verb"] == "look":
            emit_event("seen", **scan_models(request))
        elif request["verb"] == "resolve":
            emit_event("resolved", **resolve_revision(request))
        elif request["verb"] == "export":
            _exit_with_input()
            emit_event("exported", **images.export_image(request))
        elif request["verb"] == "drop":
            images.remove_folder(request["root"], request["top"])
            emit_event("dropped")
        elif request["verb"] == "download":
            _exit_with_input()
            emit_event("downloaded", **download_files(request, emit_event))
        elif request["verb"] == "remove":
            existing = [root for root in request["roots"] if os.path.lexists(root)]
            emit_event("removed", bytes=sum(place.remove_model(root) for root in existing))
        else:
            _run_copy(request)
    except (OSError, UnsafeName, SourceAltered, HubError, ValueError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        emit_event("failed", why=_describe_error(error), full=full)
        return 1
    return 0


def _exit_with_input() -> None:
    """Exit when the launcher closes standard input."""

    def wait() -> None:
        while sys.stdin.readline():
            pass
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()


def _run_copy(request: dict[str, Any]) -> None:
    claim = None
    if "load" in request:
        images.create_private_folder(request["root"], request["top"])
    if not request["source"]:
        os.makedirs(request["root"], exist_ok=True)
        state_folder(request["root"], "parts")
        copy_id = hashlib.sha256(request["certificate"].encode()).hexdigest()[:16]
        try:
            claim = Claim(request["root"], copy_id, request["node"])
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
        suffix = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{suffix}"
    return str(error) or type(error).__name__


class _NodeCopy:
    """One node's part in a copy."""

    def __init__(self, request: dict[str, Any], claim: Claim | None) -> None:
        self._request, self._claim = request, claim
        signal.signal(signal.SIGTERM, lambda *_: self._exit(143))
        self._tls = Tls(request["certificate"], plain=not request["encrypt"])
        self._streams = int(request["streams"])
        self._root = request["root"]
        manifest = CopyManifest.from_json(request["manifest"])
        place.check_names(request)
        records = DigestRecords(self._root, trusted=not request.get("compare"))
        self._store = ChunkStore(self._root, manifest, records, self._streams)
        self._store.load_state(source=bool(request["source"]))
        self._reader: SourceReader | None = None
        if request["source"]:
            self._reader = SourceReader(self._store, alone=bool(request.get("alone")))
        self._upstream = Upstream(emit_event)
        self._fetcher = Streams(self._store, self._tls, self._streams, self._upstream, self._wake)
        self._cache = None if request.get("cached") else PageCache(self._store)
        self._source_read = not request["source"]  # all files are read and match their digests
        self._error: BaseException | None = None
        self._finished = False
        self._start_cpu = 0.0  # CPU seconds before the copy
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        """Listen, and execute orders until the copy is finished; raises SourceAltered, OSError."""
        self._check_space()
        listener = None
        if "listen" in self._request:
            host, port = self._request["listen"]
            rate = int(self._request.get("rate", 0)) // self._streams
            on_giver = self._fetcher.receive_stream
            listener = Listener(self._store, self._tls, (host, port), on_giver, rate=rate)
        threading.Thread(target=self._read_orders, daemon=True).start()
        present = self._store.present_bytes
        emit_event("listening", port=listener.port if listener else 0, have=present)
        reported = False
        while True:
            with contextlib.suppress(queue.Empty):
                self._execute_order(self._orders.get(timeout=_REPORT_INTERVAL))
            for error in (self._fetcher.error, self._error):
                if error is not None:
                    raise error
            if self._finished:
                cpu, start = round(time.process_time(), 2), round(self._start_cpu, 2)
                emit_event("finished", sent=self._store.sent, cpu=cpu, start=start)
                return
            if self._claim is not None:
                self._claim.renew()
            self._report_progress()
            if not reported and self._source_read and self._store.is_complete():
                reported = True
                root = self._store.root_digest()
                emit_event("complete", root=root, received=self._store.received)

    def _check_space(self) -> None:
        """Raise OSError when the missing bytes do not fit on the disk."""
        if self._request["source"]:
            return
        disk = os.statvfs(self._root)
        missing = self._store.manifest.total_bytes - self._store.present_bytes
        missing -= place.unfinished_bytes(self._root)
        for index, file in enumerate(self._store.manifest.files):
            if self._store.in_place[index] and not self._is_recorded(index):
                missing -= file.size
        free = disk.f_bavail * disk.f_frsize
        if missing > 0 and missing * _SPACE_MARGIN > free:
            text = f"{missing} bytes are missing, and {free} are free"
            raise OSError(errno.ENOSPC, text, self._root)

    def _is_recorded(self, index: int) -> bool:
        numbers = self._store.manifest.file_chunks(index)
        return all(self._store.states[number] == wire.HAVE for number in numbers)

    def _read_orders(self) -> None:
        """Queue orders from standard input, and exit at its end."""
        for line in sys.stdin:
            with contextlib.suppress(ValueError):
                self._orders.put(json.loads(line))
        self._exit(3)

    def _exit(self, code: int) -> None:
        """Exit at once; received chunks stay, and the same copy resumes from them."""
        if self._claim is not None:
            self._claim.release()
        os._exit(code)

    def _execute_order(self, order: dict[str, Any]) -> None:
        """Execute one order."""
        if order["order"] == "go":
            self._begin()
        elif order["order"] == "before":
            self._upstream.set_peers(order["peers"])
        elif order["order"] == "give":
            for stream in range(self._streams):
                args = (stream, order["host"], order["port"])
                threading.Thread(target=self._push_stream, args=args, daemon=True).start()
        elif order["order"] == "doubt":
            self._recheck_chunk(int(order["number"]))
        elif order["order"] == "finish":
            # In a thread, because flushing to the disk may take minutes, and progress must go on.
            threading.Thread(target=self._finish_copy, daemon=True).start()

    def _begin(self) -> None:
        """Start to read, or to fetch."""
        self._start_cpu = time.process_time()
        targets = [self._fetcher.start if self._reader is None else self._read_source]
        if self._cache is not None:
            targets.append(self._cache.follow)
        for target in targets:
            threading.Thread(target=target, daemon=True).start()

    def _recheck_chunk(self, number: int) -> None:
        """Read a chunk again that arrived with wrong bytes; raises SourceAltered when it differs on
        this disk, which then cannot be trusted.
        """
        if not self._store.recheck_chunk(number):
            index = self._store.manifest.locate_chunk(number)[0]
            name = self._store.manifest.files[index].name
            text = f"{name} changed on disk during the copy"
            raise SourceAltered(text)

    def _finish_copy(self) -> None:
        try:
            if "load" in self._request:
                images.load_image(self._store, self._request["load"])
                images.remove_folder(self._root, self._request["top"])
            elif self._reader is None:
                place.install_files(self._store, self._request)
            else:
                self._write_record()
            if self._cache is not None:
                self._cache.forget_all()
            self._finished = True
        # the main thread reports it
        except BaseException as error:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        """Have the main thread check the state now."""
        self._orders.put({"order": "look"})

    def _write_record(self) -> None:
        """Record the digests of the source; on a read-only disk this is skipped."""
        if self._request.get("label"):
            from .record import write_record

            with contextlib.suppress(OSError, UnsafeName):
                digests = bytes(self._store.digests)
                write_record(self._root, self._request["label"], self._store.manifest, digests)

    def _read_source(self) -> None:
        try:
            if self._reader is not None:
                self._reader.run()
                self._source_read = True
        # the main thread reports it
        except BaseException as error:
            self._error = error
        self._wake()

    def _push_stream(self, stream: int, host: str, port: int) -> None:
        """Push a stream to a node that cannot connect to this one, reconnecting until the end."""
        while True:
            try:
                with socket.create_connection((host, port), SILENCE_TIMEOUT) as sock:
                    connection = self._tls.connect(sock, SILENCE_TIMEOUT)
                    wire.set_timeouts(connection, 60.0, 60.0)
                    wire.send_purpose(connection, wire.GIVE)
                    connection.sendall(bytes([stream]))
                    serve_chunks(self._store, connection)
            except OSError:
                pass
            time.sleep(0.5)

    def _report_progress(self) -> None:
        store = self._store
        emit_event(
            "progress",
            have=store.present_bytes,
            received=store.received,
            sent=store.sent,
            source=self._upstream.current,
        )


class FolderBusyError(OSError):
    """Another copy writes to the folder, or, with `shared`, another node of the same copy."""

    def __init__(self, node: str, *, shared: bool) -> None:
        super().__init__(f"another copy, from {node}, is writing there")
        self.node, self.shared = node, shared


class Claim:
    """Exclusive right of a copy's node to write below `root`; raises FolderBusyError, OSError."""

    def __init__(self, root: str, copy: str, node: str) -> None:
        self._path = os.path.join(root, STATE, "writer")
        self._text = json.dumps({"copy": copy, "node": node})
        self._renewed = time.monotonic()
        deadline = time.monotonic() + 2 * _STALE_AFTER
        while not self._create():
            owner, age = self._read_owner()
            if owner.get("copy") == copy:
                raise FolderBusyError(str(owner.get("node")), shared=True)
            if age > _STALE_AFTER:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            elif time.monotonic() > deadline:
                raise FolderBusyError(str(owner.get("node", "somewhere")), shared=False)
            else:
                time.sleep(0.2)

    def renew(self) -> None:
        """Mark the writer as alive; call at least every _STALE_AFTER seconds."""
        if time.monotonic() - self._renewed >= _RENEW_INTERVAL:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Release the folder."""
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
        """Return the current writer, and the seconds since its last renewal by the clock of the
        file system.
        """
        probe = f"{self._path}.{os.getpid()}-{time.monotonic_ns()}"
        owner: object = {}
        age = 0.0
        with contextlib.suppress(OSError, ValueError):
            with open(probe, "w"):
                pass
            age = os.stat(probe).st_mtime - os.stat(self._path).st_mtime
            with open(self._path, encoding="utf-8") as file:
                owner = json.load(file)
        with contextlib.suppress(OSError):
            os.unlink(probe)
        return owner if isinstance(owner, dict) else {}, age
