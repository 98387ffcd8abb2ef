"""Survey of the input before the first row: files, row counts, splits and column types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ..identity import diff_identity
from ..job import PlacedJob
from . import columns, lines, parquet, rows, table
from .bitmap import RowSet
from .job_file import Refused
from .manifest import File, Manifest, Split, dump_manifest, load_manifest
from .storage import Location, StoredFile, brief_error, list_files, mask_secrets, open_location

__all__ = ["File", "Manifest", "Split", "survey_input"]

SPLIT_ROWS = 2000
SPLIT_BYTES = 8 << 20
# bytes per count of newlines: a split may exceed SPLIT_ROWS by one such piece
PIECE = 16 << 10
SAMPLE = 1000
SAMPLE_SEARCH = 20_000  # rows searched for the sample

Cut = tuple[int, int, int]  # start, end, rows


def survey_input(job: PlacedJob, say: Callable[[str], None]) -> Manifest:
    """Survey every file, or load the earlier run's manifest; `say` receives the progress.

    Raises:
        Refused: no such file, not of this format, or the input or the job changed since the earlier
            run.
    """
    say("listing the input")
    listed = list_inputs(job)
    location = open_location(os.path.join(job.work, "manifest.json"))
    if location.exists():
        return load_confirmed(job, location, listed)
    manifest = count_input(job, listed, say)
    location.write_atomic(dump_manifest(manifest, job.identity))
    return manifest


def list_inputs(job: PlacedJob) -> list[StoredFile]:
    """Return the input files in source order, each once.

    Shipped files are identified by digest, so their modification time is ignored.
    """
    by_path = {file.path: file for source in job.read.paths for file in list_files(source)}
    shipped = os.path.join(job.work, "input") + "/"
    return [
        replace(file, mark="" if path.startswith(shipped) else file.mark)
        for path, file in by_path.items()
    ]


def load_confirmed(job: PlacedJob, location: Location, listed: list[StoredFile]) -> Manifest:
    """Return an earlier run's manifest.

    Raises:
        Refused: the input or the job has changed.
    """
    try:
        manifest, identity = load_manifest(location.read())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{location.address} cannot be read",
            brief_error(error),
            "start over with `--discard-results`",
        ) from error
    if manifest.digest != job.digest:
        different = "\n".join(diff_identity(identity, job.identity))
        raise Refused(
            "the job differs from the one that was started",
            different,
            "undo the change, or start over with `--discard-results`",
        )
    if changed_files := file_differences(manifest.files, listed):
        hint = "put the files back as they were, or start over with `--discard-results`"
        raise Refused(
            "the input has changed since the job started", "\n".join(changed_files[:20]), hint
        )
    return manifest


def file_differences(before: Iterable[File], listed: Iterable[StoredFile]) -> list[str]:
    """Return the changes to an earlier run's files, one per line, sorted."""
    old, new = {file.path: file for file in before}, {file.path: file for file in listed}
    report = [f"{mask_secrets(path)} is gone" for path in old if path not in new]
    report += [f"{mask_secrets(path)} is new" for path in new if path not in old]
    for path in old.keys() & new.keys():
        if change := describe_change(old[path], new[path]):
            report.append(f"{mask_secrets(path)} changed: {change}")
    return sorted(report)


def describe_change(old: File, new: StoredFile) -> str:
    """Return a description of a file's change; empty if unchanged."""
    if old.bytes != new.bytes:
        return f"{old.bytes} bytes then, {new.bytes} now"
    return "written again since" if old.mark != new.mark else ""


def count_input(job: PlacedJob, listed: list[StoredFile], say: Callable[[str], None]) -> Manifest:
    """Count rows and split files, up to the row limit."""
    looked: list[File] = []
    splits: list[Split] = []
    total = 0
    for index, stored in enumerate(listed):
        say(
            f"counting rows: {mask_secrets(stored.path)}, file {index + 1} of {len(listed)},"
            f" {total:,} rows so far"
        )
        remaining = None if job.read.limit is None else job.read.limit - total
        file = File(path=stored.path, rows=0, bytes=stored.bytes, mark=stored.mark)
        counted = 0
        if remaining is None or remaining > 0:
            file, cuts = cut_file(job, file)
            for start, end, amount in cuts:
                row_count = amount if remaining is None else min(amount, remaining - counted)
                splits.append(
                    Split(
                        index=len(splits),
                        file=index,
                        start=start,
                        end=end,
                        first=total + counted,
                        rows=row_count,
                    )
                )
                counted += row_count
                if counted == remaining:
                    break
        looked.append(replace(file, rows=counted))
        total += counted
    manifest = Manifest(files=tuple(looked), splits=tuple(splits), rows=total, digest=job.digest)
    names, types = infer_columns(job, manifest)
    return replace(manifest, columns=names, types=types)


def cut_file(job: PlacedJob, file: File) -> tuple[File, Iterator[Cut]]:
    """Return a file with its header, and its splits.

    Raises:
        Refused: it cannot be read, or is not of the job's format.
    """
    try:
        location = open_location(file.path)
        if job.read.format == "parquet":
            groups = enumerate(parquet.row_groups(location))
            cuts = [
                (group, group + max(size, 1), count) for group, (count, size) in groups if count
            ]
            return file, iter(cuts)
        begin = next(lines.read_blocks(location), b"")
        if begin in (b"", lines.BOM):
            return file, iter(())
        if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = f"convert it: `iconv -f UTF-16 -t UTF-8 {location.path}`"
            raise Refused(f"{mask_secrets(file.path)} is UTF-16, not UTF-8", hint=hint)
        if begin[:4] == b"PAR1":
            raise Refused(
                f"{mask_secrets(file.path)} is a Parquet file",
                hint=f"set `format: parquet`, not `{job.read.format}`",
            )
        if job.read.format == "csv":
            return cut_csv(job, location, file, begin)
        return file, refuse_read_errors(file, cut_lines(location))
    except (OSError, ValueError) as error:
        raise unreadable_error(job, file, error) from error


