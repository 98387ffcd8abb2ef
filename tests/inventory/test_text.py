"""Files that cannot be read, or only just."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.inventory.load import load
from tests.inventory.conftest import GOOD, mistake_of


def test_a_missing_file(tmp_path: Path) -> None:
    """The path is in the message."""
    assert f"{tmp_path / 'no.yaml'}:1: cannot be read: no such file or directory" == mistake_of(
        tmp_path / "no.yaml"
    )


def test_a_directory(tmp_path: Path) -> None:
    """A directory is told from a file that cannot be read."""
    assert mistake_of(tmp_path).startswith(f"{tmp_path}:1: is a directory")


def test_a_pipe_does_not_make_it_wait(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    os.mkfifo(tmp_path / "pipe")

    assert mistake_of(tmp_path / "pipe").endswith("is not a regular file")


def test_a_file_of_one_megabyte(tmp_path: Path) -> None:
    """It is refused by its size, before it is parsed."""
    path = tmp_path / "inventory.yaml"
    path.write_text(GOOD + "# padding\n" * 100_000)

    assert mistake_of(path) == f"{path}:1: is larger than 256 KiB, which no inventory needs to be"


def test_bytes_that_are_not_utf8_are_reported_with_their_line(tmp_path: Path) -> None:
    """An editor with another encoding is a common cause."""
    path = tmp_path / "inventory.yaml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")

    assert f"{path}:5: the byte 0xe9 is not UTF-8; save the file as UTF-8" == mistake_of(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Editors on other systems write one."""
    path = tmp_path / "inventory.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())

    assert load(path).cluster == "pair"


def test_a_name_that_cannot_be_a_path() -> None:
    """A NUL in a path is an error like any other."""
    assert "cannot be read" in mistake_of(Path("a\x00b"))
