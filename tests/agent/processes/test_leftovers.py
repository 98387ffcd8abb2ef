"""Shared memory left behind by engines."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from launcher.agent.processes import leftovers


def test_only_unused_files_are_removed(tmp_path: Path) -> None:
    """Open, mapped and recent files stay, and everything that is not a file."""
    names = ("left", "opened", "mapped", "young")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 4096)
        if name != "young":
            os.utime(tmp_path / name, (time.time() - 90,) * 2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "left")
    os.utime(tmp_path / "folder", (1, 1))
    with (tmp_path / "mapped").open("r+b") as file:
        holding = mmap.mmap(file.fileno(), 4096)
    with holding, (tmp_path / "opened").open("rb"):
        leftovers.remove_leftovers(str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "folder",
        "link",
        "mapped",
        "opened",
        "young",
    ]
    leftovers.remove_leftovers(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "young"]


def test_a_missing_folder(tmp_path: Path) -> None:
    """An image may have no /dev/shm."""
    leftovers.remove_leftovers(str(tmp_path / "none"))
