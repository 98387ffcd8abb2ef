"""Export of an image into files, and import of copied files, with a fake Docker."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launcher.distribute.node import images
from launcher.distribute.node.files import CopyManifest, ManifestFile, UnsafeName
from launcher.distribute.node.record import DigestRecords
from launcher.distribute.node.store import ChunkStore, FileHandle
from tests.image_tars import LAYERS, classic, modern, sha, tar_of


@pytest.fixture
def request_(tmp_path: Path) -> dict[str, Any]:
    saved = tmp_path / "saved"
    saved.write_bytes(modern())
    top = tmp_path / "scratch" / "vlaunch-0"
    return {
        "of": "1",
        "save": ["cat", str(saved)],
        "top": str(top),
        "root": str(top / "c" / "n" / "i"),
        "need": 1,
    }


def test_an_image_becomes_files(request_: dict[str, Any]) -> None:
    """Blobs are verified by name when they are copied; only the SSH user may read them."""
    exported = images.export_image(request_)

    root = Path(request_["root"])
    blobs = [f"blobs/sha256/{sha(layer)}" for layer in LAYERS]
    assert exported["layers"] == blobs
    rows = {row[0]: row[1:] for row in exported["files"]}
    assert rows[blobs[1]] == [len(LAYERS[1]), 0, sha(LAYERS[1])]
    assert (root / blobs[1]).read_bytes() == LAYERS[1]
    assert rows["manifest.json"][2] == ""
    assert oct(Path(request_["top"]).stat().st_mode)[-3:] == "700"


def test_equal_layers_of_old_dockers(request_: dict[str, Any], tmp_path: Path) -> None:
    """Old versions of Docker use links: every layer becomes a file."""
    (tmp_path / "saved").write_bytes(classic())
    exported = images.export_image(request_)

    root = Path(request_["root"])
    assert exported["layers"] == [f"id{at}/layer.tar" for at in range(4)]
    assert [(root / name).read_bytes() for name in exported["layers"]] == list(LAYERS)
    assert not (root / "id2" / "layer.tar").is_symlink()


def test_an_image_is_saved_once(request_: dict[str, Any], tmp_path: Path) -> None:
    """Unless it has changed, or a file is missing."""
    exported = images.export_image(request_)
    root = Path(request_["root"])
    (tmp_path / "saved").unlink()

    assert images.export_image(request_) == exported
    with pytest.raises(images.DockerCommandError, match=r"`docker save` failed: .*No such file"):
        images.export_image({**request_, "of": "2"})
    (tmp_path / "saved").write_bytes(modern())
    images.export_image(request_)
    (root / exported["layers"][0]).unlink()
    images.export_image(request_)
    assert (root / exported["layers"][0]).read_bytes() == LAYERS[0]


def test_too_little_space(request_: dict[str, Any]) -> None:
    """The error comes before any write."""
    with pytest.raises(OSError, match="bytes needed"):
        images.export_image({**request_, "need": 2**60})
    assert list(Path(request_["root"]).iterdir()) == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no (complete )?image"),
        (b"Error response from daemon", "no (complete )?image"),
        (modern()[:3000], "no (complete )?image"),
        (tar_of({"other": b"x"}), "no (complete )?image"),
        (tar_of({"manifest.json": b"[]"}), "no (complete )?image"),
        (tar_of({"manifest.json": b"[" * 100_000}), "no (complete )?image"),
        (classic(twice=True), "no (complete )?image"),
        (tar_of({"../evil": b"x"}), "leads out of its folder"),
        (tar_of({}, {"l": "../../saved"}), "leads out of its folder"),
        (tar_of({".vlaunch/image.json": b"x"}), "leads out of its folder"),
    ],
)
def test_an_invalid_archive(
    request_: dict[str, Any], tmp_path: Path, data: bytes, why: str
) -> None:
    """It is rejected, and does not count the next time."""
    (tmp_path / "saved").write_bytes(data)
    for _ in range(2):
        with pytest.raises((images.DockerCommandError, UnsafeName), match=why):
            images.export_image(request_)
    assert not (tmp_path / "scratch" / "evil").exists()


def test_a_missing_image(request_: dict[str, Any]) -> None:
    """The error has Docker's message."""
    request_["save"] = ["sh", "-c", "echo no such image >&2; exit 1"]
    with pytest.raises(images.DockerCommandError, match="`docker save` failed: no such image"):
        images.export_image(request_)


def test_a_folder_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Its owner could read and change the files; a link leads elsewhere."""
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(UnsafeName, match="is not private to this user"):
            images.create_private_folder(str(tmp_path / name / "x"), str(tmp_path / name))


def test_dropping_leaves_nothing(tmp_path: Path) -> None:
    """Not even parent folders, except those with other files, and `top`'s parents."""
    top = tmp_path / "top"
    images.create_private_folder(str(top / "c" / "n" / "i"), str(top))
    images.create_private_folder(str(top / "c" / "m"), str(top))
    (top / "c" / "n" / "i" / "blob").write_bytes(bytes(5000))

    images.remove_folder(str(top / "c" / "n" / "i"), str(top))
    assert [path.name for path in (top / "c").iterdir()] == ["m"]
    images.remove_folder(str(top / "c" / "m"), str(top))
    assert list(tmp_path.iterdir()) == []


def test_docker_loads_copied_files(tmp_path: Path) -> None:
    """Under their names, including partial files and an empty one."""
    contents = {"blobs/sha256/a": b"one" * 5000, "empty": b"", "manifest.json": b"[]"}
    root = tmp_path / "x"
    (root / ".vlaunch").mkdir(parents=True)
    (root / "manifest.json").write_bytes(contents["manifest.json"])
    files = [ManifestFile(name, len(data)) for name, data in contents.items()]
    store = ChunkStore(str(root), CopyManifest(files, 10_000), DigestRecords(str(root)))
    hand = FileHandle(store)
    for number in store.manifest.file_chunks(0):
        _, offset, size = store.manifest.locate_chunk(number)
        data = contents["blobs/sha256/a"][offset : offset + size]
        store.write_chunk(number, memoryview(data), hashlib.sha256(data).digest(), hand)
    hand.close()
    archive = tmp_path / "given"
    images.load_image(store, ["sh", "-c", 'cat > "$0"', str(archive)])

    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        loaded = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    assert loaded == contents


def test_docker_rejects_the_image(tmp_path: Path) -> None:
    """The error has Docker's own message, however much input it has read."""
    (tmp_path / "a").write_bytes(bytes(3_000_000))
    store = ChunkStore(
        str(tmp_path),
        CopyManifest([ManifestFile("a", 3_000_000)], 2**20),
        DigestRecords(str(tmp_path)),
    )
    for script in ("echo no space >&2; exit 1", "cat >&2 /dev/null; echo no space; exit 3"):
        with pytest.raises(images.DockerCommandError, match="`docker load` failed: no space"):
            images.load_image(store, ["sh", "-c", script])


def test_an_answer_is_json(request_: dict[str, Any]) -> None:
    """In the launcher's format."""
    exported = images.export_image(request_)

    assert json.loads(json.dumps(exported)) == exported
