"""Read the rows of one split. A bad row becomes an error row, never an exception."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from ..job import PlacedJob
from . import columns, lines, parquet, table
from .bitmap import row_numbers
from .job_file import Failed
from .manifest import File, Manifest, Split
from .storage import Location, brief_error, mask_secrets, open_location

DIGITS = (
    4300  # Python's own limit, missing from some 3.10 releases, where parsing takes quadratic time
)


class BadRow(Exception):
    """A row that cannot be read."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of a file: a function that returns its columns (or raises), and its raw form."""

    columns: Callable[[], dict[str, Any]]
    raw: Any


def read_split(
    job: PlacedJob, manifest: Manifest, split: Split, pending: bytes
) -> Iterator[dict[str, Any]]:
    """Yield a split's pending rows in order, as dicts with `_row`, `_error`, `_stage`, `_raw`,
    `_keep` and `_data`.

    Args:
        pending: bitmap of the pending rows, from the byte of the first row on; others are skipped.

    Raises:
        Failed: the file is gone, changed since the survey, or cannot be read.
    """
    packer = Packer(job, manifest)
    file = manifest.files[split.file]
    remaining = row_numbers(pending, split.first)
    next_pending = next(remaining, None)
    number = split.first - 1
    for number, row in enumerate(open_rows(job, file, split), split.first):
        if number == next_pending:
            yield packer.packed(number, row)
            next_pending = next(remaining, None)
        if next_pending is None:
            return
    if next_pending is not None:
        raise changed_error(file, f"it holds {split.last - number} fewer rows")


def open_rows(job: PlacedJob, file: File, split: Split) -> Iterator[InputRow]:
    """Yield the rows of a split; any error in reading the file becomes Failed."""
    shown = mask_secrets(file.path)
    try:
        location = open_location(file.path)
        info = location.stat()
        if info is None:
            raise Failed(
                f"{shown} is gone",
                hint="put it back and run `vlaunch batch` again, which continues where it stopped",
            )
        if info.bytes != file.bytes or (info.mark != file.mark and file.mark):
            raise changed_error(file, f"{file.bytes} bytes then, {info.bytes} now")
        assert job.read.format is not None  # noqa: S101 - the launcher writes it
        yield from islice(READERS[job.read.format](job, location, file, split), split.rows)
    except FileNotFoundError as error:
        raise Failed(
            f"{shown} is gone", brief_error(error), "put it back and run `vlaunch batch` again"
        ) from error
    except (OSError, EOFError) as error:
        hint = (
            "check that the head's container can read it, then run `vlaunch batch` again,"
            " which continues where it stopped"
        )
        raise Failed(f"{shown} cannot be read", brief_error(error), hint) from error


def changed_error(file: File, evidence: str) -> Failed:
    hint = "put the file back as it was, or start over with `--discard-results`"
    return Failed(f"{mask_secrets(file.path)} has changed since the job started", evidence, hint)


