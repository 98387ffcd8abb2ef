"""Effect of a copy on the page cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.distribute.node import source
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.distribute.node.record import DigestRecords
from launcher.distribute.node.source import PageCache
from launcher.distribute.node.store import ChunkStore
from tests.chains import in_memory, on_a_disk

CHUNK = 64 * 1024
CHUNKS = 64


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder on a disk if possible: `tmp_path` may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def store(folder: Path) -> ChunkStore:
    """Return two files in the page cache: a large one, and one of less than a chunk."""
    for name, size in (("large", CHUNK * CHUNKS), ("small", 5000)):
        (folder / name).write_bytes(os.urandom(size))
    if not on_a_disk(folder / "large"):
        pytest.skip("the test folder is on a file system in memory")
    (folder / "large").read_bytes()
    manifest = CopyManifest(
        [ManifestFile("large", CHUNK * CHUNKS), ManifestFile("small", 5000)], CHUNK
    )
    return ChunkStore(str(folder), manifest, DigestRecords(str(folder)))


def test_recent_chunks_stay_in_memory(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next node may be fetching them; earlier chunks are dropped once."""
    monkeypatch.setattr(source, "READ_AHEAD", 20 * CHUNK)
    behind, path = PageCache(store), Path(store.root) / "large"
    for number in range(CHUNKS // 2):
        store.add_chunk(number, bytes(32))
    behind.forget_old()
    first = in_memory(path)
    behind.forget_old()

    assert first == in_memory(path) == (CHUNKS - (CHUNKS // 2 - 20)) * CHUNK


def test_at_the_end_all_is_dropped(store: ChunkStore) -> None:
    """Including unwritten data; small files are not worth it."""
    path = Path(store.root) / "large"
    path.write_bytes(os.urandom(CHUNK * CHUNKS))
    assert in_memory(path) == CHUNK * CHUNKS
    PageCache(store).forget_all()

    assert in_memory(path) == 0
    assert in_memory(Path(store.root) / "small") > 0
