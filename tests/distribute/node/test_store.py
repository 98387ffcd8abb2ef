"""A node's chunks, and their validity."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from launcher.distribute.node import place, record
from launcher.distribute.node.files import CopyManifest, ManifestFile, UnsafeName, state_folder
from launcher.distribute.node.main import Claim, FolderBusyError
from launcher.distribute.node.record import DigestRecords
from launcher.distribute.node.store import ChunkStore, FileHandle, discard_parts
from launcher.distribute.node.wire import HAVE, PROVE, WANT

DATA = bytes(range(250)) * 4
SUM = hashlib.sha256(DATA).hexdigest()
CHUNK = 300


def store(root: Path, *, sum_: str = "", source: bool = False, believed: bool = True) -> ChunkStore:
    root.mkdir(exist_ok=True)
    (root / ".vlaunch").mkdir(exist_ok=True)
    chunk_store = ChunkStore(
        str(root),
        CopyManifest([ManifestFile("a", len(DATA), 5, sum_), ManifestFile("none", 0)], CHUNK),
        DigestRecords(str(root), trusted=believed),
    )
    chunk_store.load_state(source=source)
    return chunk_store


def fill(chunk_store: ChunkStore, *numbers: int) -> None:
    """Write chunks as if received."""
    hand = FileHandle(chunk_store)
    for number in numbers:
        _, offset, size = chunk_store.manifest.locate_chunk(number)
        data = DATA[offset : offset + size]
        chunk_store.write_chunk(number, memoryview(data), hashlib.sha256(data).digest(), hand)
    hand.close()


def finish(chunk_store: ChunkStore) -> None:
    place.install_files(chunk_store, {"label": "files"})


def digest(number: int) -> bytes:
    return hashlib.sha256(DATA[CHUNK * number : CHUNK * (number + 1)]).digest()


def test_written_chunks_are_verified_after_an_interruption(tmp_path: Path) -> None:
    """Correct ones count; incomplete or invalid lines are ignored."""
    fill(store(tmp_path), 0, 2)
    with (tmp_path / ".vlaunch" / "journal").open("a") as file:
        file.write("99\nx\n1")
    again = store(tmp_path)

    assert list(again.states) == [PROVE, PROVE, PROVE, WANT]
    hand, buffer = FileHandle(again), memoryview(bytearray(CHUNK))
    assert [again.verify_chunk(number, digest(number), hand, buffer) for number in (0, 1, 2)] == [
        True,
        False,
        True,
    ]
    assert list(again.states) == [HAVE, WANT, HAVE, WANT]
    assert (again.arrived, again.present_bytes) == ([0, 2], 600)


def test_parts_of_another_copy_are_dropped(tmp_path: Path) -> None:
    """They belong to other files."""
    fill(store(tmp_path), 0)
    (tmp_path / ".vlaunch" / "journal").write_text("0" * 64 + "\n0\n")

    assert list(store(tmp_path).states) == [WANT] * 4
    assert not (tmp_path / ".vlaunch" / "parts").exists()


def test_a_complete_copy_is_recorded(tmp_path: Path) -> None:
    """With its record no file has to be read, neither as a source nor if the name is a digest; else
    the source's content counts.
    """
    chunk_store = store(tmp_path, sum_=SUM)
    fill(chunk_store, 0, 1, 2, 3)
    finish(chunk_store)

    assert (tmp_path / "a").read_bytes() == DATA
    assert (tmp_path / "a").stat().st_mtime_ns == 5
    assert (tmp_path / "none").read_bytes() == b""
    assert list(store(tmp_path, sum_=SUM).states) == [HAVE] * 4
    unbelieved = store(tmp_path, sum_=SUM, believed=False)
    assert list(unbelieved.states) == [PROVE] * 4
    records = tmp_path / ".vlaunch" / "records"
    assert sorted(path.name for path in records.iterdir()) == ["files.digests", "files.json"]


def test_a_changed_file_is_not_trusted(tmp_path: Path) -> None:
    """Even with its old size and time."""
    chunk_store = store(tmp_path, sum_=SUM)
    fill(chunk_store, 0, 1, 2, 3)
    finish(chunk_store)
    (tmp_path / "a").write_bytes(DATA[::-1])
    os.utime(tmp_path / "a", ns=(5, 5))

    assert list(store(tmp_path, sum_=SUM).states) == [PROVE] * 4
    assert list(store(tmp_path, sum_=SUM, source=True).states) == [WANT] * 4


def test_a_different_file_is_fetched_completely(tmp_path: Path) -> None:
    """Into a partial file: the old one stays readable until the end."""
    tmp_path.joinpath("a").write_bytes(b"x" + DATA[1:])
    chunk_store = store(tmp_path)
    hand, buffer = FileHandle(chunk_store), memoryview(bytearray(CHUNK))
    assert chunk_store.verify_chunk(1, digest(1), hand, buffer)
    assert not chunk_store.verify_chunk(0, digest(0), hand, buffer)
    assert not chunk_store.verify_chunk(2, digest(2), hand, buffer)

    assert (list(chunk_store.states), chunk_store.present_bytes) == ([WANT] * 4, 0)
    fill(chunk_store, 0, 1, 2, 3)
    assert tmp_path.joinpath("a").read_bytes()[:1] == b"x"
    finish(chunk_store)
    assert tmp_path.joinpath("a").read_bytes() == DATA


def test_unfinished_files_can_be_dropped(tmp_path: Path) -> None:
    """And are counted."""
    fill(store(tmp_path), 0, 1)

    assert place.unfinished_bytes(str(tmp_path)) > 0
    assert discard_parts(str(tmp_path)) > 0
    assert place.unfinished_bytes(str(tmp_path)) == 0


def test_links_and_names_come_last(tmp_path: Path) -> None:
    """As in Hugging Face's cache: relative, and listed under the name of a revision."""
    chunk_store = store(tmp_path)
    fill(chunk_store, 0, 1, 2, 3)
    request = {
        "label": "c",
        "links": [["snapshots/c/sub/x", "a"], ["snapshots/c/y", "a"]],
        "refs": [["refs/main", "c"]],
    }
    for _ in range(2):
        place.install_files(chunk_store, request)

    assert str((tmp_path / "snapshots/c/sub/x").readlink()) == "../../../a"
    assert (tmp_path / "snapshots/c/y").read_bytes() == DATA
    assert (tmp_path / "refs/main").read_text() == "c"


