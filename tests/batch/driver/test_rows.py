"""Rows of all formats, valid and hostile: every one is a row or an error row with a reason, and has
a number.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.batch.driver import rows
from launcher.batch.driver.job_file import Failed
from tests.batch.driver.jobs import all_rows, bitmap, errors, job, of, surveyed

ROOT = Path(__file__).parent.parent.parent.parent


def test_blank_lines_and_bytes_that_are_not_utf8_are_error_rows(tmp_path: Path) -> None:
    """They keep their numbers; the raw row is shown with escapes."""
    results = of(tmp_path, "a.txt", b"a\n\n  \nb\xff\n", read={"format": "text"})

    assert errors(results)[:3] == ["", "the line is empty", "the line is empty"]
    assert errors(results)[3].startswith("not UTF-8: invalid start byte at byte 1")
    assert results[3]["_raw"] == "b\\xff"
    assert {row["_stage"] for row in results[1:]} == {"read"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "not a JSON object but a list"),
        (b'"x"', "not a JSON object but text"),
        (b"null", "not a JSON object but null"),
        (b'{"a": NaN}', "not JSON: NaN is not allowed"),
        (b'{"a": -Infinity}', "not JSON: -Infinity is not allowed"),
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
    """Other rows are read."""
    results = of(tmp_path, "a.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 2}\n')

    assert reason in results[1]["_error"]
    assert [results[0]["_data"], results[2]["_data"]] == [{"a": 0}, {"a": 2}]
    assert len(results[1]["_raw"]) <= 4096


def test_surrogate_pairs_large_integers_and_repeated_keys_are_valid(tmp_path: Path) -> None:
    """The last of a repeated key counts."""
    results = of(
        tmp_path,
        "a.jsonl",
        b'{"a": "\\ud83d\\ude00"}\n{"a": 123456789012345678901234567890}\n{"a": 1, "a": 2}\n',
    )

    assert [row["_data"]["a"] for row in results] == ["😀", 123456789012345678901234567890, 2]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_huge_line_stays_within_the_memory_limit(tmp_path: Path, form: str) -> None:
    """Survey and reader skip it in blocks, and read the rows after it."""
    small, large = tmp_path / "small", tmp_path / "large"
    for path, hole in ((small, 2 << 20), (large, 200 << 20)):
        with path.open("wb") as file:
            file.write(b"text\n" if form == "csv" else b"")
            file.seek(hole, os.SEEK_CUR)  # a hole: no space on the disk
            file.write(b'\n{"a": 1}\n')
    script = (
        "import resource; from tests.batch.driver.jobs import job, read_all; from pathlib import"
        f" Path\nread = {{'format': {form!r}, 'row_bytes': 1 << 20}}\n"
        f"found = lambda name: read_all(job(Path({str(tmp_path)!r}), name, read=read, work=name +"
        " '-work'))\n"
        f"found({str(small)!r})\n"  # the libraries' own memory is allocated before
        "limit = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() +"
        " (120 << 20)\nresource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
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


def test_only_pending_rows_are_read(tmp_path: Path) -> None:
    """Others are skipped, even invalid ones."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(10)))
    spec = job(tmp_path, tmp_path / "a.jsonl")
    manifest = surveyed(spec)
    results = rows.read_split(spec, manifest, manifest.splits[0], bitmap(1, 2, 7, first=0))

    assert [(row["_row"], pickle.loads(row["_data"])["n"]) for row in results] == [
        (1, 1),
        (2, 2),
        (7, 7),
    ]


@pytest.mark.parametrize("change", ["shorter", "gone", "same size"])
def test_a_file_that_changes_after_the_survey_is_not_read(tmp_path: Path, change: str) -> None:
    """Its rows would have other numbers."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    spec = job(tmp_path, path)
    manifest = surveyed(spec)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(b'{"n": 1}\n' if change == "shorter" else b'{"n": 3}\n{"n": 4}\n')
        os.utime(path, ns=(1, 1))

    with pytest.raises(
        Failed, match="is gone" if change == "gone" else "has changed since"
    ) as raised:
        list(rows.read_split(spec, manifest, manifest.splits[0], bitmap(0, 1, first=0)))
    assert raised.value.hint
    assert pickle.loads(pickle.dumps(raised.value)).message == raised.value.message


def test_memory_of_reading_stays_small(tmp_path: Path) -> None:
    """100 MB of rows, read in blocks, take far less."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for _ in range(100):
            file.write((b"x" * 999 + b"\n") * 1000)
    spec = job(tmp_path, path, read={"format": "text"})
    manifest = surveyed(spec)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(
        1
        for split in manifest.splits
        for _ in rows.read_split(spec, manifest, split, all_rows(split))
    )

    assert count == manifest.rows == 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
