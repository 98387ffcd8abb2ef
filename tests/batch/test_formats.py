"""The format of input, from the endings of names."""

from __future__ import annotations

import pytest

from launcher.batch import formats
from tests.batch.conftest import Load, Mistakes


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.txt", "text"),
        ("a.jsonl", "jsonl"),
        ("A.NDJSON", "jsonl"),
        ("a.csv.gz", "csv"),
        ("a.b.jsonl.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("s3://b/x/*.parquet?region=x", "parquet"),
        ("/data/*.txt", "text"),
        ("a.parquet.gz", None),
        ("a.json", None),
        ("a.gz", None),
        ("folder", None),
    ],
)
def test_an_ending_shows_the_format(name: str, format: str | None) -> None:
    """Packed or not; a JSON file may be one value or many, so its ending shows nothing."""
    assert formats.of(name) == format


def test_all_input_has_one_format(mistakes: Mistakes, load_text: Load) -> None:
    """Which two differ is told."""
    assert mistakes(read="read: [data, prompts.txt]") == [
        '2: read: should all have one format: "chat.jsonl" is jsonl, "prompts.txt" is text'
    ]
    assert load_text(read="read: {paths: [data, prompts.txt], format: text}").read.format == "text"


def test_a_format_that_does_not_show_is_asked_for(mistakes: Mistakes, load_text: Load) -> None:
    """Of folders elsewhere, whose files are not seen from here."""
    assert mistakes(read="read: nodes:/data/in") == [
        '2: read: the ending of "in" shows no format; write `format`: text, jsonl, csv or parquet'
    ]
    assert load_text(read="read: nodes:/data/in/*.csv").read.format == "csv"
