"""Rows of every format, good and hostile: each ends as a row or as an error row with its reason,
and has its number.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import subprocess
import sys
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.payload.batch import rows
from launcher.payload.batch.job import Failed
from tests.payload.batch.jobs import job, read_all, surveyed

ROOT = Path(__file__).parent.parent.parent.parent


def of(folder: Path, name: str, data: bytes, **changes: Any) -> list[dict[str, Any]]:
    path = folder / name
    path.write_bytes(data)
    return read_all(job(folder, path, **changes))


def errors(found: list[dict[str, Any]]) -> list[str]:
    return [row["_error"] for row in found]


def test_text_lines_are_rows_whatever_ends_them(tmp_path: Path) -> None:
    """`\\r\\n`, a byte-order mark, and a last line without a newline change nothing."""
    found = of(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\nthr\xc3\xa9e", read={"format": "text"})

    assert [row["_data"] for row in found] == [{"text": "one"}, {"text": "two"}, {"text": "thrée"}]


def test_blank_lines_and_bytes_that_are_not_utf8_are_error_rows(tmp_path: Path) -> None:
    """They keep their numbers; the raw row is shown with escapes."""
    found = of(tmp_path, "a.txt", b"a\n\n  \nb\xff\n", read={"format": "text"})

    assert errors(found)[:3] == ["", "the line is empty", "the line is empty"]
    assert errors(found)[3].startswith("not UTF-8: invalid start byte at byte 1")
    assert found[3]["_raw"] == "b\\xff"
    assert {row["_stage"] for row in found[1:]} == {"read"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "not a JSON object but a list"),
        (b'"x"', "not a JSON object but text"),
        (b"null", "not a JSON object but null"),
        (b'{"a": NaN}', "not JSON: it has no word NaN"),
        (b'{"a": -Infinity}', "not JSON: it has no word -Infinity"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data"),
        (b"\x00", "not JSON"),
    ],
)
def test_a_line_that_is_no_json_object_is_an_error_row(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    """The rows around it are read."""
    found = of(tmp_path, "a.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 2}\n')

    assert reason in found[1]["_error"]
    assert [found[0]["_data"], found[2]["_data"]] == [{"a": 0}, {"a": 2}]
    assert len(found[1]["_raw"]) <= 4096


def test_whole_pairs_large_integers_and_keys_that_come_twice_are_good(tmp_path: Path) -> None:
    """Of a key that comes twice the last counts."""
    found = of(
        tmp_path,
        "a.jsonl",
        b'{"a": "\\ud83d\\ude00"}\n{"a": 123456789012345678901234567890}\n{"a": 1, "a": 2}\n',
    )

    assert [row["_data"]["a"] for row in found] == ["😀", 123456789012345678901234567890, 2]


def test_a_row_over_the_limit_is_an_error_row(tmp_path: Path) -> None:
    """Its size is told, and the beginning of it; what follows is read."""
    found = of(
        tmp_path,
        "a.txt",
        b"x" * 100 + b"\nok\n" + b"y" * 101 + b"\nend",
        read={"format": "text", "row_bytes": 100},
    )

    assert [row["_error"] for row in found] == [
        "",
        "",
        "the row is larger than 100 bytes: 101; see `row_bytes`",
        "",
    ]
    assert found[2]["_raw"] == "y" * 101
    assert found[3]["_data"] == {"text": "end"}


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_huge_line_costs_no_more_memory_than_the_limit(tmp_path: Path, form: str) -> None:
    """It is read past in blocks, by the survey and by the reader; the rows after it are found."""
    small, large = tmp_path / "small", tmp_path / "large"
    for path, hole in ((small, 2 << 20), (large, 200 << 20)):
        with path.open("wb") as file:
            file.write(b"text\n" if form == "csv" else b"")
            file.seek(hole, os.SEEK_CUR)  # a hole: no space on the disk
            file.write(b'\n{"a": 1}\n')
    script = (
        "import resource; from tests.payload.batch.jobs import job, read_all; from pathlib import"
        " Path\n"
        f"read = {{'format': {form!r}, 'row_bytes': 1 << 20}}\n"
        f"found = lambda name: read_all(job(Path({str(tmp_path)!r}), name, read=read, work=name +"
        " '-work'))\n"
        f"found({str(small)!r})\n"  # what the libraries take for themselves is taken
        "limit = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() +"
        " (120 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"found = found({str(large)!r})\n"
        "print(len(found), found[0]['_error'], found[1]['_error'] or 'good')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("2 the row is larger than 1,048,576 bytes")
    assert done.stdout.strip().endswith("good")


@pytest.mark.parametrize(("name", "codec"), [("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd")])
def test_compressed_files_are_read_as_streams(tmp_path: Path, name: str, codec: str) -> None:
    """Also those of several members, as `cat` makes them."""
    half = b"".join(b'{"n": %d}\n' % number for number in range(3000))
    packed = (
        gzip.compress(half) if codec == "gzip" else pa.compress(half, codec="zstd", asbytes=True)
    )
    found = of(tmp_path, name, packed + packed)

    assert [row["_data"]["n"] for row in found] == [*range(3000), *range(3000)]


def test_csv_cells_have_the_names_of_the_header(tmp_path: Path) -> None:
    """Quoted newlines, quotes and delimiters belong to their cell; a tab separates where the file's
    ending says so.
    """
    found = of(
        tmp_path,
        "a.csv",
        b'\xef\xbb\xbfid,text\r\n1,"a ""b"",\r\nc"\r\n2,\xc3\xa9\r\n',
        read={"format": "csv"},
    )
    tabs = of(
        tmp_path, "b.tsv", b"id\ttext\n1\ta,b\n", read={"format": "csv"}, work=str(tmp_path / "w2")
    )
    semicolons = of(
        tmp_path, "c.csv", b"id;text\n1;a\n", read={"format": "csv"}, work=str(tmp_path / "w3")
    )

    assert [row["_data"] for row in found] == [
        {"id": "1", "text": 'a "b",\r\nc'},
        {"id": "2", "text": "é"},
    ]
    assert tabs[0]["_data"] == {"id": "1", "text": "a,b"}
    assert semicolons[0]["_data"] == {"id": "1", "text": "a"}


def test_broken_csv_records_are_error_rows(tmp_path: Path) -> None:
    """Too few or too many cells, blank lines, wrong quotes, wrong bytes; those after them are
    read.
    """
    data = b'a,b\n1\n1,2,3\n\n"x"y,2\n\xff,2\n5,6\n7,"never\nclosed\n'
    found = of(tmp_path, "a.csv", data, read={"format": "csv"})

    said = errors(found)
    assert said[:3] == [
        "1 cells where the header has 2",
        "3 cells where the header has 2",
        "the line is empty",
    ]
    assert said[3].startswith("not CSV: ")
    assert said[4].startswith("not UTF-8: ")
    assert found[5]["_data"] == {"a": "5", "b": "6"}
    assert said[6] == "not CSV: a quote that begins in this row is never closed"
    assert len(found) == 7


def test_a_csv_record_over_the_limit_ends_where_its_quote_does(tmp_path: Path) -> None:
    """Its lines are not taken for rows."""
    data = b'a,b\n1,"' + b"line, of\n" * 50 + b'"\n2,ok\n'
    found = of(tmp_path, "a.csv", data, read={"format": "csv", "row_bytes": 100})

    assert "larger than 100 bytes" in found[0]["_error"]
    assert found[1]["_data"] == {"a": "2", "b": "ok"}
    assert len(found) == 2


def test_parquet_values_are_pythons(tmp_path: Path) -> None:
    """Nested values, times with nanoseconds, decimals and bytes."""
    table = pa.table(
        {
            "nested": pa.array([{"x": [1, 2]}, None]),
            "when": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
            "price": pa.array([Decimal("1.50"), None]),
            "raw": pa.array([b"\xff", b""]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    asked = job(
        tmp_path,
        tmp_path / "a.parquet",
        read={"format": "parquet"},
        keep=None,
        write={"format": "parquet"},
    )
    found = read_all(asked)

    first = found[0]["_data"]
    assert first["nested"] == {"x": [1, 2]}
    assert first["when"].replace(tzinfo=timezone.utc) == datetime(
        2023, 11, 14, 22, 13, 20, 123456, timezone.utc
    )
    assert (first["price"], first["raw"]) == (Decimal("1.50"), b"\xff")
    assert found[0]["_keep"]["nested"] == '{"x": [1, 2]}'
    assert found[0]["_keep"]["price"] == "1.50"
    assert found[1]["_keep"] == {"nested": None, "when": None, "price": None, "raw": b""}
    assert surveyed(asked).types == {
        "nested": "json",
        "when": "any",
        "price": "any",
        "raw": "binary",
    }


def test_a_parquet_row_that_python_cannot_hold_is_an_error_row(tmp_path: Path) -> None:
    """Text that is not UTF-8, a date far away; the rows beside it are read."""
    bad = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(b"\x00\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0"), pa.py_buffer(b"a\xffb")],
    )
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    found = read_all(job(tmp_path, tmp_path / "a.parquet", read={"format": "parquet"}))

    assert [row["_data"] for row in found] == [{"text": "a"}, None, {"text": "b"}]
    assert found[1]["_error"].startswith("not UTF-8")


def test_a_broken_page_makes_error_rows_of_its_row_group(tmp_path: Path) -> None:
    """The other row groups are read; every row has its number."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"n": list(range(100)), "s": [f"text {n}" for n in range(100)]}),
        path,
        row_group_size=50,
    )
    asked = job(tmp_path, path, read={"format": "parquet"})
    where = pq.ParquetFile(path).metadata.row_group(1).column(1)
    with path.open("r+b") as file:
        file.seek(where.dictionary_page_offset or where.data_page_offset)
        file.write(b"\xff" * 40)
    found = read_all(asked)

    assert errors(found)[:50] == [""] * 50
    assert all("row group 1 of the file cannot be decoded" in said for said in errors(found)[50:])


