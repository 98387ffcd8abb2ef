"""Downloading py-spy from a folder of handmade wheels: pip runs, without an index."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from launcher.cluster.py_spy_wheel import fetch
from launcher.core.errors import UnreadableAnswer, VlaunchError
from launcher.tools import py_spy
from launcher.tools.py_spy import VERSION, Build
from tests import wheel
from tests.ssh.conftest import Shelf

pytestmark = pytest.mark.processes


@pytest.fixture
def build(shelf: Shelf) -> Build:
    """A build whose wheel is on the shelf."""
    _, data = wheel.build("py-spy", VERSION)
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zipfile.ZipInfo(f"py_spy-{VERSION}.data/scripts/py-spy"), "program")
    name = f"py_spy-{VERSION}-py2.py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl"
    (shelf.folder / name).write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Build("x86_64", digest, hashlib.sha256(b"program").hexdigest())


def test_the_wheel_is_cached(build: Build, shelf: Shelf, tmp_path: Path) -> None:
    """A second call needs no index."""
    assert fetch(build, tmp_path / "cache") == b"program"
    shelf.clear()
    assert fetch(build, tmp_path / "cache") == b"program"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_damaged_wheel_is_replaced(build: Build, tmp_path: Path) -> None:
    """It is downloaded once more."""
    fetch(build, tmp_path)
    (cached,) = tmp_path.glob("*.whl")
    cached.write_bytes(b"damaged")

    assert fetch(build, tmp_path) == b"program"


def test_no_index(build: Build, shelf: Shelf, tmp_path: Path) -> None:
    """The hint describes the way without an index; no file is left in the cache."""
    shelf.clear()
    with pytest.raises(VlaunchError, match="cannot download py-spy") as error:
        fetch(build, tmp_path / "cache")

    assert "PIP_FIND_LINKS" in error.value.hint
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_wheel_of_that_name(shelf: Shelf, build: Build, tmp_path: Path) -> None:
    """A wheel with another hash than the pinned one is refused."""
    with pytest.raises(VlaunchError, match="cannot download"):
        fetch(Build("x86_64", "0" * 64, build.program), tmp_path)
    with pytest.raises(UnreadableAnswer):
        py_spy.unpack(b"another", build)
