"""Taking an image out of Docker, and giving it to Docker, with stand-ins for its command line."""

from __future__ import annotations

import hashlib
import io
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.chain import images
from launcher.payload.chain.archive import NotAnImage, split
from launcher.payload.chain.files import File, Manifest, Unsafe
from launcher.payload.chain.record import Known
from launcher.payload.chain.store import Hand, Store
from tests.image_tars import LAYERS, NAME, classic


def quiet(event: str, **more: Any) -> None:
    """Who tells nobody."""


@pytest.fixture
def request_(tmp_path: Path) -> dict[str, Any]:
    saved = tmp_path / "saved"
    saved.write_bytes(classic())
    top = tmp_path / "scratch" / "vlaunch-0"
    return {
        "of": "1",
        "save": ["cat", str(saved)],
        "top": str(top),
        "root": str(top / "c" / "n" / "i"),
        "need": 1,
        "name": NAME,
    }


def test_an_image_is_taken_out_once(request_: dict[str, Any], tmp_path: Path) -> None:
    """What was taken out before counts the next time, unless it is another image, or a part of it
    has gone.
    """
    said = images.export(request_, quiet)
    root = Path(request_["root"])
    (tmp_path / "saved").unlink()

    assert images.export(request_, quiet) == said
    assert oct(Path(request_["top"]).stat().st_mode)[-3:] == "700"
    with pytest.raises(images.NotLoaded, match=r"`docker save` failed: .*No such file"):
        images.export({**request_, "of": "2"}, quiet)
    (tmp_path / "saved").write_bytes(classic())
    images.export(request_, quiet)
    (root / said["config"]).write_bytes(b"")
    images.export(request_, quiet)
    assert hashlib.sha256((root / said["config"]).read_bytes()).hexdigest() == said["config"]


def test_there_is_no_room(request_: dict[str, Any]) -> None:
    """Which is said before anything is written."""
    with pytest.raises(OSError, match="bytes are needed"):
        images.export({**request_, "need": 2**60}, quiet)
    assert list(Path(request_["root"]).iterdir()) == []


def test_docker_does_not_have_it(request_: dict[str, Any]) -> None:
    """Its own words tell."""
    request_["save"] = ["sh", "-c", "echo no such image >&2; exit 1"]
    with pytest.raises(images.NotLoaded, match="`docker save` failed: no such image"):
        images.export(request_, quiet)
    request_["save"] = ["true"]
    with pytest.raises(NotAnImage):
        images.export(request_, quiet)


def test_a_folder_that_others_made_is_refused(tmp_path: Path) -> None:
    """They could read and change what lies there; a link leads elsewhere."""
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(Unsafe, match="no folder of this login alone"):
            images.own(str(tmp_path / name / "x"), str(tmp_path / name))


def test_dropping_leaves_nothing(tmp_path: Path) -> None:
    """Not the folders above it, but for those in which something else is, and who is above."""
    top = tmp_path / "top"
    images.own(str(top / "c" / "n" / "i"), str(top))
    images.own(str(top / "c" / "m"), str(top))
    (top / "c" / "n" / "i" / "blob").write_bytes(bytes(5000))

    assert images.drop(str(top / "c" / "n" / "i"), str(top)) >= 5000
    assert [each.name for each in (top / "c").iterdir()] == ["m"]
    images.drop(str(top / "c" / "m"), str(top))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def loading(request_: dict[str, Any], tmp_path: Path) -> tuple[Store, dict[str, Any], Path]:
    """A node that lacks all layers but the first, and a Docker that writes what it is given."""
    image = images.export(request_, quiet)
    given = tmp_path / "given"
    rows = {image["config"]: image["config_size"]} | {row[0]: row[1] for row in image["layers"][1:]}
    manifest = Manifest([File(name, size, sum=name) for name, size in rows.items()], 100_000)
    root = tmp_path / "node" / "x"
    images.own(str(root), str(tmp_path / "node"))
    store = Store(str(root), manifest, Known(str(root)))
    load = ["sh", "-c", 'cat > "$0"', str(given)]
    asked = {
        "load": load,
        "image": image,
        "names": [NAME],
        "root": str(root),
        "top": str(tmp_path / "node"),
    }
    return store, asked, given


def arrive(store: Store, source: Path, numbers: list[int]) -> None:
    """Have chunks come."""
    hand = Hand(store)
    for number in numbers:
        at, offset, size = store.manifest.place(number)
        data = (source / store.manifest.files[at].name).read_bytes()[offset : offset + size]
        store.write(number, memoryview(data), hashlib.sha256(data).digest(), hand)
    hand.close()


def test_docker_is_given_what_comes_as_it_comes(
    loading: tuple[Store, dict[str, Any], Path], request_: dict[str, Any]
) -> None:
    """In whatever order; then nothing of it is left."""
    store, asked, given = loading
    loader = images.Loader(store, asked)
    thread = threading.Thread(target=loader.run)
    (Path(store.root) / ".vlaunch").mkdir()
    thread.start()
    numbers = list(range(store.manifest.chunks))
    arrive(store, Path(request_["root"]), numbers[1:])
    thread.join(0.05)
    assert thread.is_alive()
    arrive(store, Path(request_["root"]), numbers[:1])
    loader.finish()

    data = given.read_bytes()
    assert LAYERS[1] in data
    assert not Path(asked["top"]).exists()
    # The third layer is the same as the first, which is left out.
    assert split(io.BytesIO(data)).as_json().items() <= asked["image"].items()


def test_docker_refuses(
    loading: tuple[Store, dict[str, Any], Path], request_: dict[str, Any]
) -> None:
    """Which is known at once, in its own words; what has come stays."""
    store, asked, _ = loading
    loader = images.Loader(store, {**asked, "load": ["sh", "-c", "echo no space >&2; exit 1"]})
    (Path(store.root) / ".vlaunch").mkdir()
    arrive(store, Path(request_["root"]), list(range(store.manifest.chunks)))
    loader.run()

    with pytest.raises(images.NotLoaded, match="`docker load` failed: no space"):
        loader.finish()
    assert Path(asked["root"]).exists()
