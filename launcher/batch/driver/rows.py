"""Read the rows of one split. A bad row becomes an error row, never an exception."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from . import columns, lines, parquet, table
from .job import Failed, Job
from .manifest import File, Manifest, Split
from .places import Place, brief, masked, opened

DIGITS = 4300  # Python's own limit; its 3.10 may have none, and takes quadratic time


class Bad(Exception):
    """Why a row cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file: how to get its columns (raises when it is bad), and how it looks."""

    columns: Callable[[], dict[str, Any]]
    raw: Any


def read_split(
    job: Job, manifest: Manifest, split: Split, pending: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the pending rows of a split in order, as dicts with `_row`, `_error`, `_stage`, `_raw`,
    `_keep` and `_data`.

    Args:
        pending: first and last numbers of the rows that are wanted; the others are passed over.

    Raises:
        Failed: the file is gone, is not what it was at the survey, or cannot be read.
    """
    packer = Packer(job, manifest)
    file = manifest.files[split.file]
    left = [[first, last] for first, last in pending]
    number = split.first - 1
    for number, row in enumerate(guarded(job, file, split), split.first):
        while left and left[0][1] < number:
            left.pop(0)
        if not left:
            return
        if left[0][0] <= number:
            yield packer.packed(number, row)
        if number == split.last:
            return
    if left and left[-1][1] > number:
        raise changed(file, f"it holds {split.last - number} rows less")


def guarded(job: Job, file: File, split: Split) -> Iterator[Row]:
    """The rows of a split; every way in which a file can fail to be read is one exception."""
    shown = masked(file.path)
    try:
        place = opened(file.path)
        found = place.found()
        if found is None:
            raise Failed(
                f"{shown} is gone",
                hint="put it back and run `vlaunch batch` again, which goes on where it stopped",
            )
        if found.bytes != file.bytes or (found.mark != file.mark and file.mark):
            raise changed(file, f"{file.bytes} bytes then, {found.bytes} now")
        yield from islice(READERS[job.read.format](job, place, file, split), split.rows)
    except FileNotFoundError as error:
        raise Failed(
            f"{shown} is gone", brief(error), "put it back and run `vlaunch batch` again"
        ) from error
    except (OSError, EOFError) as error:
        hint = (
            "see that the head's container can read it, then run `vlaunch batch` again, which goes"
            " on where it stopped"
        )
        raise Failed(f"{shown} cannot be read", brief(error), hint) from error


def changed(file: File, how: str) -> Failed:
    hint = "put the file back as it was, or start over with `--discard-results`"
    return Failed(f"{masked(file.path)} is not what it was when the job began", how, hint)


class Packer:
    """Makes result rows of a file's rows: kept columns are brought to their types, all are pickled
    for the stages.
    """

    def __init__(self, job: Job, manifest: Manifest) -> None:
        self.all = job.keep is None
        self.kept = job.kept_columns or ()
        declared = job.keep or {}
        self.fitting = {
            name: columns.fitting(name, type_, bool(declared.get(name)))
            for name, type_ in manifest.types.items()
            if self.all or name in self.kept
        }

    def packed(self, number: int, row: Row) -> dict[str, Any]:
        raw = row.raw
        try:
            data = row.columns()
            packed = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
            keep = self.keep(data)
            kept = packed if keep is data else pickled(keep)
        except Bad as error:
            return bad(number, str(error), raw)
        except RecursionError:
            return bad(number, "not JSON that can be read: nested too deep", raw)
        except ValueError as error:  # UnicodeDecodeError is one, json's error too
            return bad(number, str(error), raw)
        except Exception as error:  # whatever a hostile row provokes is that row's error
            return bad(number, f"cannot be read: {type(error).__name__}: {error}", raw)
        return {
            "_row": number,
            "_error": "",
            "_stage": "",
            "_raw": "",
            "_keep": kept,
            "_data": packed,
        }

    def keep(self, data: dict[str, Any]) -> dict[str, Any]:
        """The kept columns, as their types have them; `data` itself when nothing differs."""
        kept = data if self.all else {name: data.get(name) for name in self.kept}
        fitted = {name: fit(data[name]) for name, fit in self.fitting.items() if name in data}
        if all(fitted[name] is data[name] for name in fitted):
            return kept
        return {**kept, **fitted}


def pickled(keep: dict[str, Any]) -> bytes:
    """Kept columns as they travel: nothing where there are none."""
    return pickle.dumps(keep, pickle.HIGHEST_PROTOCOL) if keep else b""


