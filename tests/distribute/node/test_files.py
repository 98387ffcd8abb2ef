"""Files, their names and their chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.distribute.node.files import (
    CopyManifest,
    ManifestFile,
    PublisherDigest,
    UnsafeName,
    safe_name,
    safe_path,
)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 20))
def test_chunks_cover_every_byte_once(sizes: list[int], chunk: int) -> None:
    """In the order of files; empty files have none."""
    manifest = CopyManifest([ManifestFile(f"f{at}", size) for at, size in enumerate(sizes)], chunk)
    covered = dict.fromkeys(range(len(sizes)), 0)
    for number in range(manifest.chunk_count):
        at, offset, size = manifest.locate_chunk(number)
        assert number in manifest.file_chunks(at)
        assert (offset, 0 < size <= chunk) == (covered[at], True)
        covered[at] += size

    assert list(covered.values()) == sizes
    assert manifest.total_bytes == sum(sizes)


def test_the_identity_is_that_of_files_and_chunks() -> None:
    """It survives serialization, and differs for another chunk size."""
    manifest = CopyManifest([ManifestFile("a", 5, 7), ManifestFile("b", 3)], 4)

    assert CopyManifest.from_json(manifest.as_json()).identity == manifest.identity
    assert CopyManifest(manifest.files, 5).identity != manifest.identity


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\0b", ".vlaunch/x", "x" * 256],
)
def test_names_outside_the_folder_are_rejected(name: str) -> None:
    """Alone, and in a list of files."""
    with pytest.raises(UnsafeName):
        safe_name(name)
    with pytest.raises(UnsafeName):
        CopyManifest([ManifestFile(name, 1)], 1)


@pytest.mark.parametrize(
    "files", [[ManifestFile("a", -1)], [ManifestFile("a", 1), ManifestFile("a", 2)]]
)
def test_invalid_lists_of_files_are_rejected(files: list[ManifestFile]) -> None:
    """Negative sizes, and repeated files."""
    with pytest.raises(ValueError, match=r"negative|twice"):
        CopyManifest(files, 1)


def test_parent_links_must_not_lead_out(tmp_path: Path) -> None:
    """A file itself may be a link, because it is replaced, not followed."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "sub").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    (root / "inside").mkdir()

    with pytest.raises(UnsafeName):
        safe_path(str(root), "sub/x")
    assert safe_path(str(root), "file") == str(root / "file")
    assert safe_path(str(root), "inside/x/y") == str(root / "inside/x/y")


def test_the_publishers_digest() -> None:
    """SHA-256 of large files, git's SHA-1 of small ones, none without a digest."""
    data = b"weights"
    for sum_ in (
        hashlib.sha256(data).hexdigest(),
        hashlib.new("sha1", b"blob 7\0" + data).hexdigest(),
        "",
    ):
        right, wrong = (
            PublisherDigest(ManifestFile("a", 7, 0, sum_)),
            PublisherDigest(ManifestFile("a", 7, 0, sum_)),
        )
        right.update(data)
        wrong.update(b"Weights")
        assert not right.mismatch
        assert wrong.mismatch == bool(sum_)
