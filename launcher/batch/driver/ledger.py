"""Ledger of finished rows: committed by earlier runs and this one; the rest is pending.

A file of answers or errors counts once it has its final name. Its ledger entry is written before;
so an entry without its file is left from a crash, and its rows are pending.

A ledger file, `ledger/part-NUMBER.json`, has one entry per line, in JSON; the last one is that of
file NUMBER. It replaces the ledger files of its other entries, which may be left from a crash.

After a takeover (`claim.py`), files of the earlier driver may appear late. Their rows are pending
for the new one, whose answers count.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..folder import FOLDERS, KINDS, PART, is_own, ledger_number, part_name
from ..identity import diff_identity
from ..job import PlacedJob
from .bitmap import RowSet, Words, compress_words, decompress_words, to_words
from .claim import Claim, check_claim, claim_run
from .job_file import Refused
from .manifest import Manifest
from .storage import Location, brief_error, mask_secrets, open_location, outage_hint

PARALLEL_REQUESTS = 32  # each ledger file is a request to an object store
# files or bytes of the ledger that are merged: an object store serves few requests a second
MERGED_FILES = 1_000
MERGED_BYTES = 8 << 20
RESTART_HINT = "start over with `--discard-results`, which deletes what this job wrote there"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Contents of one committed file."""

    number: int
    part: str
    kind: str
    rows: Words
    count: int
    bytes: int