@pytest.mark.parametrize("link", ["parts/0", "parts/1", "parts", "journal", "records"])
def test_no_link_below_the_state_folder_is_followed(tmp_path: Path, link: str) -> None:
    """A user with write access to a model's folder must not redirect bytes to another file."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "m"
    chunk_store = store(root)
    (root / ".vlaunch" / "parts").mkdir()
    path = root / ".vlaunch" / link
    if path.is_dir():
        path.rmdir()
        victim = tmp_path / "folder"
        victim.mkdir()
    path.symlink_to(victim)

    with pytest.raises(UnsafeName, match=f"{link} is "):
        fill(chunk_store, 0, 1, 2, 3)
        finish(chunk_store)
    assert list(victim.iterdir()) == [] if victim.is_dir() else victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["records/files.json.new", "records/files.digests.new"])
def test_no_link_in_the_place_of_a_record_is_followed(tmp_path: Path, name: str) -> None:
    """Nor in place of a revision's name, `refs/main.new`."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    chunk_store = store(tmp_path / "m")
    fill(chunk_store, 0, 1, 2, 3)
    for path in (tmp_path / "m" / ".vlaunch" / name, tmp_path / "m" / "refs" / "main.new"):
        path.parent.mkdir()
        path.symlink_to(victim)
        with pytest.raises(UnsafeName, match="is a link"):
            place.install_files(chunk_store, {"label": "files", "refs": [["refs/main", "c"]]})
        path.unlink()

    assert victim.read_text() == "mine"


def test_a_state_folder_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except of the model's owner, or of the user to which NFS maps root."""
    folder, owner = state_folder(str(tmp_path), "parts"), os.getuid() or 12345
    for path in (tmp_path, tmp_path / ".vlaunch", tmp_path / ".vlaunch" / "parts"):
        os.chown(path, owner, -1)
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    assert state_folder(str(tmp_path), "parts") == folder
    monkeypatch.setattr("launcher.distribute.node.files._allowed_owners", lambda root: {owner + 1})
    with pytest.raises(UnsafeName, match=rf"\.vlaunch belongs to another user \(UID {owner}\)"):
        state_folder(str(tmp_path), "parts")


def test_a_label_outside_is_rejected(tmp_path: Path) -> None:
    """Before any write, and in the record's path."""
    label = "../../../../outside/evil"
    with pytest.raises(UnsafeName, match="leads out"):
        place.check_names({"label": label})
    chunk_store = store(tmp_path / "m")
    with pytest.raises(UnsafeName, match="leads out"):
        record.write_record(chunk_store.root, label, CopyManifest([], CHUNK), b"")


def test_only_one_copy_writes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of the same copy shares the folder; another copy waits, or replaces a dead writer."""
    (tmp_path / ".vlaunch").mkdir()
    first = Claim(str(tmp_path), "copy", "n1")
    with pytest.raises(FolderBusyError) as caught:
        Claim(str(tmp_path), "copy", "n2")
    assert (caught.value.node, caught.value.shared) == ("n1", True)
    monkeypatch.setattr("launcher.distribute.node.main._STALE_AFTER", 2.0)
    monkeypatch.setattr("launcher.distribute.node.main._RENEW_INTERVAL", 0.0)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.05):
            first.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(FolderBusyError) as caught:
        Claim(str(tmp_path), "other", "n3")
    assert not caught.value.shared
    done.set()
    thread.join()
    Claim(str(tmp_path), "other", "n3").release()

    assert list((tmp_path / ".vlaunch").iterdir()) == []
