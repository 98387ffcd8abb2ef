"""Rows of a Parquet file, by row group and in small batches; undecodable rows become errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .storage import Location, brief_error
from .table import check_unique

BATCH = 8 << 20  # approximate bytes of a batch


def row_groups(location: Location) -> list[tuple[int, int]]:
    """Return the row count and the bytes of each row group.

    Raises:
        OSError, ValueError: not a Parquet file, or two columns have one name.
    """
    import pyarrow.parquet

    with location.open_input() as file:
        parquet_file = pyarrow.parquet.ParquetFile(file)
        check_unique(parquet_file.schema_arrow.names)
        metadata = parquet_file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def read_rows(
    location: Location, group: int, count: int, row_bytes: int
) -> Iterator[dict[str, Any] | str]:
    """Yield a row group's rows as dicts, or the reason against reading one.

    Raises:
        OSError: the file cannot be read; possibly temporary.
    """
    import pyarrow
    import pyarrow.parquet

    done = 0
    try:
        with location.open_input() as file:
            parquet_file = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            size = parquet_file.metadata.row_group(group).total_byte_size / max(
                1, parquet_file.metadata.row_group(group).num_rows
            )
            batches = parquet_file.iter_batches(
                max(1, min(1024, int(BATCH / max(1, size)))), row_groups=[group], use_threads=False
            )
            for batch in batches:
                for row in batch_rows(batch, row_bytes):
                    done += 1
                    yield row
    except (OSError, ValueError) as error:
        # Arrow's own errors have no errno and repeat at every try (a broken page); those of the
        # operating system may pass.
        if isinstance(error, FileNotFoundError) or (
            isinstance(error, OSError) and (error.errno or not location.local)
        ):
            raise
        reason = (
            f"row group {group} of the file cannot be decoded from here on:"
            f" {brief_error(error)[:300]}"
        )
        for _ in range(count - done):
            yield reason


def batch_rows(batch: Any, row_bytes: int) -> Iterator[dict[str, Any] | str]:
    batch = cast_to_microseconds(batch)
    try:
        rows: list[dict[str, Any] | str] = list(batch.to_pylist())
    except (ValueError, OverflowError, TypeError, KeyError):
        rows = [decode_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
    large = batch.nbytes > row_bytes
    for row in rows:
        if large and isinstance(row, dict) and (size := value_size(row)) > row_bytes:
            yield f"the row is larger than {row_bytes:,} bytes: {size:,}; see `row_bytes`"
        else:
            yield row


def decode_row(row: Any) -> dict[str, Any] | str:
    """Return one row, or the reason against it: text that is not UTF-8, a date after year 9999."""
    try:
        return dict(row.to_pylist()[0])
    except (ValueError, OverflowError, TypeError, KeyError) as error:
        kind = (
            "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a value that cannot be read"
        )
        return f"{kind}: {brief_error(error)[:300]}"


def cast_to_microseconds(batch: Any) -> Any:
    """Cast nanosecond columns to microseconds: Python's times are no finer."""
    import pyarrow

    types = pyarrow.types
    for index, field in enumerate(batch.schema):
        target: Any = None
        if getattr(field.type, "unit", "") == "ns":
            if types.is_timestamp(field.type):
                target = pyarrow.timestamp("us", field.type.tz)
            elif types.is_duration(field.type):
                target = pyarrow.duration("us")
            elif types.is_time(field.type):
                target = pyarrow.time64("us")
        if target is not None:
            batch = batch.set_column(
                index, field.with_type(target), batch.column(index).cast(target, safe=False)
            )
    return batch


def value_size(value: Any) -> int:
    """Return the approximate bytes of a value."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + value_size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(value_size, value))
    return 8