class Ledger:
    """Row numbers with an answer or error row.

    `done` and `errors` count them over all runs; `unmerged` are the lines of ledger files with one
    entry, by file number, and `started` the numbers of files that are being written.
    """

    def __init__(self, output_dir: Location, rows: int, claim: Claim | None = None) -> None:
        self.out, self.claim = output_dir, claim
        self.first, self.floor = (claim.first, claim.floor) if claim else (1, 1)
        self.accounted = RowSet(rows)
        self.done = self.errors = 0
        self.next_number = 1
        self.unmerged: dict[int, bytes] = {}
        self.started = set[int]()
        self.lock = threading.Lock()  # for the three above

    def all_pending(self, manifest: Manifest) -> dict[int, bytes]:
        """Return the pending rows by split index, as a mode's `run` takes them: a bitmap from the
        byte of the split's first row on.
        """
        return {
            split.index: pending
            for split in manifest.splits
            if (pending := self.accounted.missing(split.first, split.last))
        }

    def add(self, kind: str, rows: Iterable[int]) -> list[int]:
        """Account for rows (`rows` or `errors`); return the new ones in their order."""
        new = list(rows)
        if not self.account(new):
            new = [number for number in new if self.account([number])]
        if kind == "rows":
            self.done += len(new)
        else:
            self.errors += len(new)
        return new

    def account(self, numbers: list[int]) -> bool:
        """Account for rows, if all of them are pending rows of the job and none is repeated."""
        if min(numbers, default=-1) < 0:
            return False
        words = to_words(sorted(numbers))
        return words.row_count == len(numbers) and self.accounted.add(words)

    def move_to_errors(self, count: int) -> None:
        """Count rows as errors that were counted as answers but could not be written."""
        self.done -= count
        self.errors += count

    def commit(self, kind: str, rows: list[int], data: bytes, ending: str) -> None:
        """Write a file of rows (in ascending order): first its entry, then its name.

        It counts completely or not at all. Several threads may write files at once. Raises Failed
        if another run owns the output.
        """
        self.check_owner()
        with self.lock:
            number, self.next_number = self.next_number, self.next_number + 1
            self.started.add(number)
        name = part_name(number)
        entry = {
            "part": f"{kind}/{name}.{ending}",
            "kind": kind,
            "count": len(rows),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "bitmap": base64.b64encode(compress_words(to_words(rows))).decode(),
        }
        line = json.dumps(entry).encode() + b"\n"
        folder = self.out.child("ledger")
        try:
            appear = self.out.child(kind).child(f"{name}.{ending}").stage_file(data, folder)
            folder.child(f"{name}.json").write_atomic(line)
            appear()
        except FileNotFoundError:  # a new owner removes hidden files
            self.check_owner()
            raise
        with self.lock:
            self.started.remove(number)
            self.unmerged[number] = line
            self.merge_files()

    def merge_files(self) -> None:
        """Merge the ledger files with one entry if they are many or large: those before the first
        file that is being written, since a merged file replaces all from its first entry on.
        """
        first = min(self.started, default=self.next_number)
        merged = sorted(number for number in self.unmerged if number < first)
        size = sum(len(self.unmerged[number]) for number in merged)
        if len(merged) < MERGED_FILES and size < MERGED_BYTES:
            return
        lines = b"".join(map(self.unmerged.pop, merged))
        *replaced, last = (f"{part_name(number)}.json" for number in merged)
        folder = self.out.child("ledger")
        folder.child(last).write_atomic(lines)
        delete_replaced(folder, replaced)

    def read_entries(self) -> Iterator[LedgerEntry]:
        """Yield the ledger entries, and set `next_number` and `unmerged`.

        Raises:
            Refused: a ledger file is damaged.
        """
        folder = self.out.child("ledger")
        numbers = ledger_files(self.out)
        self.next_number = max(self.first, 1 + max(numbers, default=0))
        replaced, read = [], set[int]()
        # From the last on: the entries of one tell which of the others it replaces.
        for number, name, data in read_files(folder, sorted(numbers.items(), reverse=True)):
            if number in read:
                replaced.append(name)
                continue
            lines = data.splitlines()
            if len(lines) == 1:
                self.unmerged[number] = lines[0] + b"\n"
            try:
                for entry in map(parse_entry, lines):
                    last = entry.number
                    if last not in read:
                        read.add(last)
                        yield entry
                if not lines or last != number:
                    raise ValueError(f"its last entry is not that of file {number}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Refused(
                    f"{mask_secrets(folder.address)}/{name} is damaged or of an earlier version",
                    f"{type(error).__name__}: {error}",
                    RESTART_HINT,
                ) from error
        delete_replaced(folder, replaced)

    def count_entry(self, entry: LedgerEntry) -> bool:
        """Count an entry of an earlier run; return False if it does not count: its results were
        discarded, or it came late and its rows were answered again.

        Raises:
            Refused: some of its rows are already counted, or not rows of this job.
        """
        if entry.number < self.floor:
            return False
        if not self.accounted.add(entry.rows):
            if entry.number < self.first:
                return False
            where = f"{mask_secrets(self.out.address)}: {entry.part}"
            raise Refused(
                f"{where} has rows that are already counted elsewhere",
                hint=f"move it away, or {RESTART_HINT}",
            )
        if entry.kind == "rows":
            self.done += entry.count
        else:
            self.errors += entry.count
        return True

    def check_owner(self) -> None:
        """Raise Failed if another run owns the output; one small read."""
        if self.claim:
            check_claim(self.claim, self.out)

    def finish(self, manifest: Manifest) -> None:
        """Verify the owner; after a takeover, delete files that came late."""
        self.check_owner()
        if self.first > 1:
            load_ledger(self.out, manifest, False, self.claim)


def ledger_files(output_dir: Location) -> dict[int, str]:
    """Return the names of the ledger's files by number."""
    return {
        number: name
        for name in output_dir.child("ledger").names()
        if (number := ledger_number(name)) is not None
    }


def delete_replaced(folder: Location, names: list[str]) -> None:
    """Delete ledger files whose entries are in another one, as far as possible: later runs ignore
    them.
    """

    def delete(name: str) -> None:
        with suppress(OSError):
            folder.filesystem.delete_file(folder.child(name).path)

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        list(pool.map(delete, names))


