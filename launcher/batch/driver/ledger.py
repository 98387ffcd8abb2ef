"""Ledger of finished rows: committed by earlier runs and this one; the rest is pending.

A file of answers or errors counts once it has its final name. Its ledger entry is written before;
so an entry without its file is left from a crash, and its rows are pending.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .intervals import Intervals, Run, count_numbers, to_runs
from .job import Job, Refused, identity_changes
from .manifest import Manifest, Split
from .storage import Location, brief_error, mask_secrets, open_location

KINDS = ("rows", "errors")
PART = re.compile(r"part-(\d{6,})\.(json|jsonl|parquet)")
PARALLEL_READS = 32  # ledger entries read in parallel: each is a request to an object store
RESTART_HINT = "start over with `--discard-results`, which deletes what this job wrote there"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Contents of one committed file."""

    number: int
    part: str
    kind: str
    rows: tuple[Run, ...]
    count: int
    bytes: int


class Ledger:
    """Row numbers with an answer or error row.

    `done` and `errors` count them over all runs.
    """

    def __init__(self, output_dir: Location, rows: int) -> None:
        self.out, self.rows = output_dir, rows
        self.accounted = Intervals()
        self.done = self.errors = 0
        self.next_number = 1

    def pending(self, split: Split) -> list[Run]:
        """Return the intervals of a split's pending rows."""
        return self.accounted.missing(split.first, split.last)

    def all_pending(self, manifest: Manifest) -> dict[int, list[Run]]:
        """Return the pending rows by split index, as a mode's `run` takes them."""
        return {
            split.index: pending for split in manifest.splits if (pending := self.pending(split))
        }

    def add(self, kind: str, rows: Iterable[int]) -> list[int]:
        """Account for rows (`rows` or `errors`); return the new ones in their order."""
        numbers = list(rows)
        runs = to_runs(sorted(numbers))
        if self.are_pending(runs) and count_numbers(runs) == len(numbers) and are_disjoint(runs):
            for first, last in runs:
                self.accounted.add(first, last)
            new = numbers
        else:
            new = [number for number in numbers if self.add_row(number)]
        if kind == "rows":
            self.done += len(new)
        else:
            self.errors += len(new)
        return new

    def are_pending(self, runs: Iterable[Run]) -> bool:
        """Return True if all of these are pending rows of the job."""
        return all(
            first >= 0 and last < self.rows and not self.accounted.overlaps(first, last)
            for first, last in runs
        )

    def add_row(self, number: int) -> bool:
        if number in self.accounted or not 0 <= number < self.rows:
            return False
        self.accounted.add(number, number)
        return True

    def move_to_errors(self, count: int) -> None:
        """Count rows as errors that were counted as answers but could not be written."""
        self.done -= count
        self.errors += count

    def commit(self, kind: str, rows: Iterable[int], data: bytes, ending: str) -> None:
        """Write a file of rows (in ascending order): first its entry, then its name.

        It counts completely or not at all.
        """
        number, self.next_number = self.next_number, self.next_number + 1
        name = f"part-{number:06d}"
        runs = to_runs(rows)
        entry = {
            "part": f"{kind}/{name}.{ending}",
            "kind": kind,
            "rows": runs,
            "count": count_numbers(runs),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        folder = self.out.child("ledger")
        appear = self.out.child(kind).child(f"{name}.{ending}").stage_file(data, folder)
        folder.child(f"{name}.json").write_atomic(json.dumps(entry).encode())
        appear()

    def count_entry(self, entry: LedgerEntry) -> None:
        """Count an entry of an earlier run.

        Raises:
            Refused: some of its rows are already counted, or not rows of this job.
        """
        for first, last in entry.rows:
            if self.accounted.overlaps(first, last) or not 0 <= first <= last < self.rows:
                where = f"{mask_secrets(self.out.address)}: {entry.part}"
                raise Refused(
                    f"{where} has rows that are already counted elsewhere",
                    f"rows {first} to {last}",
                    RESTART_HINT,
                )
            self.accounted.add(first, last)
        if entry.kind == "rows":
            self.done += entry.count
        else:
            self.errors += entry.count


def are_disjoint(runs: list[Run]) -> bool:
    """Return True if intervals of sorted numbers have no number twice."""
    return all(run[1] < following[0] for run, following in pairwise(runs))


def recover(job: Job, manifest: Manifest, retry_errors: bool = False) -> Ledger:
    """Claim the output folder, clean up after a crash and read the committed entries.

    Args:
        retry_errors: delete the error files first: their rows are pending again.

    Raises:
        Refused: the folder holds other files, or belongs to another identity or input.
    """
    output_dir = open_location(job.out)
    try:
        if job.restart:
            erase_output(job)
        claim_output(job, manifest, output_dir)
        return load_ledger(output_dir, manifest, retry_errors)
    except OSError as error:
        hint = (
            "check that it is a folder, that the head's container may write there, and that"
            " it has free space"
        )
        raise Refused(
            f"{mask_secrets(output_dir.address)} cannot be written", brief_error(error), hint
        ) from error


def load_ledger(output_dir: Location, manifest: Manifest, retry_errors: bool) -> Ledger:
    ledger = Ledger(output_dir, manifest.rows)
    if retry_errors:
        delete_errors(output_dir)
    remove_hidden_files(output_dir)
    entries = read_entries(output_dir)
    sizes = {
        f"{kind}/{name}": size
        for kind in KINDS
        for name, size in output_dir.child(kind).sizes().items()
    }
    refuse_unlisted_files(output_dir, sizes, {entry.part for entry in entries})
    ledger.next_number = 1 + max((entry.number for entry in entries), default=0)
    for entry in entries:
        if sizes.get(entry.part) == entry.bytes:
            ledger.count_entry(entry)
            continue
        # Incomplete or missing: its rows are pending again. The last number stays, so that no
        # number is reused.
        if entry.part in sizes:
            kind, _, name = entry.part.partition("/")
            output_dir.child(kind).child(name).delete()
        if entry.number != ledger.next_number - 1:
            output_dir.child("ledger").child(f"part-{entry.number:06d}.json").delete()
    return ledger


def delete_errors(output_dir: Location) -> None:
    """Delete the error files: their rows are pending again."""
    folder = output_dir.child("errors")
    for name in folder.names():
        if PART.fullmatch(name):
            folder.child(name).delete()


def refuse_unlisted_files(output_dir: Location, present: Iterable[str], listed: set[str]) -> None:
    """Raise Refused if a file of answers or errors has no ledger entry."""
    unknown = sorted(
        name for name in present if name not in listed and PART.fullmatch(name.partition("/")[2])
    )
    if unknown:
        raise Refused(
            f"{mask_secrets(output_dir.address)} has files that are not in the ledger",
            "\n".join(unknown[:10]),
            f"move them away, or {RESTART_HINT}",
        )


def claim_output(job: Job, manifest: Manifest, output_dir: Location) -> None:
    """Mark the output folder as this job's, or verify its mark.

    Raises:
        Refused: it belongs to another job, or to other settings or another input.
    """
    shown = mask_secrets(output_dir.address)
    mark = output_dir.child("ledger").child("job.json")
    origin = manifest.fingerprint()
    owner = {
        "job": job.name,
        "cluster": job.cluster,
        "meaning": dict(job.identity),
        "input": origin,
    }
    if mark.exists():
        check_mark(job, origin, mark, shown)
    else:
        refuse_foreign_files(output_dir, shown)
        for folder in (output_dir, output_dir.child("ledger")):
            folder.make_folder()
        mark.write_atomic(json.dumps(owner, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    for kind in KINDS:
        output_dir.child(kind).make_folder()


def check_mark(job: Job, origin: str, mark: Location, shown: str) -> None:
    """Verify that a mark is this job's, with its identity and input fingerprint.

    Raises:
        Refused: it is not.
    """
    try:
        content = json.loads(mark.read())
        owner, identity = (content["job"], content["cluster"]), dict(content["meaning"])
        input_fingerprint = content["input"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{shown}/ledger/job.json was not written by vlaunch",
            str(error),
            "name another folder to write to",
        ) from error
    if owner != (job.name, job.cluster):
        raise Refused(
            f"{shown} belongs to the job `{owner[0]}` of `{owner[1]}`",
            hint="name another folder to write to",
        )
    if different := identity_changes(identity, job.identity):
        hint = f"undo the change, or {RESTART_HINT}"
        raise Refused(
            f"{shown} was started by this job with other settings", "\n".join(different), hint
        )
    if input_fingerprint != origin:
        hint = f"put the input back as it was, or {RESTART_HINT}"
        raise Refused(f"{shown} was started by this job with another input", hint=hint)


def refuse_foreign_files(output_dir: Location, shown: str) -> None:
    """Raise Refused unless a folder without a mark is empty."""
    if names := foreign_files(output_dir):
        evidence = "\n".join(names[:10] + (["…"] if len(names) > 10 else []))
        raise Refused(
            f"{shown} is not empty and was not written by this job",
            evidence,
            "name another folder to write to, or empty it",
        )


def foreign_files(output_dir: Location) -> list[str]:
    """Return the files in a folder without a mark; empty folders, left by a crash, do not count."""
    own_folders = (*KINDS, "ledger")
    inside = [
        f"{folder}/{name}"
        for folder in own_folders
        for name in output_dir.child(folder).names()
        if not name.startswith(".")
    ]
    return [
        name
        for name in output_dir.names()
        if not name.startswith(".") and name not in (*own_folders, "lost+found")
    ] + inside


def read_entries(output_dir: Location) -> list[LedgerEntry]:
    """Return the ledger entries in order of their numbers.

    Raises:
        Refused: an entry is damaged.
    """
    folder = output_dir.child("ledger")
    names = [
        name for name in folder.names() if (match := PART.fullmatch(name)) and match[2] == "json"
    ]

    def read_entry(name: str) -> LedgerEntry:
        try:
            return parse_entry(name, json.loads(folder.child(name).read()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"{mask_secrets(folder.address)}/{name} is damaged", str(error), RESTART_HINT
            ) from error

    if output_dir.local:
        return sorted(map(read_entry, names), key=lambda entry: entry.number)
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        return sorted(pool.map(read_entry, names), key=lambda entry: entry.number)


def parse_entry(name: str, payload: dict[str, Any]) -> LedgerEntry:
    part = PART.fullmatch(payload["part"].partition("/")[2])
    if (
        payload["kind"] not in KINDS
        or not payload["part"].startswith(payload["kind"] + "/")
        or not part
        or part[1] != name[5:-5]
    ):
        raise ValueError(f"it describes {payload['part']}")
    rows = tuple((int(first), int(last)) for first, last in payload["rows"])
    if count_numbers(rows) != payload["count"]:
        raise ValueError("its row count does not match its rows")
    return LedgerEntry(
        number=int(part[1]),
        part=payload["part"],
        kind=payload["kind"],
        rows=rows,
        count=int(payload["count"]),
        bytes=int(payload["bytes"]),
    )


def remove_hidden_files(output_dir: Location) -> None:
    """Remove hidden files of a writer that crashed before its rename."""
    folder = output_dir.child("ledger")
    for name in folder.names():
        if name.startswith(".part-"):
            folder.child(name).delete()


def erase_output(job: Job) -> None:
    """Delete only this job's files in its output folder, the mark last.

    Raises:
        Refused: the folder is not this job's.
    """
    output_dir = open_location(job.out)
    mark = output_dir.child("ledger").child("job.json")
    if not mark.exists():
        return
    try:
        content = dict(json.loads(mark.read()))
    except (ValueError, TypeError) as error:
        where = f"{mask_secrets(output_dir.address)}/ledger/job.json"
        raise Refused(
            f"{where} was not written by vlaunch",
            str(error),
            "name another folder to write to, or empty it",
        ) from error
    if (content.get("job"), content.get("cluster")) != (job.name, job.cluster):
        raise Refused(
            f"{mask_secrets(output_dir.address)} belongs to the job `{content.get('job')}`",
            hint="name another folder to write to",
        )
    for kind in (*KINDS, "ledger"):
        for name in output_dir.child(kind).names():
            if (
                PART.fullmatch(name)
                or name.startswith((".part-", ".schema.", ".job."))
                or name == "schema.json"
            ):
                output_dir.child(kind).child(name).delete()
    output_dir.child("summary.json").delete()
    mark.delete()
