"""Records of CSV files: cells, quotes and broken ones."""

from __future__ import annotations

from pathlib import Path

from tests.batch.driver.jobs import errors, of


def test_csv_cells_have_the_names_of_the_header(tmp_path: Path) -> None:
    """Quoted newlines and delimiters belong to their cell; .tsv files have tabs."""
    rows = of(
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

    assert [row["_data"] for row in rows] == [
        {"id": "1", "text": 'a "b",\r\nc'},
        {"id": "2", "text": "é"},
    ]
    assert tabs[0]["_data"] == {"id": "1", "text": "a,b"}
    assert semicolons[0]["_data"] == {"id": "1", "text": "a"}


def test_broken_csv_records_are_error_rows(tmp_path: Path) -> None:
    """Too few or too many cells, blank lines, wrong quotes or bytes; later records are read."""
    data = b'a,b\n1\n1,2,3\n\n"x"y,2\n\xff,2\n5,6\n7,"never\nclosed\n'
    rows = of(tmp_path, "a.csv", data, read={"format": "csv"})

    text = errors(rows)
    assert text[:3] == [
        "1 cells where the header has 2",
        "3 cells where the header has 2",
        "the line is empty",
    ]
    assert text[3].startswith("not CSV: ")
    assert text[4].startswith("not UTF-8: ")
    assert rows[5]["_data"] == {"a": "5", "b": "6"}
    assert text[6] == "not CSV: a quote that starts in this row is never closed"
    assert len(rows) == 7


def test_a_csv_record_over_the_limit_ends_with_its_quote(tmp_path: Path) -> None:
    """Its lines are not rows."""
    data = b'a,b\n1,"' + b"line, of\n" * 50 + b'"\n2,ok\n'
    rows = of(tmp_path, "a.csv", data, read={"format": "csv", "row_bytes": 100})

    assert "larger than 100 bytes" in rows[0]["_error"]
    assert rows[1]["_data"] == {"a": "2", "b": "ok"}
    assert len(rows) == 2
