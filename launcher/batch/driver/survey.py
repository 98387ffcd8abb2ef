"""Before the first row: which files there are, how many rows they hold, where to cut them, and the
types of kept columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from . import columns, lines, parquet, rows, table
from .job import Job, Refused, changes
from .manifest import File, Manifest, Split, dumped, loaded
from .places import Place, StoredFile, brief, files, masked, opened

__all__ = ["File", "Manifest", "Split", "survey"]

SPLIT_ROWS = 2000
SPLIT_BYTES = 8 << 20
# newlines are counted by so many bytes: a split may hold a piece more than SPLIT_ROWS
PIECE = 16 << 10
SAMPLE = 1000
LOOKED = 20_000  # rows in which the sample is looked for

Cut = tuple[int, int, int]  # start, end, rows


def survey(job: Job, say: Callable[[str], None]) -> Manifest:
    """Look at every file, or read what an earlier run found; `say` is told what is being looked at.

    Raises:
        Refused: no such file, not of this format, or the input or the job changed since the earlier
            run.
    """
    say("looking for the input")
    listed = marked(job)
    place = opened(os.path.join(job.work, "manifest.json"))
    if place.exists():
        return confirmed(job, place, listed)
    manifest = looked_at(job, listed, say)
    place.write_atomic(dumped(manifest, job.identity))
    return manifest


def marked(job: Job) -> list[StoredFile]:
    """The input files, source by source, each once.

    Those that were shipped are known by their digest: when they came here says nothing.
    """
    found = {each.path: each for source in job.read.sources for each in files(source)}
    shipped = os.path.join(job.work, "input") + "/"
    return [
        replace(each, mark="" if path.startswith(shipped) else each.mark)
        for path, each in found.items()
    ]


def confirmed(job: Job, place: Place, listed: list[StoredFile]) -> Manifest:
    """The manifest of an earlier run, if it still holds.

    Raises:
        Refused: it does not.
    """
    try:
        manifest, identity = loaded(place.read())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{place.where} cannot be read", brief(error), "start over with `--discard-results`"
        ) from error
    if manifest.digest != job.digest:
        different = "\n".join(changes(identity, job.identity))
        raise Refused(
            "the job is not the one that was begun",
            different,
            "undo the change, or start over with `--discard-results`",
        )
    if said := differences(manifest.files, listed):
        hint = "put the files back as they were, or start over with `--discard-results`"
        raise Refused("the input is not what it was when the job began", "\n".join(said[:20]), hint)
    return manifest


def differences(before: Iterable[File], listed: Iterable[StoredFile]) -> list[str]:
    """What became of the files of an earlier run: a line for each that is not as it was, sorted."""
    then, now = {each.path: each for each in before}, {each.path: each for each in listed}
    said = [f"{masked(path)} is gone" for path in then if path not in now]
    said += [f"{masked(path)} is new" for path in now if path not in then]
    for path in then.keys() & now.keys():
        if how := changed(then[path], now[path]):
            said.append(f"{masked(path)} changed: {how}")
    return sorted(said)


def changed(then: File, now: StoredFile) -> str:
    """How a file changed; nothing if it did not."""
    if then.bytes != now.bytes:
        return f"{then.bytes} bytes then, {now.bytes} now"
    return "written again since" if then.mark != now.mark else ""


def looked_at(job: Job, listed: list[StoredFile], say: Callable[[str], None]) -> Manifest:
    """Count rows and cut files, up to the limit of rows."""
    looked: list[File] = []
    splits: list[Split] = []
    total = 0
    for index, found in enumerate(listed):
        say(
            f"counting rows: {masked(found.path)}, file {index + 1} of {len(listed)}, {total:,}"
            " rows so far"
        )
        left = None if job.read.limit is None else job.read.limit - total
        file = File(path=found.path, rows=0, bytes=found.bytes, mark=found.mark)
        counted = 0
        if left is None or left > 0:
            file, cuts = cut(job, file)
            for start, end, amount in cuts:
                taken = amount if left is None else min(amount, left - counted)
                splits.append(
                    Split(
                        index=len(splits),
                        file=index,
                        start=start,
                        end=end,
                        first=total + counted,
                        rows=taken,
                    )
                )
                counted += taken
                if counted == left:
                    break
        looked.append(replace(file, rows=counted))
        total += counted
    manifest = Manifest(files=tuple(looked), splits=tuple(splits), rows=total, digest=job.digest)
    names, types = sampled(job, manifest)
    return replace(manifest, columns=names, types=types)


def cut(job: Job, file: File) -> tuple[File, Iterator[Cut]]:
    """A file with its header, and its parts.

    Raises:
        Refused: it cannot be read, or is not of the job's format.
    """
    try:
        place = opened(file.path)
        if job.read.format == "parquet":
            found, _ = parquet.groups(place)
            return file, iter(
                [(group, group + 1, count) for group, count in enumerate(found) if count]
            )
        begin = next(lines.blocks(place), b"")
        if begin in (b"", lines.BOM):
            return file, iter(())
        if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = f"convert it: `iconv -f UTF-16 -t UTF-8 {place.path}`"
            raise Refused(f"{masked(file.path)} is UTF-16, not UTF-8", hint=hint)
        if begin[:4] == b"PAR1":
            raise Refused(
                f"{masked(file.path)} is a Parquet file",
                hint=f"say `format: parquet`, not `{job.read.format}`",
            )
        if job.read.format == "csv":
            return csv_cut(job, place, file, begin)
        return file, failing(file, line_cuts(place))
    except (OSError, ValueError) as error:
        raise unreadable(job, file, error) from error


def unreadable(job: Job, file: File, error: Exception) -> Refused:
    hint = "see that the file is whole and may be read, and that `format` is what it is"
    return Refused(f"{masked(file.path)} cannot be read as {job.read.format}", brief(error), hint)


def failing(file: File, cuts: Iterator[Cut]) -> Iterator[Cut]:
    try:
        yield from cuts
    except (OSError, ValueError) as error:
        hint = "see that the file is whole and may be read"
        raise Refused(f"{masked(file.path)} cannot be read", brief(error), hint) from error


def line_cuts(place: Place) -> Iterator[Cut]:
    """Cut a file at newlines.

    A compressed one stays whole: no part of it can be read without all before.
    """
    if lines.compression(place.where):
        yield from one_cut(place)
        return
    start = at = cut_at = 0  # where the split begins, where we are, the last newline seen
    counted = newlines = 0  # rows up to `cut_at`, newlines of this split
    last = b"\n"
    for block in lines.blocks(place):
        last = block[-1:]
        for piece in range(0, len(block), PIECE):
            upto = min(piece + PIECE, len(block))
            found = block.count(b"\n", piece, upto)
            if not found:
                continue
            # A long line gets a split of its own end: what came before it must not wait for it.
            if counted and at + piece - start > SPLIT_BYTES:
                yield start, cut_at, counted
                start, newlines = cut_at, 0
            newlines += found
            cut_at, counted = at + block.rfind(b"\n", piece, upto) + 1, newlines
            if counted >= SPLIT_ROWS or cut_at - start >= SPLIT_BYTES:
                yield start, cut_at, counted
                start, newlines, counted = cut_at, 0, 0
        at += len(block)
    if at > start:
        yield start, at, newlines + (last != b"\n")


def one_cut(place: Place) -> Iterator[Cut]:
    """A whole file as one cut; none if it has no line."""
    newlines, last = 0, b"\n"
    for block in lines.blocks(place):
        newlines, last = newlines + block.count(b"\n"), block[-1:]
    if count := newlines + (last != b"\n"):
        yield 0, 0, count


def csv_cut(job: Job, place: Place, file: File, begin: bytes) -> tuple[File, Iterator[Cut]]:
    """The header and the cuts of a CSV file, between records.

    Raises:
        Refused: its first line is no header.
    """
    mark = len(lines.BOM) if begin.startswith(lines.BOM) else 0
    delimiter = table.guessed(file.path, begin[mark:].partition(b"\n")[0])
    limit = job.read.row_bytes
    records = table.records(
        lines.lines(lines.unmarked(lines.blocks(place)), limit), delimiter, limit
    )
    first = next(records, None)
    if first is None:
        return file, iter(())
    try:
        names = table.header(first, delimiter)
    except ValueError as error:
        hint = "the first line of a CSV file names its columns"
        raise Refused(
            f"{masked(file.path)} has no header", f"{error}\n{first.raw[:200]}", hint
        ) from error
    whole = bool(lines.compression(place.where))
    return replace(file, columns=names, delimiter=delimiter), failing(
        file, record_cuts(records, mark + first.size, file, whole)
    )


def record_cuts(records: Iterator[table.Record], at: int, file: File, whole: bool) -> Iterator[Cut]:
    start, count = at, 0
    for record in records:
        at, count = at + record.size, count + 1
        if not whole and (count >= SPLIT_ROWS or at - start >= SPLIT_BYTES):
            yield start, min(at, file.bytes), count
            start, count = at, 0
    if count:
        yield 0 if whole else start, min(at, file.bytes), count


def sampled(job: Job, manifest: Manifest) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Names of the columns, and the types of the kept ones, by the first good rows.

    JSON lines need none but the declared.
    """
    found: dict[str, set[str]] = {}
    for row in sample(job, manifest):
        for name, value in row.items():
            found.setdefault(name, set()).add(columns.kind(value))
    declared = {name: type_ for name, type_ in (job.keep or {}).items() if type_}
    if job.write.format != "parquet":
        return tuple(found), declared
    kept = found if job.kept_columns is None else job.kept_columns
    types = {name: columns.inferred(found.get(name, ())) for name in kept}
    return tuple(found), {**types, **declared}


def sample(job: Job, manifest: Manifest) -> Iterator[Mapping[str, Any]]:
    """The columns of the first good rows, at most `SAMPLE`."""
    import pickle

    bare = replace(job, keep={})
    read = chain.from_iterable(
        rows.read_split(bare, manifest, split, [(split.first, split.last)])
        for split in manifest.splits
    )
    good = (row for row in islice(read, LOOKED) if not row["_error"])
    for row in islice(good, SAMPLE):
        yield pickle.loads(row["_data"])  # noqa: S301 - pickled just now, by this process
