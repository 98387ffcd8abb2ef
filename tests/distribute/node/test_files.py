"""Files, their names and their chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.distribute.node.files import File, Manifest, Sum, Unsafe, below, safe


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 20))
def test_chunks_cover_every_byte_once(sizes: list[int], chunk: int) -> None:
    """In the order of the files; files without bytes have none."""
    manifest = Manifest([File(f"f{at}", size) for at, size in enumerate(sizes)], chunk)
    covered = dict.fromkeys(range(len(sizes)), 0)
    for number in range(manifest.chunks):
        at, offset, size = manifest.place(number)
        assert number in manifest.chunks_of(at)
        assert (offset, 0 < size <= chunk) == (covered[at], True)
        covered[at] += size

    assert list(covered.values()) == sizes
    assert manifest.bytes == sum(sizes)


def test_the_identity_is_that_of_files_and_chunks() -> None:
    """What is written down and read again is the same; another size of chunks is another copy."""
    manifest = Manifest([File("a", 5, 7), File("b", 3)], 4)

    assert Manifest.read(manifest.as_json()).identity == manifest.identity
    assert Manifest(manifest.files, 5).identity != manifest.identity


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\0b", ".vlaunch/x", "x" * 256],
)
def test_names_that_lead_out_are_refused(name: str) -> None:
    """Alone, and in a list of files."""
    with pytest.raises(Unsafe):
        safe(name)
    with pytest.raises(Unsafe):
        Manifest([File(name, 1)], 1)


@pytest.mark.parametrize("files", [[File("a", -1)], [File("a", 1), File("a", 2)]])
def test_what_is_no_list_of_files_is_refused(files: list[File]) -> None:
    """Negative sizes, and a file that is named twice."""
    with pytest.raises(ValueError, match=r"negative|twice"):
        Manifest(files, 1)


def test_links_on_the_way_must_not_lead_out(tmp_path: Path) -> None:
    """A file itself may be a link, for it is replaced, not followed."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "sub").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    (root / "inside").mkdir()

    with pytest.raises(Unsafe):
        below(str(root), "sub/x")
    assert below(str(root), "file") == str(root / "file")
    assert below(str(root), "inside/x/y") == str(root / "inside/x/y")


def test_the_publishers_digest() -> None:
    """SHA-256 of large files, git's SHA-1 of small ones; nothing where nobody says."""
    data = b"weights"
    for sum_ in (
        hashlib.sha256(data).hexdigest(),
        hashlib.new("sha1", b"blob 7\0" + data).hexdigest(),
        "",
    ):
        right, wrong = Sum(File("a", 7, 0, sum_)), Sum(File("a", 7, 0, sum_))
        right.add(data)
        wrong.add(b"Weights")
        assert not right.wrong
        assert wrong.wrong == bool(sum_)