class Packer:
    """Converter from a file's rows to pickled result rows with typed input columns."""

    def __init__(self, job: PlacedJob, manifest: Manifest) -> None:
        self.all = job.keep is None
        self.column_names = job.columns_to_keep or ()
        declared = job.keep or {}
        self.converters = {
            name: columns.converter(name, type_, bool(declared.get(name)))
            for name, type_ in manifest.types.items()
            if self.all or name in self.column_names
        }

    def packed(self, number: int, row: InputRow) -> dict[str, Any]:
        raw = row.raw
        try:
            data = row.columns()
            packed = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
            keep = self.keep(data)
            keep_bytes = packed if keep is data else pickle_columns(keep)
        except BadRow as error:
            return error_row(number, str(error), raw)
        except RecursionError:
            return error_row(number, "not JSON that can be read: nested too deep", raw)
        except ValueError as error:  # UnicodeDecodeError is one, json's error too
            return error_row(number, str(error), raw)
        except Exception as error:  # any exception belongs to its row
            return error_row(number, f"cannot be read: {type(error).__name__}: {error}", raw)
        return {
            "_row": number,
            "_error": "",
            "_stage": "",
            "_raw": "",
            "_keep": keep_bytes,
            "_data": packed,
        }

    def keep(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the columns to keep, converted to types; `data` itself if nothing differs."""
        selected = data if self.all else {name: data.get(name) for name in self.column_names}
        fitted = {name: fit(data[name]) for name, fit in self.converters.items() if name in data}
        if all(fitted[name] is data[name] for name in fitted):
            return selected
        return {**selected, **fitted}


def pickle_columns(keep: dict[str, Any]) -> bytes:
    """Pickle columns; empty when there are none."""
    return pickle.dumps(keep, pickle.HIGHEST_PROTOCOL) if keep else b""


def error_row(number: int, reason: str, raw: Any) -> dict[str, Any]:
    shown = lines.excerpt(raw)
    return {
        "_row": number,
        "_error": lines.excerpt(reason)[:1000],
        "_stage": "read",
        "_raw": shown,
        "_keep": b"",
        "_data": b"",
    }


def from_text(job: PlacedJob, location: Location, file: File, split: Split) -> Iterator[InputRow]:
    for line in read_lines(job, location, split):
        yield InputRow(partial(parse_text, line, job.read.row_bytes), line_head(line))


def from_jsonl(job: PlacedJob, location: Location, file: File, split: Split) -> Iterator[InputRow]:
    for line in read_lines(job, location, split):
        yield InputRow(partial(parse_json, line, job.read.row_bytes), line_head(line))


def read_lines(
    job: PlacedJob, location: Location, split: Split
) -> Iterator[bytes | lines.LongLine]:
    parts = lines.read_blocks(location, split.start, split.end)
    return lines.split_lines(
        lines.strip_bom(parts) if split.start == 0 else parts, job.read.row_bytes
    )


def line_head(line: bytes | lines.LongLine) -> bytes:
    return line.head if isinstance(line, lines.LongLine) else line


def check_line(line: bytes | lines.LongLine, limit: int) -> bytes:
    """Return a line without its ending.

    Raises:
        BadRow: it is too large, empty, or not UTF-8.
    """
    if isinstance(line, lines.LongLine):
        raise BadRow(f"the row is larger than {limit:,} bytes: {line.length:,}; see `row_bytes`")
    line = line.removesuffix(b"\r")
    if not line or line.isspace():
        raise BadRow("the line is empty")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error.reason} at byte {error.start} of the line") from error
    return line


def parse_text(line: bytes | lines.LongLine, limit: int) -> dict[str, Any]:
    return {"text": check_line(line, limit).decode()}


def parse_json(line: bytes | lines.LongLine, limit: int) -> dict[str, Any]:
    """Parse one JSON object; of duplicate keys the last counts, as in most parsers.

    Raises:
        BadRow: it is not one.
    """
    data = check_line(line, limit)
    try:
        value = DECODER.decode(data.decode())
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    if not isinstance(value, dict):
        raise BadRow(f"not a JSON object but {JSON_LABELS[type(value)]}")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                "not UTF-8: it has half of a surrogate pair (`\\ud800` to `\\udfff`)"
            ) from error
    return value


def refuse_constant(constant: str) -> Any:
    raise BadRow(f"not JSON: {constant} is not allowed")


def parse_integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise BadRow(f"not JSON that can be read: a number of {len(digits)} digits")
    return int(digits)


def parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise BadRow(f"not JSON that can be read: the number {digits[:30]} is too large")
    return number


DECODER = json.JSONDecoder(
    parse_constant=refuse_constant, parse_int=parse_integer, parse_float=parse_float
)
JSON_LABELS = {
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def from_csv(job: PlacedJob, location: Location, file: File, split: Split) -> Iterator[InputRow]:
    parts = lines.read_blocks(location, split.start, split.end)
    records = table.read_records(
        lines.split_lines(
            lines.strip_bom(parts) if split.start == 0 else parts, job.read.row_bytes
        ),
        file.delimiter,
        job.read.row_bytes,
    )
    if split.start == 0 and lines.compression_codec(file.path):
        # a plain file's first split begins after the header; a compressed file's cannot
        next(records, None)
    for record in records:
        yield InputRow(partial(name_cells, record, file.columns), record.raw)


def name_cells(record: table.Record, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a record's cells by column name.

    Raises:
        BadRow: they are not as many, or the record is broken.
    """
    if record.error:
        raise BadRow(record.error)
    if len(record.cells) != len(names):
        raise BadRow(f"{len(record.cells)} cells where the header has {len(names)}")
    return dict(zip(names, record.cells, strict=True))


def from_parquet(
    job: PlacedJob, location: Location, file: File, split: Split
) -> Iterator[InputRow]:
    for row in parquet.read_rows(location, split.start, split.rows, job.read.row_bytes):
        yield InputRow(partial(check_row, row), row if isinstance(row, (dict, str)) else "")


def check_row(row: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(row, str):
        raise BadRow(row)
    return row


READERS: dict[str, Callable[[PlacedJob, Location, File, Split], Iterator[InputRow]]] = {
    "text": from_text,
    "jsonl": from_jsonl,
    "csv": from_csv,
    "parquet": from_parquet,
}
