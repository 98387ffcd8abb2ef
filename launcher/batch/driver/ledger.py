"""Which rows are accounted for: what earlier runs committed, what this one did, and what is left.

A file of answers or errors counts from the moment at which it has its name. What it holds is said
in its ledger entry, which is written before; so an entry without its file is that of a crash, and
its rows are still to be done.
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

from .intervals import Intervals, Run, runs, total
from .job import Job, Refused, changes
from .manifest import Manifest, Split
from .places import Place, brief, masked, opened

KINDS = ("rows", "errors")
PART = re.compile(r"part-(\d{6,})\.(json|jsonl|parquet)")
AT_ONCE = 32  # ledger entries that are read at once: each is a request to an object store
RESTART = "start over with `--discard-results`, which deletes what this job wrote there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is committed in one file."""

    number: int
    part: str
    kind: str
    rows: tuple[Run, ...]
    count: int
    bytes: int


class Ledger:
    """Row numbers that are answered or failed, each once.

    `done` and `errors` count them, over all runs.
    """

    def __init__(self, out: Place, rows: int) -> None:
        self.out, self.rows = out, rows
        self.taken = Intervals()
        self.done = self.errors = 0
        self.next = 1

    def pending(self, split: Split) -> list[Run]:
        """First and last numbers of the rows of a split that are not accounted for."""
        return self.taken.missing(split.first, split.last)

    def all_pending(self, manifest: Manifest) -> dict[int, list[Run]]:
        """What `run(job, manifest, pending, progress)` takes: splits with rows left, by their
        index.
        """
        return {split.index: left for split in manifest.splits if (left := self.pending(split))}

    def add(self, kind: str, rows: Iterable[int]) -> list[int]:
        """Account for rows (`rows` or `errors`); return the new ones in the order given."""
        given = list(rows)
        found = runs(sorted(given))
        if self.free(found) and total(found) == len(given) and distinct(found):
            for first, last in found:
                self.taken.add(first, last)
            new = given
        else:
            new = [number for number in given if self.take(number)]
        if kind == "rows":
            self.done += len(new)
        else:
            self.errors += len(new)
        return new

    def free(self, found: Iterable[Run]) -> bool:
        """Whether all of these are rows of the job that are not accounted for."""
        return all(
            first >= 0 and last < self.rows and not self.taken.meets(first, last)
            for first, last in found
        )

    def take(self, number: int) -> bool:
        if number in self.taken or not 0 <= number < self.rows:
            return False
        self.taken.add(number, number)
        return True

    def turned(self, count: int) -> None:
        """So many rows that were answers are errors after all: they could not be written as
        answers.
        """
        self.done -= count
        self.errors += count

    def commit(self, kind: str, rows: Iterable[int], data: bytes, ending: str) -> None:
        """Write a file of rows (in ascending order): its entry first, then its name.

        It counts wholly or not at all.
        """
        number, self.next = self.next, self.next + 1
        name = f"part-{number:06d}"
        found = runs(rows)
        entry = {
            "part": f"{kind}/{name}.{ending}",
            "kind": kind,
            "rows": found,
            "count": total(found),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        folder = self.out.child("ledger")
        appear = self.out.child(kind).child(f"{name}.{ending}").staged(data, folder)
        folder.child(f"{name}.json").write_atomic(json.dumps(entry).encode())
        appear()

    def recall(self, entry: Entry) -> None:
        """Count what an earlier run committed.

        Raises:
            Refused: some of it is counted already, or is no row of this job.
        """
        for first, last in entry.rows:
            if self.taken.meets(first, last) or not 0 <= first <= last < self.rows:
                where = f"{masked(self.out.where)}: {entry.part}"
                raise Refused(
                    f"{where} has rows that are counted elsewhere",
                    f"rows {first} to {last}",
                    RESTART,
                )
            self.taken.add(first, last)
        if entry.kind == "rows":
            self.done += entry.count
        else:
            self.errors += entry.count


def distinct(found: list[Run]) -> bool:
    """Whether intervals of sorted numbers came of numbers that differ."""
    return all(one[1] < other[0] for one, other in pairwise(found))


def recover(job: Job, manifest: Manifest, retry_errors: bool = False) -> Ledger:
    """Claim the output folder, put right what a crash left, and read what is committed.

    Args:
        retry_errors: delete the error files first: their rows are pending again.

    Raises:
        Refused: the folder holds something else, or was begun by a job of another identity or
            input.
    """
    out = opened(job.out)
    try:
        if job.restart:
            erase(job)
        claim(job, manifest, out)
        return recovered(out, manifest, retry_errors)
    except OSError as error:
        hint = (
            "see that it is a folder, that the head's container may write there, and that there is"
            " space"
        )
        raise Refused(f"{masked(out.where)} cannot be written", brief(error), hint) from error


def recovered(out: Place, manifest: Manifest, retry_errors: bool) -> Ledger:
    ledger = Ledger(out, manifest.rows)
    if retry_errors:
        delete_errors(out)
    tidy(out)
    entries = read_entries(out)
    sizes = {
        f"{kind}/{name}": size for kind in KINDS for name, size in out.child(kind).sizes().items()
    }
    refuse_unknown(out, sizes, {each.part for each in entries})
    ledger.next = 1 + max((entry.number for entry in entries), default=0)
    for entry in entries:
        if sizes.get(entry.part) == entry.bytes:
            ledger.recall(entry)
            continue
        # Not whole, or not there: its rows are to be done again. The last number stays, so that no
        # number comes twice.
        if entry.part in sizes:
            kind, _, name = entry.part.partition("/")
            out.child(kind).child(name).delete()
        if entry.number != ledger.next - 1:
            out.child("ledger").child(f"part-{entry.number:06d}.json").delete()
    return ledger


def delete_errors(out: Place) -> None:
    """Delete the error files: their rows are to be done again."""
    folder = out.child("errors")
    for name in folder.names():
        if PART.fullmatch(name):
            folder.child(name).delete()


def refuse_unknown(out: Place, present: Iterable[str], known: set[str]) -> None:
    """See that all files of answers and errors that are there have entries.

    Raises:
        Refused: some have none.
    """
    unknown = sorted(
        name for name in present if name not in known and PART.fullmatch(name.partition("/")[2])
    )
    if unknown:
        raise Refused(
            f"{masked(out.where)} has files that the ledger does not know",
            "\n".join(unknown[:10]),
            f"move them away, or {RESTART}",
        )


def claim(job: Job, manifest: Manifest, out: Place) -> None:
    """Make the output folder this job's, or see that it is.

    Raises:
        Refused: it is not, or it was begun with other settings or another input.
    """
    shown = masked(out.where)
    mark = out.child("ledger").child("job.json")
    origin = manifest.fingerprint()
    mine = {
        "job": job.name,
        "cluster": job.cluster,
        "meaning": dict(job.identity),
        "input": origin,
    }
    if mark.exists():
        refuse_other(job, origin, mark, shown)
    else:
        refuse_strangers(out, shown)
        for folder in (out, out.child("ledger")):
            folder.make_folder()
        mark.write_atomic(json.dumps(mine, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    for kind in KINDS:
        out.child(kind).make_folder()


def refuse_other(job: Job, origin: str, mark: Place, shown: str) -> None:
    """See that a mark is this job's, as it is now, over the input of this fingerprint.

    Raises:
        Refused: it is not.
    """
    try:
        found = json.loads(mark.read())
        owner, identity, begun = (
            (found["job"], found["cluster"]),
            dict(found["meaning"]),
            found["input"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{shown}/ledger/job.json is not this program's",
            str(error),
            "name another folder to write to",
        ) from error
    if owner != (job.name, job.cluster):
        raise Refused(
            f"{shown} belongs to the job `{owner[0]}` of `{owner[1]}`",
            hint="name another folder to write to",
        )
    if different := changes(identity, job.identity):
        hint = f"undo the change, or {RESTART}"
        raise Refused(
            f"{shown} was begun by this job with other settings", "\n".join(different), hint
        )
    if begun != origin:
        hint = f"put the input back as it was, or {RESTART}"
        raise Refused(f"{shown} was begun by this job with another input", hint=hint)


def refuse_strangers(out: Place, shown: str) -> None:
    """See that a folder without a mark is empty.

    Raises:
        Refused: it is not.
    """
    if names := strangers(out):
        said = "\n".join(names[:10] + (["…"] if len(names) > 10 else []))
        raise Refused(
            f"{shown} is not empty, and not this job's",
            said,
            "name another folder to write to, or empty it",
        )


def strangers(out: Place) -> list[str]:
    """What lies in a folder without a mark; the empty folders that a crash leaves before the mark
    is written are nothing.
    """
    own = (*KINDS, "ledger")
    inside = [
        f"{folder}/{name}"
        for folder in own
        for name in out.child(folder).names()
        if not name.startswith(".")
    ]
    return [
        name
        for name in out.names()
        if not name.startswith(".") and name not in (*own, "lost+found")
    ] + inside


def read_entries(out: Place) -> list[Entry]:
    """The ledger in the order of its numbers.

    Raises:
        Refused: an entry is damaged.
    """
    folder = out.child("ledger")
    names = [
        name for name in folder.names() if (found := PART.fullmatch(name)) and found[2] == "json"
    ]

    def one(name: str) -> Entry:
        try:
            return entry(name, json.loads(folder.child(name).read()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"{masked(folder.where)}/{name} is damaged", str(error), RESTART
            ) from error

    if out.local:
        return sorted(map(one, names), key=lambda each: each.number)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sorted(pool.map(one, names), key=lambda each: each.number)


def entry(name: str, said: dict[str, Any]) -> Entry:
    part = PART.fullmatch(said["part"].partition("/")[2])
    if (
        said["kind"] not in KINDS
        or not said["part"].startswith(said["kind"] + "/")
        or not part
        or part[1] != name[5:-5]
    ):
        raise ValueError(f"it speaks of {said['part']}")
    rows = tuple((int(first), int(last)) for first, last in said["rows"])
    if total(rows) != said["count"]:
        raise ValueError("its count is not that of its rows")
    return Entry(
        number=int(part[1]),
        part=said["part"],
        kind=said["kind"],
        rows=rows,
        count=int(said["count"]),
        bytes=int(said["bytes"]),
    )


def tidy(out: Place) -> None:
    """Remove the hidden files of a writer that did not come to their renaming."""
    folder = out.child("ledger")
    for name in folder.names():
        if name.startswith(".part-"):
            folder.child(name).delete()


def erase(job: Job) -> None:
    """Delete what this job wrote to its output folder, its mark last; nothing else.

    Raises:
        Refused: the folder is not this job's.
    """
    out = opened(job.out)
    mark = out.child("ledger").child("job.json")
    if not mark.exists():
        return
    try:
        found = dict(json.loads(mark.read()))
    except (ValueError, TypeError) as error:
        where = f"{masked(out.where)}/ledger/job.json"
        raise Refused(
            f"{where} is not this program's",
            str(error),
            "name another folder to write to, or empty it",
        ) from error
    if (found.get("job"), found.get("cluster")) != (job.name, job.cluster):
        raise Refused(
            f"{masked(out.where)} belongs to the job `{found.get('job')}`",
            hint="name another folder to write to",
        )
    for kind in (*KINDS, "ledger"):
        for name in out.child(kind).names():
            if (
                PART.fullmatch(name)
                or name.startswith((".part-", ".schema.", ".job."))
                or name == "schema.json"
            ):
                out.child(kind).child(name).delete()
    out.child("summary.json").delete()
    mark.delete()