def test_kept_values_must_fit_their_columns(tmp_path: Path) -> None:
    """A later value of another type is an error row that says what to write."""
    data = (
        b"".join(b'{"score": %d}\n' % n for n in range(1100))
        + b'{"score": "high"}\n{"score": null}\n{}\n{"score": 2.5}\n'
    )
    found = of(tmp_path, "a.jsonl", data, keep={"score": None}, write={"format": "parquet"})

    said = "column score holds text, the rows before it whole numbers; say `keep: {score: text}`"
    assert errors(found)[1100:] == [
        said,
        "",
        "",
        "column score holds numbers, the rows before it whole numbers; say `keep: {score: text}`",
    ]
    assert found[1101]["_keep"] == {"score": None}


@pytest.mark.parametrize(
    ("declared", "value", "kept"),
    [
        ("text", 5, "5"),
        ("text", {"a": 1}, '{"a": 1}'),
        ("text", "x", "x"),
        ("text", True, "true"),
        ("integer", " 7 ", 7),
        ("integer", 7.0, 7),
        ("number", "1.5", 1.5),
        ("number", 2, 2.0),
        ("boolean", "True", True),
        ("json", "x", '"x"'),
        ("integer", "", None),
        ("number", "", None),
    ],
)
def test_declared_types_change_what_can_be_changed(
    tmp_path: Path, declared: str, value: Any, kept: Any
) -> None:
    """A cell of a CSV is text: it becomes a number where one is declared."""
    found = of(
        tmp_path,
        "a.jsonl",
        json.dumps({"c": value}).encode(),
        keep={"c": declared},
        write={"format": "parquet"},
    )

    assert (found[0]["_error"], found[0]["_keep"]) == ("", {"c": kept})
    assert type(found[0]["_keep"]["c"]) is type(kept)
    assert found[0]["_data"] == {"c": value}


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("integer", "x"),
        ("integer", 1.5),
        ("integer", True),
        ("integer", 2**64),
        ("boolean", 1),
        ("number", [1]),
        ("integer", "9" * 99),
    ],
)
def test_declared_types_refuse_the_rest(tmp_path: Path, declared: str, value: Any) -> None:
    """The reason names the column, what it holds and what was declared."""
    found = of(tmp_path, "a.jsonl", json.dumps({"c": value}).encode(), keep={"c": declared})

    assert found[0]["_error"].startswith("column c holds ")
    assert ", is declared as " in found[0]["_error"]


