"""Paths, addresses and globs; atomic writes; redacted addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from launcher.batch.driver import storage
from launcher.batch.driver.job_file import Refused


@pytest.fixture(params=["local", "far"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local folder, and the same through another filesystem of pyarrow."""
    for name in (
        "a.jsonl",
        "b.txt",
        "sub/c.jsonl",
        "sub/deep/d.jsonl",
        "odd [1].jsonl",
        "e%20f.jsonl",
        ".hidden",
        "_temporary/x.jsonl",
        "sub/README.md",
        "sub/deep/dataset_info.json",
    ):
        (tmp_path / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / name).write_text("x")
    far = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(storage, "connect_filesystem", lambda _: (far, "bucket"))
    return str(tmp_path / "bucket") if request.param == "local" else "s3://bucket"


@pytest.mark.parametrize(
    ("pattern", "result"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("*.jsonl", ["a.jsonl", "e%20f.jsonl", "odd [1].jsonl"]),
        ("sub", ["sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("sub/*.jsonl", ["sub/c.jsonl"]),
        ("sub/*.md", ["sub/README.md"]),
        (
            "**/*.jsonl",
            ["a.jsonl", "e%20f.jsonl", "odd [1].jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"],
        ),
        ("s*b/**/d.jsonl", ["sub/deep/d.jsonl"]),
        ("[!a].txt", ["b.txt"]),
        ("odd [1].jsonl", ["odd [1].jsonl"]),
        ("e%20f.jsonl", ["e%20f.jsonl"]),
    ],
)
def test_sources_name_files(root: str, pattern: str, result: list[str]) -> None:
    """Every path can be opened again."""
    listed = storage.list_files(f"{root}/{pattern}")

    assert [file.path.removeprefix(root + "/") for file in listed] == result
    assert all(storage.open_location(file.path).read() == b"x" for file in listed)
    assert all(storage.open_location(file.path).stat() == file for file in listed)


def test_an_address_keeps_its_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its region or endpoint is needed for every file."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").touch()
    far = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    requests = []
    monkeypatch.setattr(
        storage, "connect_filesystem", lambda address: (requests.append(address), (far, "b"))[1]
    )

    assert [file.path for file in storage.list_files("s3://b/*.txt?region=x")] == [
        "s3://b/x.txt?region=x"
    ]
    assert storage.open_location("s3://b/y?region=x").child("z").address == "s3://b/y/z?region=x"
    assert set(requests) == {"s3://b?region=x"}


def test_files_are_written_atomically_and_deleted(root: str) -> None:
    """An older one is replaced; deleting a missing one is no error."""
    place = storage.open_location(f"{root}/new")
    place.make_folder()
    file = place.child("a.json")
    file.write_atomic(b"one")
    file.write_atomic(b"two")
    assert (file.read(), place.names(), place.sizes()) == (b"two", ["a.json"], {"a.json": 3})
    file.delete()
    file.delete()

    assert (file.exists(), file.stat(), place.names(), place.child("none").names()) == (
        False,
        None,
        [],
        [],
    )


def test_an_unknown_scheme_is_rejected() -> None:
    """With the library's message."""
    with pytest.raises(Refused, match="foo://b/c cannot be opened") as raised:
        storage.open_location("foo://b/c")
    assert "foo" in raised.value.evidence


def test_a_secret_in_an_address_is_not_shown() -> None:
    """An address may contain a key."""
    assert storage.mask_secrets("s3://key:secret@bucket/a") == "s3://bucket/a"
    with pytest.raises(Refused) as raised:
        storage.open_location("foo://key:secret@b/c")
    assert "secret" not in f"{raised.value} {raised.value.evidence}"


def test_requests_to_s3_outlast_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address's other options stay."""
    attempts = []
    strategy = pyarrow.fs.AwsStandardS3RetryStrategy

    def record(max_attempts: int) -> Any:
        attempts.append(max_attempts)
        return strategy(max_attempts=max_attempts)

    monkeypatch.setattr(pyarrow.fs, "AwsStandardS3RetryStrategy", record)
    address = "s3://key:secret@bucket/?region=here&scheme=http&endpoint_override=127.0.0.1:1"
    plain, _ = pyarrow.fs.FileSystem.from_uri(address)
    patient, path = storage.connect_filesystem(address)

    assert (attempts, path) == ([storage.S3_ATTEMPTS], "bucket")
    expected = {**plain.__reduce__()[1][0], **storage.S3_OPTIONS}
    assert patient.__reduce__()[1][0] == expected
    assert (expected["access_key"], expected["secret_key"]) == ("key", "secret")
