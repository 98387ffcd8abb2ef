"""Rows of Parquet files: Python values, and undecodable ones."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.batch.driver import parquet
from launcher.batch.driver.job_file import Refused
from launcher.batch.driver.storage import Location
from tests.batch.driver.jobs import errors, job, read_all, surveyed


def test_parquet_values_are_pythons(tmp_path: Path) -> None:
    """Nested values, nanoseconds, decimals and bytes."""
    table = pa.table(
        {
            "nested": pa.array([{"x": [1, 2]}, None]),
            "when": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
            "price": pa.array([Decimal("1.50"), None]),
            "raw": pa.array([b"\xff", b""]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    spec = job(
        tmp_path,
        tmp_path / "a.parquet",
        read={"format": "parquet"},
        keep=None,
        write={"format": "parquet"},
    )
    rows = read_all(spec)

    first = rows[0]["_data"]
    assert first["nested"] == {"x": [1, 2]}
    assert first["when"].replace(tzinfo=timezone.utc) == datetime(
        2023, 11, 14, 22, 13, 20, 123456, timezone.utc
    )
    assert (first["price"], first["raw"]) == (Decimal("1.50"), b"\xff")
    assert rows[0]["_keep"]["nested"] == '{"x": [1, 2]}'
    assert rows[0]["_keep"]["price"] == "1.50"
    assert rows[1]["_keep"] == {"nested": None, "when": None, "price": None, "raw": b""}
    assert surveyed(spec).types == {
        "nested": "json",
        "when": "any",
        "price": "any",
        "raw": "binary",
    }


def test_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    """As in a CSV file: one of the two would be lost."""
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")

    with pytest.raises(Refused) as caught:
        surveyed(job(tmp_path, tmp_path / "a.parquet", read={"format": "parquet"}))
    assert "two columns are called `a`" in caught.value.evidence


def test_an_undecodable_parquet_row_is_an_error_row(tmp_path: Path) -> None:
    """Invalid UTF-8, a date out of range; other rows are read."""
    bad = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(b"\x00\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0"), pa.py_buffer(b"a\xffb")],
    )
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    rows = read_all(job(tmp_path, tmp_path / "a.parquet", read={"format": "parquet"}))

    assert [row["_data"] for row in rows] == [{"text": "a"}, None, {"text": "b"}]
    assert rows[1]["_error"].startswith("not UTF-8")


def test_rows_before_a_broken_page_are_read(tmp_path: Path) -> None:
    """Every row of the group once: those before it as data, the rest as errors."""
    path, count = tmp_path / "a.parquet", 6000
    table = pa.table({"s": [f"text {n:06}" for n in range(count)]})
    pq.write_table(table, path, use_dictionary=False, compression="none", data_page_size=4096)
    data = path.read_bytes()
    # the length of a value far after the first batch of 1,024 rows
    at = data.index(b"text 005000") - 4
    path.write_bytes(data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :])
    place = SimpleNamespace(open_input=lambda: path.open("rb"), local=True)
    rows = list(parquet.read_rows(cast(Location, place), 0, count, 1 << 20))

    assert len(rows) == count
    assert rows[:1024] == [{"s": f"text {n:06}"} for n in range(1024)]
    assert "cannot be decoded from here on" in rows[-1]


def test_a_broken_page_affects_its_row_group_only(tmp_path: Path) -> None:
    """All rows have numbers."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"n": list(range(100)), "s": [f"text {n}" for n in range(100)]}),
        path,
        row_group_size=50,
    )
    spec = job(tmp_path, path, read={"format": "parquet"})
    where = pq.ParquetFile(path).metadata.row_group(1).column(1)
    with path.open("r+b") as file:
        file.seek(where.dictionary_page_offset or where.data_page_offset)
        file.write(b"\xff" * 40)
    rows = read_all(spec)

    assert errors(rows)[:50] == [""] * 50
    assert all("row group 1 of the file cannot be decoded" in error for error in errors(rows)[50:])