def test_only_pending_rows_are_read(tmp_path: Path) -> None:
    """Others are passed over, whatever is wrong with them."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(10)))
    asked = job(tmp_path, tmp_path / "a.jsonl")
    manifest = surveyed(asked)
    found = rows.read_split(asked, manifest, manifest.splits[0], [(1, 2), (7, 7)])

    assert [(row["_row"], pickle.loads(row["_data"])["n"]) for row in found] == [
        (1, 1),
        (2, 2),
        (7, 7),
    ]


@pytest.mark.parametrize("change", ["shorter", "gone", "same size"])
def test_a_file_that_changes_after_the_survey_is_not_read(tmp_path: Path, change: str) -> None:
    """Its rows would have other numbers."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    asked = job(tmp_path, path)
    manifest = surveyed(asked)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(b'{"n": 1}\n' if change == "shorter" else b'{"n": 3}\n{"n": 4}\n')
        os.utime(path, ns=(1, 1))

    with pytest.raises(
        Failed, match="is gone" if change == "gone" else "not what it was"
    ) as raised:
        list(rows.read_split(asked, manifest, manifest.splits[0], [(0, 1)]))
    assert raised.value.hint
    assert pickle.loads(pickle.dumps(raised.value)).message == raised.value.message


def test_memory_of_reading_stays_small(tmp_path: Path) -> None:
    """A file is read in blocks: 100 MB of rows cost far less."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for _ in range(100):
            file.write((b"x" * 999 + b"\n") * 1000)
    asked = job(tmp_path, path, read={"format": "text"})
    manifest = surveyed(asked)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(
        1
        for split in manifest.splits
        for _ in rows.read_split(asked, manifest, split, [(split.first, split.last)])
    )

    assert count == manifest.rows == 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