def recover(job: PlacedJob, manifest: Manifest, retry_errors: bool = False) -> Ledger:
    """Claim the output folder, clean up after a crash and read the committed entries.

    Args:
        retry_errors: delete the error files first: their rows are pending again.

    Raises:
        Refused: the folder holds other files, or belongs to another identity or input.
    """
    output_dir = open_location(job.write.path)
    try:
        if job.restart:
            erase_output(job)
        claim_output(job, manifest, output_dir)
        claim = claim_run(job, output_dir, max(ledger_files(output_dir), default=0))
        return load_ledger(output_dir, manifest, retry_errors, claim)
    except OSError as error:
        hint = (
            "check that it is a folder, that the head's container may write there, and that"
            " it has free space"
        )
        raise Refused(
            f"{mask_secrets(output_dir.address)} cannot be written",
            brief_error(error),
            outage_hint(error, hint),
        ) from error


def load_ledger(
    output_dir: Location, manifest: Manifest, retry_errors: bool, claim: Claim | None = None
) -> Ledger:
    ledger = Ledger(output_dir, manifest.rows, claim)
    if retry_errors:
        delete_errors(output_dir)
    remove_hidden_files(output_dir)
    sizes = {
        f"{kind}/{name}": size
        for kind in KINDS
        for name, size in output_dir.child(kind).sizes().items()
    }
    unlisted, incomplete = set(sizes), []
    for entry in ledger.read_entries():
        unlisted.discard(entry.part)
        size = sizes.get(entry.part)
        if size is not None and not (size == entry.bytes and ledger.count_entry(entry)):
            incomplete.append(entry.part)
    parts = [(PART.fullmatch(name.partition("/")[2]), name) for name in unlisted]
    late = [name for part, name in parts if part and int(part[1]) < ledger.floor]
    refuse_unlisted_files(output_dir, unlisted.difference(late))
    for part in incomplete + late:
        output_dir.child(part).delete()
    return ledger


def delete_errors(output_dir: Location) -> None:
    """Delete the error files: their rows are pending again."""
    folder = output_dir.child("errors")
    for name in folder.names():
        if PART.fullmatch(name):
            folder.child(name).delete()


def refuse_unlisted_files(output_dir: Location, unlisted: Iterable[str]) -> None:
    """Raise Refused if a file of answers or errors has no ledger entry."""
    strangers = sorted(name for name in unlisted if PART.fullmatch(name.partition("/")[2]))
    if strangers:
        raise Refused(
            f"{mask_secrets(output_dir.address)} has files that are not in the ledger",
            "\n".join(strangers[:10]),
            f"move them away, or {RESTART_HINT}",
        )


