"""Shipped files and their contents."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path

import pytest

from launcher.batch import inputs, job_paths
from launcher.batch.job_paths import PathBounds, PathError
from launcher.core.errors import RequestError
from tests.batch.conftest import Load, Mistakes


def _labels(folder: Path, text: str) -> list[str]:
    within = PathBounds(folder=folder, inside=(folder,))
    return [file.label for file in inputs.list_files(job_paths.parse_source(text, within), within)]


def _path_error(folder: Path, text: str) -> str:
    with pytest.raises(PathError) as caught:
        _labels(folder, text)
    return str(caught.value)


def test_files_folders_and_patterns_in_the_order_of_their_names(folder: Path) -> None:
    """Hidden files and those of other tools are omitted, at any depth."""
    (folder / "data" / "a").mkdir()
    (folder / "data" / "a" / "z.jsonl").write_text("{}\n")
    (folder / "data" / "_old").mkdir()
    (folder / "data" / "_old" / "x.jsonl").write_text("{}\n")

    assert _labels(folder, "data/more.jsonl") == ["more.jsonl"]
    assert _labels(folder, "data") == ["a/z.jsonl", "chat.jsonl", "more.jsonl"]
    assert _labels(folder, "data/*.jsonl") == ["chat.jsonl", "more.jsonl"]
    assert _labels(folder, "data/*") == ["a/z.jsonl", "chat.jsonl", "more.jsonl"]
    assert _labels(folder, "data/**/*.jsonl") == ["a/z.jsonl", "chat.jsonl", "more.jsonl"]
    assert _labels(folder, "*/[cm]*.jsonl") == ["data/chat.jsonl", "data/more.jsonl"]
    assert _labels(folder, "data/.hidden.jsonl") == [".hidden.jsonl"]


def test_a_dataset_of_the_hub_is_its_data(
    load_text: Load, mistakes: Mistakes, folder: Path
) -> None:
    """Its Parquet files at any depth, also where the Hub's cache links to them."""
    (folder / "set" / "data").mkdir(parents=True)
    (folder / "blobs").mkdir()
    for name in ("README.md", ".gitattributes", "dataset_infos.json", "LICENSE", "data/notes.md"):
        (folder / "set" / name).write_text("x")
    for index in range(2):
        blob = folder / "blobs" / f"{index}f00d"
        blob.write_bytes(b"%d" % index)
        (folder / "set" / "data" / f"train-0000{index}-of-00002.parquet").symlink_to(blob)

    job = load_text(read="read: set")
    assert job.read.format == "parquet"
    assert [(file.label, file.to) for file in inputs.read_shipped(job)] == [
        (
            f"data/train-0000{index}-of-00002.parquet",
            f"input/000{index}-train-0000{index}-of-00002.parquet",
        )
        for index in range(2)
    ]
    assert _labels(folder, "set/README.md") == ["README.md"]
    (folder / "set" / "data" / "test.jsonl").write_text("{}")
    assert mistakes(read="read: set") == [
        '2: read: should all have one format: "test.jsonl" is jsonl,'
        ' "train-00000-of-00002.parquet" is parquet'
    ]


def test_an_existing_name_with_brackets_is_no_pattern(folder: Path) -> None:
    """As a file or as a folder."""
    (folder / "a[1]").mkdir()
    (folder / "a[1]" / "x[2].jsonl").write_text("{}\n")

    assert _labels(folder, "a[1]/x[2].jsonl") == ["x[2].jsonl"]
    assert _labels(folder, "a[1]/*.jsonl") == ["x[2].jsonl"]
    assert (
        _path_error(folder, "a[1]/none.jsonl")
        == f"no such file: '{folder / 'a[1]' / 'none.jsonl'}'"
    )


def test_no_match_is_reported_with_the_path(folder: Path) -> None:
    """To show the typing mistake."""
    (folder / "empty").mkdir()

    assert (
        _path_error(folder, "a*/../x.csv")
        == 'should be a pattern without `..` behind it, not "a*/../x.csv"'
    )
    assert _path_error(folder, "**/a/**/x.csv") == 'should have `**` once, not "**/a/**/x.csv"'
    assert (
        _path_error(folder, "data/none.jsonl") == f"no such file: {folder / 'data' / 'none.jsonl'}"
    )
    assert (
        _path_error(folder, "data/*.csv")
        == f'no such file: nothing matches "data/*.csv" in {folder / "data"}'
    )
    assert _path_error(folder, "none/*.csv") == f"no such file: {folder / 'none'}"
    assert (
        _path_error(folder, "empty")
        == f'no such file: nothing matches "empty" in {folder / "empty"}'
    )


def test_special_files_are_rejected(folder: Path) -> None:
    """A pipe would block, a device never ends, and a link to a folder may be a loop."""
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to(folder / "nothing")
    (folder / "tree").mkdir()
    (folder / "tree" / "loop").symlink_to(folder)

    assert _path_error(folder, "pipe") == '"pipe" is not a regular file'
    assert _path_error(folder, "broken") == f"no such file: {folder / 'nothing'}"
    assert (
        _path_error(folder, "tree/*")
        == f"{folder / 'tree' / 'loop'} is a link to a folder; name that folder itself"
    )
    assert (
        _path_error(folder, "tree")
        == f"{folder / 'tree' / 'loop'} is a link to a folder; name that folder itself"
    )
    assert "outside the job's folder" in _path_error(folder, "/dev/zero")


