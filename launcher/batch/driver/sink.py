"""The only writer: buffers result rows and commits them as complete files, each row once."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.interrupts import defer_signals
from ..job import CACHED_TOKENS, PlacedJob
from .encode import Encoded, Encoder
from .job_file import Failed
from .ledger import Ledger
from .manifest import Manifest
from .progress import Tracker
from .results import TOKEN_COLUMNS, Converter, Part, Row
from .storage import brief_error, mask_secrets, outage_hint

# approximate bytes of rows that commit a file, regardless of `rows_per_file`
LARGEST = 64 << 20
ENCODERS = 2  # threads that encode files
IN_FLIGHT = 3  # files that are encoded or committed at once; then the pipeline waits
# files that are written at once to an object store, where one takes many times as long as on a disk
UPLOADS = 6
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Buffer:
    """Rows waiting for their file."""

    def __init__(self) -> None:
        self.tables: deque[Any] = deque()
        self.rows = self.bytes = 0
        self.since = 0.0

    def add(self, table: Any) -> None:
        if not self.rows:
            self.since = time.monotonic()
        self.tables.append(table)
        self.rows += table.num_rows
        self.bytes += table.nbytes

    def take(self, count: int) -> list[Any]:
        """Remove and return the first rows."""
        self.bytes = self.bytes * (self.rows - count) // self.rows
        self.rows -= count
        taken = []
        while count:
            table = self.tables.popleft()
            if table.num_rows > count:
                self.tables.appendleft(table.slice(count))
                table = table.slice(0, count)
            taken.append(table)
            count -= table.num_rows
        return taken


class Sink:
    """Buffer that commits a file after `rows_per_file` rows, 64 MB, or `seconds`.

    Threads encode files and commit them, after `fence` has returned: one at a time on a disk,
    several on an object store.

    Raises:
        Failed: from any method: no space left, the folder cannot be written, or more error rows
            than `limits.errors` (what came before is committed first). Any other exception of a
            thread is raised as it is.
    """

    def __init__(
        self,
        job: PlacedJob,
        ledger: Ledger,
        manifest: Manifest,
        progress: Tracker,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.job, self.ledger, self.progress, self.fence = job, ledger, progress, fence
        self.converter = Converter(job, manifest.types)
        self.buffers = {"rows": Buffer(), "errors": Buffer()}
        self.broken: BaseException | None = None
        self.firsts = np.array([split.first for split in manifest.splits])
        sizes = [manifest.split_row_bytes(split) for split in manifest.splits]
        self.row_bytes = np.array(sizes, float)
        with self.explain_errors():
            self.encoder = Encoder(job, manifest, ledger.out)
        self.encoders = ThreadPoolExecutor(ENCODERS, "encode")
        uploads = 1 if ledger.out.local else UPLOADS
        self.in_flight = IN_FLIGHT - 1 + uploads
        self.committers = ThreadPoolExecutor(uploads, "commit")
        self.files: deque[Future[list[Row]]] = deque()  # not yet committed
        self.check()

    def add(self, parts: Iterable[Part]) -> int:
        """Add result rows, without duplicates; return the number of new ones.

        Counts them (and tokens) in the progress.
        """
        count = 0
        for kind, table, warnings in parts:
            self.settle(self.in_flight)
            for warning in warnings:
                self.progress.warn(warning)
            new = self.select_new(kind, table)
            good = new.num_rows if kind == "rows" else 0
            size = self.count_bytes(new["row"].to_numpy())
            self.progress.count(good, new.num_rows - good, *count_tokens(new), input_bytes=size)
            self.buffer_rows(kind, new)
            count += new.num_rows
        self.check()
        return count

    def count_bytes(self, numbers: Any) -> float:
        """Return the bytes of rows in the input."""
        splits = np.searchsorted(self.firsts, numbers, "right") - 1
        return float(self.row_bytes[splits].sum())

    def buffer_rows(self, kind: str, table: Any) -> None:
        """Buffer rows, and commit the files that are full."""
        if not table.num_rows:
            return
        buffer = self.buffers[kind]
        buffer.add(table)
        while buffer.rows >= self.job.write.rows_per_file:
            self.write(kind, self.job.write.rows_per_file)
        if buffer.bytes >= LARGEST:
            self.write(kind, buffer.rows)

    def tick(self) -> None:
        """Commit rows older than `write.seconds`; call it about once a second."""
        self.settle(self.in_flight)
        now = time.monotonic()
        if any(
            buffer.rows and now - buffer.since >= self.job.write.seconds
            for buffer in self.buffers.values()
        ):
            self.flush()
            self.check()

    def flush(self) -> None:
        """Commit all buffered rows."""
        if not self.files and not any(buffer.rows for buffer in self.buffers.values()):
            return
        with defer_signals():
            # Answers first: those that cannot be written become error rows.
            for kind, buffer in self.buffers.items():
                while buffer.rows:
                    self.write(kind, min(buffer.rows, self.job.write.rows_per_file))
                self.settle()

    def close(self) -> None:
        """Flush and refuse further rows."""
        self.flush()
        self.check()
        self.broken = Failed("the output is closed")

    def select_new(self, kind: str, table: Any) -> Any:
        """Return the rows that were not accounted for."""
        numbers = table["row"].to_numpy().tolist()
        new_numbers = self.ledger.add(kind, numbers)
        if len(numbers) == len(new_numbers):
            return table
        places = {number: place for place, number in reversed(list(enumerate(numbers)))}
        return table.take(np.array([places[number] for number in new_numbers], np.int64))

    def write(self, kind: str, count: int) -> None:
        """Give the first `count` rows of a buffer to the threads, as one file.

        They leave the buffer first: after an interruption the next run repeats them, and none is
        written twice.
        """
        self.settle(self.in_flight - 1)
        with self.explain_errors(), defer_signals():
            tables = self.buffers[kind].take(count)
            if kind == "rows":
                self.encoder.prepare(tables)
            encoded = self.encoders.submit(self.encoder.encode, kind, tables)
            self.files.append(self.committers.submit(self.commit, kind, encoded))

    def commit(self, kind: str, encoding: Future[Encoded]) -> list[Row]:
        """Commit a file, unless one before it failed; return error rows of rejected answers."""
        if self.broken:
            raise self.broken
        with self.explain_errors():
            encoded = encoding.result()
            if encoded.numbers:
                ending = self.encoder.ending if kind == "rows" else "jsonl"
                self.fence()
                self.ledger.commit(kind, encoded.numbers, encoded.data, ending)
            return encoded.misfits

    def settle(self, limit: int = 0) -> None:
        """Wait until at most `limit` files are not committed; raise what a thread has raised."""
        while self.files and (len(self.files) > limit or self.files[0].done()):
            misfits = self.files[0].result()
            self.files.popleft()
            self.move_to_errors(misfits)
        if self.broken:
            raise self.broken

    def move_to_errors(self, misfits: list[Row]) -> None:
        """Turn answers that cannot be written into error rows."""
        if not misfits:
            return
        self.ledger.move_to_errors(len(misfits))
        self.progress.count(-len(misfits), len(misfits))
        for part in self.converter.convert(misfits):
            self.buffers["errors"].add(part.table)

    def check(self) -> None:
        """Raise Failed when there are too many error rows."""
        limit = self.job.limits.errors
        if limit is None or self.ledger.errors <= limit:
            return
        self.flush()
        folder = mask_secrets(self.ledger.out.child("errors").address)
        raise Failed(
            f"failed rows: {self.ledger.errors}, and `limits.errors` is {limit}",
            f"reasons are in {folder}",
            "fix their cause, or raise `limits.errors`, or run again with `--retry-errors`",
        )

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Explain a filesystem's errors; after any exception, this sink writes nothing more.

        A file whose commit failed may exist all the same (an object store's answer may be lost): a
        retry here could write rows twice. The next run checks.
        """
        try:
            yield
        except OSError as error:
            self.broken = explain_error(error, mask_secrets(self.ledger.out.address))
            raise self.broken from error
        except BaseException as error:
            self.broken = error
            raise


def count_tokens(answers: Any) -> tuple[int, int, int]:
    """Return tokens of prompts, answers and cached prompts; 0 in mode `predict`, whose columns may
    have the same names.
    """
    if CACHED_TOKENS not in answers.column_names:
        return 0, 0, 0
    read, written, cached = (int(answers[name].to_numpy().sum()) for name in TOKEN_COLUMNS)
    return read, written, cached


def explain_error(error: OSError, folder: str) -> Failed:
    """Return the failure that explains a filesystem's error."""
    again = "then run `vlaunch batch` again, which continues where it stopped"
    if error.errno in DISK_FULL or "No space left" in str(error) or "quota" in str(error).lower():
        return Failed(
            f"no space left for answers in {folder}",
            brief_error(error),
            f"free some there (`df -h {folder}`), {again}",
        )
    if (
        isinstance(error, PermissionError)
        or error.errno == errno.EROFS
        or "ACCESS_DENIED" in str(error)
    ):
        return Failed(
            f"permission denied: cannot write {folder}",
            brief_error(error),
            f"allow the head's container to write there, {again}",
        )
    return Failed(
        f"{folder} cannot be written",
        brief_error(error),
        f"{outage_hint(error, 'check that it exists and is writable')}, {again}",
    )
