"""What a copy leaves in the page cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.distribute.node import source
from launcher.distribute.node.files import File, Manifest
from launcher.distribute.node.record import Known
from launcher.distribute.node.source import Cache
from launcher.distribute.node.store import Store
from tests.chains import in_memory, on_a_disk

CHUNK = 64 * 1024
CHUNKS = 64


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a disk, where there is one: what tests are given may lie in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def store(folder: Path) -> Store:
    """Two files, a large one and one of less than a chunk, both in memory."""
    for name, size in (("large", CHUNK * CHUNKS), ("small", 5000)):
        (folder / name).write_bytes(os.urandom(size))
    if not on_a_disk(folder / "large"):
        pytest.skip("the files here lie in memory alone")
    (folder / "large").read_bytes()
    manifest = Manifest([File("large", CHUNK * CHUNKS), File("small", 5000)], CHUNK)
    return Store(str(folder), manifest, Known(str(folder)))


def test_what_arrived_last_stays_while_the_copy_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next node is fetching it; what came before is forgotten, though nobody says so twice."""
    monkeypatch.setattr(source, "AHEAD", 20 * CHUNK)
    behind, path = Cache(store), Path(store.root) / "large"
    for number in range(CHUNKS // 2):
        store.have(number, bytes(32))
    behind.look()
    first = in_memory(path)
    behind.look()

    assert first == in_memory(path) == (CHUNKS - (CHUNKS // 2 - 20)) * CHUNK


def test_at_the_end_all_is_forgotten(store: Store) -> None:
    """Also what was not on the disk yet; small files are not worth it."""
    path = Path(store.root) / "large"
    path.write_bytes(os.urandom(CHUNK * CHUNKS))
    assert in_memory(path) == CHUNK * CHUNKS
    Cache(store).forget()

    assert in_memory(path) == 0
    assert in_memory(Path(store.root) / "small") > 0
