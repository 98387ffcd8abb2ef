"""Lines of files, including overlong ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from tests.batch.driver.jobs import of


def test_text_lines_are_rows(tmp_path: Path) -> None:
    """With `\r\n`, a byte-order mark, and a last line without a newline."""
    rows = of(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\nthr\xc3\xa9e", read={"format": "text"})

    assert [row["_data"] for row in rows] == [{"text": "one"}, {"text": "two"}, {"text": "thrée"}]


def test_a_row_over_the_limit_is_an_error_row(tmp_path: Path) -> None:
    """With its size and beginning; the following rows are read."""
    rows = of(
        tmp_path,
        "a.txt",
        b"x" * 100 + b"\nok\n" + b"y" * 101 + b"\nend",
        read={"format": "text", "row_bytes": 100},
    )

    assert [row["_error"] for row in rows] == [
        "",
        "",
        "the row is larger than 100 bytes: 101; see `row_bytes`",
        "",
    ]
    assert rows[2]["_raw"] == "y" * 101
    assert rows[3]["_data"] == {"text": "end"}


@pytest.mark.parametrize(("name", "codec"), [("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd")])
def test_compressed_files_are_read_as_streams(tmp_path: Path, name: str, codec: str) -> None:
    """With several members too, as in files joined by `cat`."""
    half = b"".join(b'{"n": %d}\n' % number for number in range(3000))
    packed = (
        gzip.compress(half) if codec == "gzip" else pa.compress(half, codec="zstd", asbytes=True)
    )
    rows = of(tmp_path, name, packed + packed)

    assert [row["_data"]["n"] for row in rows] == [*range(3000), *range(3000)]