def bad(number: int, reason: str, raw: Any) -> dict[str, Any]:
    shown = lines.shown(raw)
    return {
        "_row": number,
        "_error": lines.shown(reason)[:1000],
        "_stage": "read",
        "_raw": shown,
        "_keep": b"",
        "_data": b"",
    }


def from_text(job: Job, place: Place, file: File, split: Split) -> Iterator[Row]:
    for line in of_lines(job, place, split):
        yield Row(partial(of_text, line, job.read.row_bytes), head(line))


def from_jsonl(job: Job, place: Place, file: File, split: Split) -> Iterator[Row]:
    for line in of_lines(job, place, split):
        yield Row(partial(parsed, line, job.read.row_bytes), head(line))


def of_lines(job: Job, place: Place, split: Split) -> Iterator[bytes | lines.Long]:
    parts = lines.blocks(place, split.start, split.end)
    return lines.lines(lines.unmarked(parts) if split.start == 0 else parts, job.read.row_bytes)


def head(line: bytes | lines.Long) -> bytes:
    return line.head if isinstance(line, lines.Long) else line


def whole(line: bytes | lines.Long, limit: int) -> bytes:
    """A line without its ending.

    Raises:
        Bad: it is too large, empty, or not UTF-8.
    """
    if isinstance(line, lines.Long):
        raise Bad(f"the row is larger than {limit:,} bytes: {line.length:,}; see `row_bytes`")
    line = line.removesuffix(b"\r")
    if not line or line.isspace():
        raise Bad("the line is empty")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise Bad(f"not UTF-8: {error.reason} at byte {error.start} of the line") from error
    return line


def of_text(line: bytes | lines.Long, limit: int) -> dict[str, Any]:
    return {"text": whole(line, limit).decode()}


def parsed(line: bytes | lines.Long, limit: int) -> dict[str, Any]:
    """One JSON object; of a key that comes twice, the last counts, as in most readers of JSON.

    Raises:
        Bad: it is not one.
    """
    data = whole(line, limit)
    try:
        value = DECODER.decode(data.decode())
    except json.JSONDecodeError as error:
        raise Bad(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    if not isinstance(value, dict):
        raise Bad(f"not a JSON object but {A_JSON[type(value)]}")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Bad(
                "not UTF-8: it has half of a surrogate pair (`\\ud800` to `\\udfff`)"
            ) from error
    return value


def no_constant(word: str) -> Any:
    raise Bad(f"not JSON: it has no word {word}")


def small_integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise Bad(f"not JSON that can be read: a number of {len(digits)} digits")
    return int(digits)


def small_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise Bad(f"not JSON that can be read: the number {digits[:30]} is too large")
    return number


DECODER = json.JSONDecoder(
    parse_constant=no_constant, parse_int=small_integer, parse_float=small_float
)
A_JSON = {
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def from_csv(job: Job, place: Place, file: File, split: Split) -> Iterator[Row]:
    parts = lines.blocks(place, split.start, split.end)
    found = table.records(
        lines.lines(lines.unmarked(parts) if split.start == 0 else parts, job.read.row_bytes),
        file.delimiter,
        job.read.row_bytes,
    )
    if split.start == 0 and lines.compression(file.path):
        # a plain file's first split begins after the header; a compressed file's cannot
        next(found, None)
    for record in found:
        yield Row(partial(named, record, file.columns), record.raw)


def named(record: table.Record, names: tuple[str, ...]) -> dict[str, Any]:
    """The cells of a record by the header's names.

    Raises:
        Bad: they are not as many, or the record is broken.
    """
    if record.error:
        raise Bad(record.error)
    if len(record.cells) != len(names):
        raise Bad(f"{len(record.cells)} cells where the header has {len(names)}")
    return dict(zip(names, record.cells, strict=True))


def from_parquet(job: Job, place: Place, file: File, split: Split) -> Iterator[Row]:
    for row in parquet.rows(place, split.start, split.rows, job.read.row_bytes):
        yield Row(partial(sound, row), row if isinstance(row, (dict, str)) else "")


def sound(row: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(row, str):
        raise Bad(row)
    return row


READERS: dict[str, Callable[[Job, Place, File, Split], Iterator[Row]]] = {
    "text": from_text,
    "jsonl": from_jsonl,
    "csv": from_csv,
    "parquet": from_parquet,
}
