"""The survey: order of files, counted and split rows, inferred types, and checks by a later run."""

from __future__ import annotations

import gzip
import os
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.batch.driver import survey
from launcher.batch.driver.job_file import Refused
from launcher.batch.driver.manifest import Manifest
from tests.batch.driver.jobs import job, read_all, surveyed


def sound(manifest: Manifest) -> None:
    """Check that splits are contiguous."""
    assert [split.index for split in manifest.splits] == list(range(len(manifest.splits)))
    assert [split.first for split in manifest.splits[:1]] in ([], [0])
    for item, other in pairwise(manifest.splits):
        assert item.last + 1 == other.first
    assert (
        sum(split.rows for split in manifest.splits)
        == manifest.rows
        == sum(file.rows for file in manifest.files)
    )


def test_rows_are_numbered_source_by_source(tmp_path: Path) -> None:
    """In the written order: `limit` takes the first ones."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(f'{{"from": "{name}"}}\n')
    rows = read_all(job(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl"))

    assert [row["_data"]["from"] for row in rows] == ["b.jsonl", "a.jsonl"]


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Recursively, except for hidden files and `_…`; a repeated file counts once."""
    for name in ("b.jsonl", "sub/a.jsonl", ".hidden.jsonl", "_SUCCESS", "sub/.x/y.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f'{{"from": "{name}"}}\n')
    rows = read_all(job(tmp_path, tmp_path / "in", tmp_path / "in" / "b.jsonl"))

    assert [row["_data"]["from"] for row in rows] == ["b.jsonl", "sub/a.jsonl"]


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_files_are_cut_between_rows(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any lengths of rows: all are read once, unchanged."""
    monkeypatch.setattr(survey, "PIECE", 700)
    monkeypatch.setattr(survey, "SPLIT_ROWS", 50)
    monkeypatch.setattr(survey, "SPLIT_BYTES", 5000)
    chance = random.Random(4)
    message = ["x" * chance.choice([1, 5, 300, 6000]) + str(n) for n in range(2000)]
    quote = {
        "text": lambda text: text,
        "jsonl": lambda text: f'{{"text": "{text}"}}',
        "csv": lambda text: f'"{text[:2]}\n{text}"',
    }[form]
    path = tmp_path / f"a.{form}"
    path.write_text(("text\n" if form == "csv" else "") + "\n".join(map(quote, message)))
    spec = job(tmp_path, path, read={"format": form})
    manifest = surveyed(spec)

    sound(manifest)
    assert manifest.rows == 2000
    assert len(manifest.splits) > 100
    assert [row["_data"]["text"].split("\n")[-1] for row in read_all(spec)] == message


def test_many_lines_are_counted(tmp_path: Path) -> None:
    """Two million."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line of text, about as long as some\n" * 2_000_000)
    manifest = surveyed(job(tmp_path, path, read={"format": "text"}))

    assert manifest.rows == 2_000_000
    sound(manifest)


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_empty_files_have_no_rows(tmp_path: Path, form: str) -> None:
    """Nor has a byte-order mark alone, or a header; a job without rows is no mistake."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"")
    (tmp_path / "in" / "b").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "in" / "c.gz").write_bytes(gzip.compress(b""))
    if form == "csv":
        (tmp_path / "in" / "d").write_bytes(b"a,b\r\n")
    spec = job(tmp_path, tmp_path / "in", read={"format": form}, write={"format": "parquet"})

    assert (surveyed(spec).rows, surveyed(spec).splits) == (0, ())
    assert read_all(spec) == []


def test_parquet_row_groups_are_splits(tmp_path: Path) -> None:
    """An empty file has none."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"n": range(25)}), tmp_path / "in" / "a.parquet", row_group_size=10)
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "in" / "b.parquet")
    manifest = surveyed(
        job(
            tmp_path,
            tmp_path / "in",
            read={"format": "parquet"},
            keep=None,
            write={"format": "parquet"},
        )
    )

    assert [(split.file, split.start, split.rows) for split in manifest.splits] == [
        (0, 0, 10),
        (0, 1, 10),
        (0, 2, 5),
    ]
    assert (manifest.columns, manifest.types) == (("n",), {"n": "integer"})
    sound(manifest)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_limit_takes_the_first_rows(tmp_path: Path, name: str) -> None:
    """Over several files; later files are not read."""
    (tmp_path / "in").mkdir()
    data = b'{"n": 1}\n' * 3000
    (tmp_path / "in" / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"n": 2}\n' * 3000)
    (tmp_path / "in" / "c.jsonl").write_bytes(b"\xff\xfe")
    spec = job(tmp_path, tmp_path / "in", read={"limit": 3500})

    sound(surveyed(spec))
    assert sum(row["_data"]["n"] for row in read_all(spec)) == 3000 + 2 * 500


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        (["1", "2"], "integer"),
        (["1", "2.5"], "number"),
        (["true"], "boolean"),
        (['"a"', "null"], "text"),
        (["null"], "any"),
        (["1", '"a"'], "json"),
        (["[1]"], "json"),
        ([str(2**70)], "json"),
        ([], "any"),
    ],
)
def test_types_are_those_of_the_first_rows(tmp_path: Path, values: list[str], type_: str) -> None:
    """A mixture is JSON; an absent column may later have any type."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"c": {value}}}\n' for value in values) + "broken\n")

    assert surveyed(job(tmp_path, path, keep={"c": None}, write={"format": "parquet"})).types == {
        "c": type_
    }


def test_a_later_run_reuses_the_manifest(tmp_path: Path) -> None:
    """The files are listed, not counted again."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' * 9000)
    spec = job(tmp_path, path, keep=None, write={"format": "parquet"})
    messages: list[str] = []

    assert survey.survey_input(spec, messages.append) == survey.survey_input(spec, messages.append)
    assert [text.partition(":")[0] for text in messages] == [
        "listing the input",
        "counting rows",
        "listing the input",
    ]


