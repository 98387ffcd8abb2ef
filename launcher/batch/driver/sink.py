"""The only writer: buffers result rows and commits them as complete files, each row once."""

from __future__ import annotations

import errno
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.interrupts import defer_signals
from .encode import Encoder, Row, error_lines, output_columns, unpack_keep
from .job import CACHED_TOKENS, Failed, Job
from .ledger import Ledger
from .lines import EXCERPT_LENGTH
from .manifest import Manifest
from .progress import Tracker
from .storage import brief_error, mask_secrets

# approximate bytes of rows that commit a file, regardless of `rows_per_file`
LARGEST = 64 << 20
SCALARS = frozenset((int, float, bool, type(None)))
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Buffer:
    """Rows waiting for their file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bytes = 0
        self.since = 0.0

    def add(self, rows: list[Row]) -> None:
        if not self.rows:
            self.since = time.monotonic()
        self.rows += rows
        self.bytes += estimate_bytes(rows)

    def take(self, count: int) -> list[Row]:
        """Remove and return the first rows."""
        self.bytes = self.bytes * (len(self.rows) - count) // len(self.rows)
        first_rows, self.rows = self.rows[:count], self.rows[count:]
        return first_rows


def estimate_bytes(rows: list[Row]) -> int:
    """Return the approximate bytes of rows."""
    total = 64 * len(rows)
    for row in rows:
        for value in row.values():
            kind = type(value)
            if kind is str or kind is bytes:
                total += len(value)
            elif kind not in SCALARS:
                total += 8 * len(value) if hasattr(value, "__len__") else 64
    return total


class Sink:
    """Buffer that commits a file after `rows_per_file` rows, 64 MB, or `seconds`.

    Raises:
        Failed: from any method: no space left, the folder cannot be written, or more error rows
            than `limits.errors` (what came before is committed first).
    """

    def __init__(self, job: Job, ledger: Ledger, manifest: Manifest, progress: Tracker) -> None:
        self.job, self.ledger, self.progress = job, ledger, progress
        self.buffers = {"rows": Buffer(), "errors": Buffer()}
        self.broken: Failed | None = None
        self.warned: set[str] = set()
        self.firsts = [split.first for split in manifest.splits]
        self.row_bytes = [manifest.split_row_bytes(split) for split in manifest.splits]
        with self.explain_errors():
            self.encoder = Encoder(job, manifest, ledger.out)
        self.check()

    def add(self, rows: list[Row]) -> int:
        """Add result rows, without duplicates; return the number of new ones.

        Counts them (and tokens) in the progress.
        """
        if self.broken:
            raise self.broken
        good = self.select_new("rows", [row for row in rows if not row["_error"]])
        failed = self.select_new("errors", [row for row in rows if row["_error"]])
        size = sum(self.row_bytes[self.split_of(row["_row"])] for row in (*good, *failed))
        self.progress.count(len(good), len(failed), *self.count_tokens(good), input_bytes=size)
        self.buffer_rows("rows", good)
        self.buffer_rows("errors", failed)
        self.check()
        return len(good) + len(failed)

    def split_of(self, row: int) -> int:
        """Return the index of a row's split."""
        return bisect_right(self.firsts, row) - 1

    def count_tokens(self, answers: list[Row]) -> tuple[int, int, int]:
        """Return tokens of prompts, answers and cached prompts; 0 in mode `predict`, whose columns
        may have the same names.
        """
        if self.job.mode == "predict":
            return 0, 0, 0
        read = sum(row.get("prompt_tokens") or 0 for row in answers)
        written = sum(row.get("output_tokens") or 0 for row in answers)
        return read, written, sum(row.get(CACHED_TOKENS) or 0 for row in answers)

    def buffer_rows(self, kind: str, rows: list[Row]) -> None:
        """Buffer rows, and commit the files that are full."""
        if not rows:
            return
        buffer = self.buffers[kind]
        buffer.add(rows)
        while len(buffer.rows) >= self.job.write.rows_per_file:
            self.commit(kind, self.job.write.rows_per_file)
        if buffer.bytes >= LARGEST:
            self.commit(kind, len(buffer.rows))

    def tick(self) -> None:
        """Commit rows older than `write.seconds`; call it about once a second."""
        now = time.monotonic()
        if any(
            buffer.rows and now - buffer.since >= self.job.write.seconds
            for buffer in self.buffers.values()
        ):
            self.flush()
            self.check()

    def flush(self) -> None:
        """Commit all buffered rows."""
        if not any(buffer.rows for buffer in self.buffers.values()):
            return
        if self.broken:
            raise self.broken
        # Answers first: those that cannot be written become error rows.
        for kind, buffer in self.buffers.items():
            while buffer.rows:
                self.commit(kind, min(len(buffer.rows), self.job.write.rows_per_file))

    def close(self) -> None:
        """Flush and refuse further rows."""
        self.flush()
        self.check()
        self.broken = Failed("the output is closed")

    def select_new(self, kind: str, rows: list[Row]) -> list[Row]:
        """Return the rows that were not accounted for."""
        numbers = self.ledger.add(kind, [row["_row"] for row in rows])
        if len(numbers) == len(rows):
            return rows
        new_numbers = set(numbers)
        first = []
        for row in rows:
            if row["_row"] in new_numbers:
                new_numbers.discard(row["_row"])
                first.append(row)
        return first

    def commit(self, kind: str, count: int) -> None:
        """Commit the first `count` rows of a buffer as one file.

        They leave the buffer first: after an interruption the next run repeats them, and none is
        written twice.
        """
        with self.explain_errors(), defer_signals():
            rows = self.buffers[kind].take(count)
            if kind == "errors":
                rows.sort(key=lambda row: row["_row"])
                self.ledger.commit(
                    kind, [row["_row"] for row in rows], error_lines(self.job, rows), "jsonl"
                )
                return
            encoded = self.encoder.encode(rows)
            if encoded.numbers:
                self.ledger.commit(kind, encoded.numbers, encoded.data, self.encoder.ending)
            if encoded.misfits:
                self.move_to_errors(encoded.misfits)
            for name in self.encoder.skipped_columns - self.warned:
                self.warned.add(name)
                self.progress.warn(
                    f"column {name} is not kept: the first rows lack it; name it under `keep`"
                )

    def move_to_errors(self, misfits: list[tuple[Row, str]]) -> None:
        """Turn answers that cannot be written into error rows."""
        self.ledger.move_to_errors(len(misfits))
        self.progress.count(-len(misfits), len(misfits))
        rows = [
            {
                **row,
                "_error": reason,
                "_stage": "write",
                "_raw": row.get("_raw") or answer_excerpt(row),
            }
            for row, reason in misfits
        ]
        self.buffers["errors"].add(rows)

    def check(self) -> None:
        """Raise Failed when there are too many error rows."""
        limit = self.job.limits.errors
        if limit is None or self.ledger.errors <= limit:
            return
        self.flush()
        folder = mask_secrets(self.ledger.out.child("errors").address)
        raise Failed(
            f"{self.ledger.errors} rows have failed, and `limits.errors` is {limit}",
            f"reasons are in {folder}",
            "fix their cause, or raise `limits.errors`, or run again with `--retry-errors`",
        )

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Explain a filesystem's errors; after one, this sink writes nothing more.

        A file whose commit failed may exist all the same (an object store's answer may be lost): a
        retry here could write rows twice. The next run checks.
        """
        try:
            yield
        except Failed as failed:
            self.broken = failed
            raise
        except OSError as error:
            self.broken = explain_error(error, mask_secrets(self.ledger.out.address))
            raise self.broken from error
        except BaseException as error:
            self.broken = Failed(
                "the output could not be written", f"{type(error).__name__}: {brief_error(error)}"
            )
            raise


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
        f"check that it exists and is writable, {again}",
    )


def answer_excerpt(row: Row) -> str:
    """Return an unwritable answer as shown in an error row."""
    return (
        str({**unpack_keep(row), **output_columns(row)})[:EXCERPT_LENGTH]
        .encode("utf-8", "backslashreplace")
        .decode()[:EXCERPT_LENGTH]
    )