def test_too_many_files_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all are read."""
    monkeypatch.setattr(inputs, "MAX_FILES", 1)

    assert _path_error(folder, "data") == '"data" names more than 1 files'


def test_a_file_is_read_once(mistakes: Mistakes, folder: Path) -> None:
    """For any of its names, so that rows have one answer."""
    (folder / "data" / "again.jsonl").symlink_to(folder / "data" / "chat.jsonl")

    assert mistakes(read="read: data") == [
        '2: read: "chat.jsonl" is read twice, by data and data: each row has one answer'
    ]
    assert mistakes(read="read: [data/chat.jsonl, data/again.jsonl]") == [
        '2: read: "chat.jsonl" is read twice, by data/chat.jsonl and data/again.jsonl: each row has'
        " one answer"
    ]


def test_every_file_is_shipped_with_its_size_and_hash(load_text: Load, folder: Path) -> None:
    """Rows first, in order, under safe names; then code under its own."""
    (folder / "odd").mkdir()
    (folder / "odd" / "chat.jsonl").write_text("x" * 5_000_000)
    (folder / "odd" / "a b;c.jsonl").write_text("")
    job = load_text(
        "predict: mine.py:Mine", read="read: [data/more.jsonl, odd, data/chat.jsonl]", model=None
    )

    messages: list[int] = []
    shipped = inputs.read_shipped(job, messages.append)

    assert [(file.to, file.label, file.source) for file in shipped] == [
        ("input/0000-more.jsonl", "more.jsonl", 0),
        ("input/0001-a_b_c.jsonl", "a b;c.jsonl", 1),
        ("input/0002-chat.jsonl", "chat.jsonl", 1),
        ("input/0003-chat.jsonl", "chat.jsonl (2)", 2),
        ("code/mine.py", "mine.py", None),
    ]
    for file in shipped:
        content = file.path.read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert sum(messages) == sum(file.bytes for file in shipped)
    assert len(messages) > len(shipped) - 1


def test_a_vanished_file_is_reported(load_text: Load, folder: Path) -> None:
    """Between check and transfer."""
    job = load_text()
    (folder / "data" / "chat.jsonl").unlink()

    with pytest.raises(RequestError) as caught:
        inputs.read_shipped(job)
    assert str(caught.value) == "cannot read the input of `test`"
    assert f"no such file: {folder / 'data' / 'chat.jsonl'}" in caught.value.evidence


def test_a_link_created_after_the_check_is_not_followed(load_text: Load, folder: Path) -> None:
    """Paths are checked again when a file is read."""
    job = load_text()
    outside = folder.parent / "secret"
    outside.write_text("secret")
    (folder / "data" / "chat.jsonl").unlink()
    (folder / "data" / "chat.jsonl").symlink_to(outside)

    with pytest.raises(RequestError) as caught:
        inputs.read_shipped(job)
    assert "outside the job's folder" in caught.value.evidence


def test_large_code_is_rejected(
    load_text: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By total size."""
    monkeypatch.setattr(inputs, "MAX_CODE_BYTES", 2**20)
    (folder / "a.bin").write_bytes(bytes(600_000))
    (folder / "b.bin").write_bytes(bytes(600_000))
    job = load_text("predict: {class: 'mine.py:Mine', files: [a.bin, b.bin]}", model=None)

    with pytest.raises(RequestError) as caught:
        inputs.read_shipped(job)
    assert str(caught.value) == "the code of the job is larger than 1 MiB"


def test_line_ends_stay_unchanged(load_text: Load, folder: Path) -> None:
    """Readers handle them."""
    content = textwrap.dedent("""{"text": "a"}\r\n{"text": "b"}\r\n""").encode()
    (folder / "data" / "chat.jsonl").write_bytes(content)

    (first,) = inputs.read_shipped(load_text())
    assert first.sha256 == hashlib.sha256(content).hexdigest()


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
def test_a_suffix_shows_the_format(name: str, format: str | None) -> None:
    """Compressed or not; .json is ambiguous and shows none."""
    assert inputs.format_of(name) == format


def test_all_input_has_the_same_format(mistakes: Mistakes, load_text: Load) -> None:
    """Two different files are named."""
    assert mistakes(read="read: [data, prompts.txt]") == [
        '2: read: should all have one format: "chat.jsonl" is jsonl, "prompts.txt" is text'
    ]
    assert load_text(read="read: {paths: [data, prompts.txt], format: text}").read.format == "text"


def test_an_unknown_format_is_required(mistakes: Mistakes, load_text: Load) -> None:
    """For folders elsewhere, with unknown files."""
    assert mistakes(read="read: nodes:/data/in") == [
        '2: read: the ending of "in" shows no format; write `format`: text, jsonl, csv or parquet'
    ]
    assert load_text(read="read: nodes:/data/in/*.csv").read.format == "csv"
