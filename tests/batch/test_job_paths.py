"""Resolution of paths within the user's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.batch import job_paths
from launcher.batch.job_paths import PathBounds, PathError
from tests.batch.conftest import Load, Mistakes


def _path_error(path: Path) -> str:
    with pytest.raises(PathError) as caught:
        job_paths.parse_source(str(path), PathBounds(folder=path.parent, inside=(path.parent,)))
    return str(caught.value)


def test_a_path_may_not_leave_the_jobs_folder(mistakes: Mistakes, folder: Path) -> None:
    """Neither by `..` nor absolute, for input, code and output."""
    outside = folder.parent / "secret.jsonl"
    outside.write_text("{}\n")

    assert mistakes(read="read: ../secret.jsonl") == [
        f'2: read: "../secret.jsonl" leads to {outside}, outside the job\'s folder; if you trust'
        f" this job, add `--allow {folder.parent}`"
    ]
    assert "outside the job's folder" in mistakes(read=f"read: {outside}")[0]
    assert "outside the job's folder" in mistakes(read="read: '../*.jsonl'")[0]
    assert "outside the job's folder" in mistakes(write="write: ../out")[0]
    assert "outside the job's folder" in mistakes("predict: ../mine.py:Mine", model=None)[0]
    assert (
        "outside the job's folder"
        in mistakes("predict: {class: 'mine.py:Mine', files: [/etc/hostname]}", model=None)[0]
    )


def test_a_home_path_is_expanded(
    mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is outside the job's folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    (line,) = mistakes(read="read: ~/.ssh/id_ed25519")
    assert f"leads to {tmp_path / 'home' / '.ssh' / 'id_ed25519'}, outside the job's folder" in line


@pytest.mark.parametrize("read", ["data/link.jsonl", "data", "data/*.jsonl", "linked/secret.jsonl"])
def test_a_link_may_not_lead_out_either(mistakes: Mistakes, folder: Path, read: str) -> None:
    """As a file, below a folder, in a pattern's match, or as a parent folder."""
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    (outside / "secret.jsonl").write_text("{}\n")
    (folder / "data" / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (folder / "linked").symlink_to(outside)

    (line,) = mistakes(read=f"read: '{read}'")
    assert f"leads to {outside / 'secret.jsonl'}, outside the job's folder" in line


def test_allowed_folders_are_accepted(load_text: Load, folder: Path) -> None:
    """For input, code and output alike."""
    other = folder.parent / "other"
    other.mkdir()
    (other / "a.jsonl").write_text("{}\n")
    (other / "their.py").write_text("class Their: ...\n")

    job = load_text(
        "predict: ../other/their.py:Their",
        read="read: ../other/a.jsonl",
        write="write: ../other/out",
        model=None,
        allow=(other,),
    )

    assert job.sources[0].text == str(other / "a.jsonl")
    assert (job.to.text, job.inside) == (str(other / "out"), (folder, other))
    assert job.predict is not None
    assert job.code == {"their.py": other / "their.py"}


def test_a_loop_of_links_is_reported(folder: Path) -> None:
    """Without following it forever."""
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")

    source = None
    try:
        source = job_paths.parse_source("a", PathBounds(folder=folder, inside=(folder,)))
    except PathError as error:
        assert "cannot be followed" in str(error)
        assert "loop of symbolic links" in str(error)
    if source is not None:  # Python 3.13 resolves a loop to itself, which is no file
        assert source.text.startswith(str(folder))


def test_control_characters_are_escaped_on_a_single_line(folder: Path) -> None:
    """File names may contain anything."""
    (folder / "evil").symlink_to("/tmp/a\nhint: run `rm -rf`")

    text = _path_error(folder / "evil")
    assert len(text.splitlines()) == 1
    assert r"\n" in text


@pytest.mark.parametrize(
    ("text", "where", "path"),
    [
        ("nodes:/data/in", "nodes", "/data/in"),
        ("nodes:/data/in/", "nodes", "/data/in"),
        ("nodes:/data/*.jsonl", "nodes", "/data/*.jsonl"),
        ("s3://bucket/a b/*.parquet", "remote", "s3://bucket/a b/*.parquet"),
        ("s3://bucket/a?region=eu-west-1", "remote", "s3://bucket/a?region=eu-west-1"),
        ("gs://anonymous@bucket/a", "remote", "gs://anonymous@bucket/a"),
        ("hdfs://name:8020/a", "remote", "hdfs://name:8020/a"),
        (
            "hdfs:///a@b",
            "?",
            'should be an address without `..`, such as s3://bucket/folder, not "hdfs:///a@b"',
        ),
        ("nodes:data", "?", 'should be an absolute path without `..` after `nodes:`, not "data"'),
        (
            "nodes:/a/../b",
            "?",
            'should be an absolute path without `..` after `nodes:`, not "/a/../b"',
        ),
        ("nodes://b", "?", 'should be an absolute path without `..` after `nodes:`, not "//b"'),
        (
            "s3://",
            "?",
            'should be an address without `..`, such as s3://bucket/folder, not "s3://"',
        ),
        (
            "s3://b/../c",
            "?",
            'should be an address without `..`, such as s3://bucket/folder, not "s3://b/../c"',
        ),
        (
            "s3://key:secret@b/c",
            "?",
            "should not hold a key; give it to the containers with `secrets` in the inventory",
        ),
        (
            "s3://b/c?secret_key=x",
            "?",
            "should not hold a key; give it to the containers with `secrets` in the inventory",
        ),
        ("https://a/b", "?", "should start with s3://, gs:// or hdfs://, not with https://"),
        (
            "file:///etc/passwd",
            "?",
            "should be the path itself for this machine, or nodes:/path for the nodes",
        ),
    ],
)
def test_valid_addresses(folder: Path, text: str, where: str, path: str) -> None:
    """Without keys, and without `..`."""
    try:
        source = job_paths.parse_source(text, PathBounds(folder=folder, inside=(folder,)))
    except PathError as error:
        assert ("?", path) == (where, str(error))
    else:
        assert (source.where, source.text, source.shown) == (where, path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "out.parquet",
            'should be a folder, since answers are written as several files, not "out.parquet"',
        ),
        (
            "s3://b/out.jsonl",
            'should be a folder, since answers are written as several files, not "s3://b/out.jsonl"',
        ),
        ("nodes:/a/*", 'should be a folder, not the pattern "nodes:/a/*"'),
        ("prompts.txt", 'should be a folder; "prompts.txt" is a file'),
        (
            ".",
            (
                "should be a folder of its own, such as out/, not the folder that relative paths"
                " start at"
            ),
        ),
    ],
)
def test_output_goes_into_its_own_folder(folder: Path, text: str, expected: str) -> None:
    """Never over a file."""
    with pytest.raises(PathError) as caught:
        job_paths.parse_target(text, PathBounds(folder=folder))

    assert str(caught.value) == expected


def test_flags_may_name_any_path(folder: Path) -> None:
    """The user has typed them."""
    source = job_paths.parse_source("/etc/hostname", PathBounds(folder=folder))

    assert (source.where, source.text) == ("control", str(Path("/etc/hostname").resolve()))