def test_a_changed_input_is_rejected_with_the_difference(tmp_path: Path) -> None:
    """New, removed, longer or rewritten files."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / name).write_bytes(b'{"n": 1}\n')
    spec = job(tmp_path, tmp_path / "in")
    surveyed(spec)
    (tmp_path / "in" / "a").unlink()
    (tmp_path / "in" / "b").write_bytes(b'{"n": 10}\n')
    os.utime(tmp_path / "in" / "c", ns=(5, 5))
    (tmp_path / "in" / "d").touch()

    with pytest.raises(Refused, match="the input has changed since") as raised:
        surveyed(spec)
    folder = tmp_path / "in"
    assert raised.value.evidence.splitlines() == [
        f"{folder}/a is gone",
        f"{folder}/b changed: 9 bytes then, 10 now",
        f"{folder}/c changed: written again since",
        f"{folder}/d is new",
    ]


def test_shipped_files_may_be_sent_again(tmp_path: Path) -> None:
    """Their digest is part of the job, their time is not."""
    path = tmp_path / "work" / "input" / "0000-a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"n": 1}\n')
    spec = job(tmp_path, path)
    surveyed(spec)
    os.utime(path, ns=(5, 5))

    assert len(read_all(spec)) == 1


def test_a_changed_job_is_rejected_with_the_difference(tmp_path: Path) -> None:
    """It would mix two kinds of answers."""
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n')
    surveyed(job(tmp_path, tmp_path / "a.jsonl"))

    with pytest.raises(Refused, match="differs from the one that was started") as raised:
        surveyed(
            job(
                tmp_path,
                tmp_path / "a.jsonl",
                identity={"model": "huge", "sampling.top_p": 1},
                digest="d2",
            )
        )
    assert raised.value.evidence == 'model: "tiny" → "huge"\nsampling.top_p: nothing → 1'


@pytest.mark.parametrize(
    ("name", "data", "form", "expected"),
    [
        ("a.txt", "héllo\n".encode("utf-16"), "text", "is UTF-16"),
        ("a.parquet", b"PAR1 and so on", "jsonl", "is a Parquet file"),
        ("a.jsonl", b'{"n": 1}\n', "parquet", "cannot be read as parquet"),
        ("a.jsonl.gz", b"not packed", "jsonl", "cannot be read as jsonl"),
        ("a.jsonl.gz", gzip.compress(bytes(range(256)) * 9999)[:-500], "jsonl", "cannot be read"),
        ("a.csv", b"a,a\n1,2\n", "csv", "has no header"),
        ("a.csv", b"\xff,a\n1,2\n", "csv", "has no header"),
    ],
)
def test_a_file_of_another_format_is_rejected(
    tmp_path: Path, name: str, data: bytes, form: str, expected: str
) -> None:
    """Before any row is misread."""
    (tmp_path / name).write_bytes(data)

    with pytest.raises(Refused, match=expected) as raised:
        surveyed(job(tmp_path, tmp_path / name, read={"format": form}))
    assert raised.value.hint
    assert not (tmp_path / "work" / "manifest.json").exists()


@pytest.mark.parametrize(("ending", "command"), [("gz", "gzip -t"), ("zst", "zstd -t")])
def test_a_cut_archive_names_the_last_line(tmp_path: Path, ending: str, command: str) -> None:
    """The file, what could be read of it, and a command that tests it."""
    data = b"".join(b'{"n": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(9000))
    packed = (
        gzip.compress(data) if ending == "gz" else pa.compress(data, codec="zstd", asbytes=True)
    )
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(packed[: len(packed) // 2])

    with pytest.raises(Refused, match=re.escape(f"{path} cannot be read")) as raised:
        surveyed(job(tmp_path, path))
    readable = re.match(r"readable up to line ([\d,]+); then", raised.value.evidence)
    assert readable
    assert 2500 < int(readable[1].replace(",", "")) <= 4500
    assert f"`{command} {path}`" in raised.value.hint


def test_a_missing_source_is_rejected(tmp_path: Path) -> None:
    """A path, a glob without matches, a folder without files."""
    (tmp_path / "empty").mkdir()
    for source in ("none.jsonl", "*.nothing", "empty"):
        with pytest.raises(Refused, match="no such file"):
            surveyed(job(tmp_path, tmp_path / source))


def test_a_damaged_manifest_is_rejected(tmp_path: Path) -> None:
    """Row numbers depend on it."""
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n')
    spec: Any = job(tmp_path, tmp_path / "a.jsonl")
    surveyed(spec)
    (tmp_path / "work" / "manifest.json").write_text("{")

    with pytest.raises(Refused, match="cannot be read"):
        surveyed(spec)
