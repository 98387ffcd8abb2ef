"""Rows of a Parquet file, a row group at a time and in small batches; what cannot be decoded is the
error of those rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .places import Place, brief

BATCH = 8 << 20  # bytes of a batch, about


def groups(place: Place) -> tuple[list[int], list[str]]:
    """Rows of each row group, and the names of the columns.

    Raises:
        OSError, ValueError: this is not a Parquet file.
    """
    import pyarrow.parquet

    with place.open_input() as file:
        found = pyarrow.parquet.ParquetFile(file)
        return [
            found.metadata.row_group(each).num_rows for each in range(found.num_row_groups)
        ], found.schema_arrow.names


def rows(place: Place, group: int, count: int, row_bytes: int) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a row group as dicts, or the reason why a row cannot be read.

    Raises:
        OSError: the file cannot be read, on a filesystem that may be so for a while.
    """
    import pyarrow
    import pyarrow.parquet

    done = 0
    try:
        with place.open_input() as file:
            found = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            size = found.metadata.row_group(group).total_byte_size / max(
                1, found.metadata.row_group(group).num_rows
            )
            batches = found.iter_batches(
                max(1, min(1024, int(BATCH / max(1, size)))), row_groups=[group], use_threads=False
            )
            for batch in batches:
                for row in of_batch(batch, row_bytes):
                    done += 1
                    yield row
    except (OSError, ValueError) as error:
        # Of Arrow's own: a broken page looks the same at each try. What the operating system says
        # has a number and is not.
        if isinstance(error, FileNotFoundError) or (
            isinstance(error, OSError) and (error.errno or not place.local)
        ):
            raise
        reason = (
            f"row group {group} of the file cannot be decoded from here on: {brief(error)[:300]}"
        )
        for _ in range(count - done):
            yield reason


def of_batch(batch: Any, row_bytes: int) -> Iterator[dict[str, Any] | str]:
    batch = in_microseconds(batch)
    try:
        found: list[dict[str, Any] | str] = list(batch.to_pylist())
    except (ValueError, OverflowError, TypeError, KeyError):
        found = [alone(batch.slice(index, 1)) for index in range(batch.num_rows)]
    large = batch.nbytes > row_bytes
    for row in found:
        if large and isinstance(row, dict) and (size := weight(row)) > row_bytes:
            yield f"the row is larger than {row_bytes:,} bytes: {size:,}; see `row_bytes`"
        else:
            yield row


def alone(row: Any) -> dict[str, Any] | str:
    """One row, or why Python has no values for it: text that is not UTF-8, a date after the year
    9999.
    """
    try:
        return dict(row.to_pylist()[0])
    except (ValueError, OverflowError, TypeError, KeyError) as error:
        kind = (
            "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a value that cannot be read"
        )
        return f"{kind}: {brief(error)[:300]}"


def in_microseconds(batch: Any) -> Any:
    """Python's times have no nanoseconds; without this a whole column of them needs another
    library.
    """
    import pyarrow

    types = pyarrow.types
    for index, field in enumerate(batch.schema):
        to: Any = None
        if getattr(field.type, "unit", "") == "ns":
            if types.is_timestamp(field.type):
                to = pyarrow.timestamp("us", field.type.tz)
            elif types.is_duration(field.type):
                to = pyarrow.duration("us")
            elif types.is_time(field.type):
                to = pyarrow.time64("us")
        if to is not None:
            batch = batch.set_column(
                index, field.with_type(to), batch.column(index).cast(to, safe=False)
            )
    return batch


def weight(value: Any) -> int:
    """Bytes of a value, about."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + weight(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(weight, value))
    return 8
