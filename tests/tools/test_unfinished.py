"""Models that are not finished, as a node's shell finds them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launcher.core import shell
from launcher.tools import unfinished


def found(home: Path) -> dict[str, str]:
    argv = ["sh", "-c", shell.program("models_unfinished"), "models", str(home)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return {each.model: each.kind for each in unfinished.read(ran.stdout)}


def test_copies_and_downloads_that_are_not_finished_are_named(tmp_path: Path) -> None:
    """By their names or folders; what is whole is not."""
    cached, mine, whole = (
        tmp_path / each for each in ("hub/models--org--m", "my model", "hub/models--org--whole")
    )
    for folder in (cached / "blobs", mine / ".vlaunch/parts", whole / ".vlaunch/records"):
        folder.mkdir(parents=True)
    (whole / "blobs").mkdir()
    (whole / "blobs" / "a").write_bytes(b"x")
    assert found(tmp_path) == {}
    (cached / "blobs" / "a.incomplete").write_bytes(b"x" * 9000)
    (mine / ".vlaunch/parts/0").write_bytes(b"x" * 9000)

    assert found(tmp_path) == {"org/m": "download", str(mine): "copy"}


def test_no_home_is_no_error(tmp_path: Path) -> None:
    """As before the first model."""
    assert found(tmp_path / "none") == {}


def test_each_says_how_it_goes_on() -> None:
    """And how much there is."""
    (one,) = unfinished.read("noise\nunfinished copy: 2048 KiB of /hf/hub/models--org--m\n")

    assert one.words == (
        "a copy of org/m is not finished, 2 MiB so far: `vlaunch model copy org/m` continues it"
    )
    assert unfinished.read(None) == ()
