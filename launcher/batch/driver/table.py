"""Records of a CSV file and their sizes; quoted newlines and broken records do not end the file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass

from .lines import EXCERPT_LENGTH, LongLine, excerpt

DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class Record:
    """A record: cells or an error, `size` in bytes, and `raw` as in the file."""

    cells: list[str]
    error: str
    raw: str
    size: int


class Cursor:
    """Line iterator for `csv.reader` that tracks the current record; an invalid line raises
    `csv.Error`.

    A class and not a generator: it must continue after it raised.
    """

    def __init__(self, parts: Iterator[bytes | LongLine], limit: int) -> None:
        self.parts, self.limit = parts, limit
        self.begin()

    def begin(self) -> None:
        """Start a new record."""
        self.size, self.head, self.error, self.quotes = 0, b"", "", 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> str:
        line = next(self.parts)
        self.size += 1 + (line.length if isinstance(line, LongLine) else len(line))
        if isinstance(line, LongLine) or self.size > self.limit + 1:
            if isinstance(line, LongLine):
                self.head = self.head or line.head
            else:
                self.skip_rest(line)
            raise csv.Error(f"larger than {self.limit:,} bytes")
        self.quotes += line.count(b'"')
        if len(self.head) < EXCERPT_LENGTH:
            self.head += (b"\n" if self.head else b"") + line[:EXCERPT_LENGTH]
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError as error:
            self.error = f"not UTF-8: {error.reason} at byte {error.start} of the line"
            return line.decode("utf-8", "replace") + "\n"

    def skip_rest(self, line: bytes | LongLine) -> None:
        """Skip to the line that closes the quote of an oversized record."""
        while True:
            self.quotes += line.count(b'"') if isinstance(line, bytes) else 0
            following = next(self.parts, None) if self.quotes % 2 else None
            if following is None:
                return
            line = following
            self.size += 1 + (line.length if isinstance(line, LongLine) else len(line))


def read_records(parts: Iterator[bytes | LongLine], delimiter: str, limit: int) -> Iterator[Record]:
    """Yield records from lines that begin at a record."""
    csv.field_size_limit(max(limit + 1, csv.field_size_limit()))
    cursor = Cursor(parts, limit)
    reader = csv.reader(cursor, delimiter=delimiter, strict=True)
    while True:
        cursor.begin()
        try:
            cells, error = next(reader), ""
        except StopIteration:
            return
        except csv.Error as problem:
            cells, error = [], csv_reason(str(problem), cursor.quotes)
        if not cursor.size:
            return
        raw = excerpt(cursor.head.rstrip(b"\r"))
        if not error and not cells:
            error = "the line is empty"
        yield Record(cells, cursor.error or error, raw, cursor.size)


def csv_reason(message: str, quotes: int) -> str:
    if "unexpected end of data" in message:
        return "not CSV: a quote that starts in this row is never closed"
    if message.startswith("larger"):
        return f"the row is {message}"
    return f"not CSV: {message}" + (" (a quote in it is not closed)" if quotes % 2 else "")


def header_names(first: Record, delimiter: str) -> tuple[str, ...]:
    """Return the column names; an unnamed one is called by its position.

    Raises:
        ValueError: this cannot be a header.
    """
    if first.error:
        raise ValueError(first.error)
    names = [cell.strip() or f"column_{index}" for index, cell in enumerate(first.cells, 1)]
    check_unique(names)
    return tuple(names)


def check_unique(names: list[str]) -> None:
    """Raise ValueError if two columns have one name: a row would lose one of them."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"two columns are called `{duplicates[0]}`: rename one")


def guess_delimiter(path: str, line: bytes) -> str:
    """Return the cell separator: a tab by suffix, else the first of `,` `;` tab in the header."""
    name = path.partition("?")[0].lower()
    if any(name.endswith(ending) for ending in (".tsv", ".tsv.gz", ".tsv.zst")):
        return "\t"
    return next((delimiter for delimiter in DELIMITERS if delimiter.encode() in line), ",")