def unreadable_error(job: PlacedJob, file: File, error: Exception) -> Refused:
    hint = "check that the file is complete and readable, and that `format` is correct"
    return Refused(
        f"{mask_secrets(file.path)} cannot be read as {job.read.format}", brief_error(error), hint
    )


def refuse_read_errors(file: File, cuts: Iterator[Cut]) -> Iterator[Cut]:
    try:
        yield from cuts
    except (OSError, ValueError) as error:
        codec = None if "://" in file.path else lines.compression_codec(file.path)
        test = f": `{codec} -t {file.path}`" if codec else ""
        raise Refused(
            f"{mask_secrets(file.path)} cannot be read",
            brief_error(error),
            f"check that the file is complete and readable{test}",
        ) from error


def cut_lines(location: Location) -> Iterator[Cut]:
    """Yield the splits of a file at newlines.

    A compressed one is a single split: no part of it is readable without all before.
    """
    if lines.compression_codec(location.address):
        yield from whole_file_cut(location)
        return
    start = position = cut_at = 0  # start of the split, position, end of the last newline
    counted = newlines = 0  # rows before `cut_at`, newlines in this split
    last = b"\n"
    for block in lines.read_blocks(location):
        last = block[-1:]
        for piece in range(0, len(block), PIECE):
            stop = min(piece + PIECE, len(block))
            newline_count = block.count(b"\n", piece, stop)
            if not newline_count:
                continue
            # A long line starts a new split, so that earlier rows do not wait for it.
            if counted and position + piece - start > SPLIT_BYTES:
                yield start, cut_at, counted
                start, newlines = cut_at, 0
            newlines += newline_count
            cut_at, counted = position + block.rfind(b"\n", piece, stop) + 1, newlines
            if counted >= SPLIT_ROWS or cut_at - start >= SPLIT_BYTES:
                yield start, cut_at, counted
                start, newlines, counted = cut_at, 0, 0
        position += len(block)
    if position > start:
        yield start, position, newlines + (last != b"\n")


def whole_file_cut(location: Location) -> Iterator[Cut]:
    """Yield a whole file as one split; nothing if it has no line."""
    newlines, last = 0, b"\n"
    for block in lines.read_blocks(location):
        newlines, last = newlines + block.count(b"\n"), block[-1:]
    if count := newlines + (last != b"\n"):
        yield 0, 0, count


def cut_csv(
    job: PlacedJob, location: Location, file: File, begin: bytes
) -> tuple[File, Iterator[Cut]]:
    """Return the header and the splits of a CSV file, between records.

    Raises:
        Refused: its first line is no header.
    """
    mark = len(lines.BOM) if begin.startswith(lines.BOM) else 0
    delimiter = table.guess_delimiter(file.path, begin[mark:].partition(b"\n")[0])
    limit = job.read.row_bytes
    records = table.read_records(
        lines.split_lines(lines.strip_bom(lines.read_blocks(location)), limit), delimiter, limit
    )
    first = next(records, None)
    if first is None:
        return file, iter(())
    try:
        names = table.header_names(first, delimiter)
    except ValueError as error:
        hint = "the first line of a CSV file names its columns"
        raise Refused(
            f"{mask_secrets(file.path)} has no header", f"{error}\n{first.raw[:200]}", hint
        ) from error
    compressed = bool(lines.compression_codec(location.address))
    return replace(file, columns=names, delimiter=delimiter), refuse_read_errors(
        file, cut_records(records, mark + first.size, file, compressed)
    )


def cut_records(
    records: Iterator[table.Record], position: int, file: File, compressed: bool
) -> Iterator[Cut]:
    start, count = position, 0
    for record in records:
        position, count = position + record.size, count + 1
        if not compressed and (count >= SPLIT_ROWS or position - start >= SPLIT_BYTES):
            yield start, min(position, file.bytes), count
            start, count = position, 0
    if count:
        yield 0 if compressed else start, min(position, file.bytes), count


def infer_columns(job: PlacedJob, manifest: Manifest) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the column names and the types of columns to keep, from the first good rows.

    JSON lines need only the declared types.
    """
    kinds: dict[str, set[str]] = {}
    for row in sample_rows(job, manifest):
        for name, value in row.items():
            kinds.setdefault(name, set()).add(columns.kind_of(value))
    declared = {name: type_ for name, type_ in (job.keep or {}).items() if type_}
    if job.write.format != "parquet":
        return tuple(kinds), declared
    names = kinds if job.columns_to_keep is None else job.columns_to_keep
    types = {name: columns.infer_kind(kinds.get(name, ())) for name in names}
    return tuple(kinds), {**types, **declared}


def sample_rows(job: PlacedJob, manifest: Manifest) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of the first good rows, at most `SAMPLE`."""
    import pickle

    bare, empty = replace(job, keep={}), RowSet(manifest.rows)
    read = chain.from_iterable(
        rows.read_split(bare, manifest, split, empty.missing(split.first, split.last))
        for split in manifest.splits
    )
    good = (row for row in islice(read, SAMPLE_SEARCH) if not row["_error"])
    for row in islice(good, SAMPLE):
        yield pickle.loads(row["_data"])  # noqa: S301 - pickled just now, by this process