def claim_output(job: PlacedJob, manifest: Manifest, output_dir: Location) -> None:
    """Mark the output folder as this job's, or verify its mark.

    Raises:
        Refused: it belongs to another job, or to other settings or another input.
    """
    mark = output_dir.child("ledger").child("job.json")
    owner = {
        "job": job.name,
        "cluster": job.cluster,
        "meaning": dict(job.identity),
        "input": manifest.fingerprint(),
    }
    if mark.exists():
        check_mark(job, manifest.fingerprint(), output_dir)
    else:
        refuse_foreign_files(output_dir)
        for folder in (output_dir, output_dir.child("ledger")):
            folder.make_folder()
        mark.write_atomic(json.dumps(owner, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    for kind in KINDS:
        output_dir.child(kind).make_folder()


def check_mark(job: PlacedJob, origin: str, output_dir: Location) -> None:
    """Verify that a mark is this job's, with its identity and input fingerprint.

    Raises:
        Refused: it is not.
    """
    identity, input_fingerprint = read_mark(job, output_dir)
    shown = mask_secrets(output_dir.address)
    if different := diff_identity(identity, job.identity):
        hint = f"undo the change, or {RESTART_HINT}"
        raise Refused(
            f"{shown} was started by this job with other settings", "\n".join(different), hint
        )
    if input_fingerprint != origin:
        hint = f"put the input back as it was, or {RESTART_HINT}"
        raise Refused(f"{shown} was started by this job with another input", hint=hint)


def read_mark(job: PlacedJob, output_dir: Location) -> tuple[dict[str, Any], str]:
    """Return the identity and the input fingerprint of this job's mark.

    Raises:
        Refused: the mark is unreadable, or another job's.
    """
    shown = mask_secrets(output_dir.address)
    try:
        content = json.loads(output_dir.child("ledger").child("job.json").read())
        owner, mark = (content["job"], content["cluster"]), dict(content["meaning"])
        origin = str(content["input"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{shown}/ledger/job.json was not written by vlaunch",
            str(error),
            "name another folder to write to, or empty it",
        ) from error
    if owner != (job.name, job.cluster):
        raise Refused(
            f"{shown} belongs to the job `{owner[0]}` of `{owner[1]}`",
            hint="name another folder to write to",
        )
    return mark, origin


def refuse_foreign_files(output_dir: Location) -> None:
    """Raise Refused unless a folder without a mark is empty."""
    if names := foreign_files(output_dir):
        evidence = "\n".join(names[:10] + (["…"] if len(names) > 10 else []))
        raise Refused(
            f"{mask_secrets(output_dir.address)} is not empty and was not written by this job",
            evidence,
            "name another folder to write to, or empty it",
        )


def foreign_files(output_dir: Location) -> list[str]:
    """Return the files in a folder without a mark; empty folders, left by a crash, do not count."""
    inside = [
        f"{folder}/{name}"
        for folder in FOLDERS
        for name in output_dir.child(folder).names()
        if not name.startswith(".") and (folder, name) != ("ledger", "run.json")
    ]
    return [
        name
        for name in output_dir.names()
        if not name.startswith(".") and name not in (*FOLDERS, "lost+found")
    ] + inside


def read_files(folder: Location, files: list[tuple[int, str]]) -> Iterator[tuple[int, str, bytes]]:
    """Yield numbered files with their contents, a few of which are in memory."""
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        for start in range(0, len(files), PARALLEL_REQUESTS):
            numbers, names = zip(*files[start : start + PARALLEL_REQUESTS], strict=True)
            contents = pool.map(lambda name: folder.child(name).read(), names)
            yield from zip(numbers, names, contents, strict=True)


def parse_entry(line: bytes) -> LedgerEntry:
    payload = json.loads(line)
    kind, _, name = payload["part"].partition("/")
    part = PART.fullmatch(name)
    if payload["kind"] != kind or kind not in KINDS or not part:
        raise ValueError(f"it describes {payload['part']}")
    rows = decompress_words(base64.b64decode(payload["bitmap"], validate=True))
    if rows.row_count != payload["count"]:
        raise ValueError("its row count does not match its rows")
    return LedgerEntry(
        number=int(part[1]),
        part=payload["part"],
        kind=kind,
        rows=rows,
        count=rows.row_count,
        bytes=int(payload["bytes"]),
    )


def remove_hidden_files(output_dir: Location) -> None:
    """Remove hidden files of a writer that crashed before its rename."""
    folder = output_dir.child("ledger")
    for name in folder.names():
        if name.startswith(".part-"):
            folder.child(name).delete()


def erase_output(job: PlacedJob) -> None:
    """Delete only this job's files in its output folder, the mark last.

    Raises:
        Refused: the folder is not this job's.
    """
    output_dir = open_location(job.write.path)
    mark = output_dir.child("ledger").child("job.json")
    if not mark.exists():
        return
    read_mark(job, output_dir)
    claim_run(job, output_dir, max(ledger_files(output_dir), default=0), discard=True)
    for folder in FOLDERS:
        for name in output_dir.child(folder).names():
            if is_own(name) and name not in ("job.json", "run.json"):
                output_dir.child(folder).child(name).delete()
    output_dir.child("summary.json").delete()
    mark.delete()
