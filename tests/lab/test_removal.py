"""Removal by `lab down`, and its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import RequestError
from launcher.lab import layout, removal

# Recorded from /proc/self/mountinfo; two lines are edited for the cases.
MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /var/lib/lab rw - tmpfs tmpfs rw
31 30 0:26 / /var/lib/lab/hosts/node1/fs rw shared:5 - tmpfs tmpfs rw
32 22 0:27 / /var/lib/lab-2/hosts rw - tmpfs tmpfs rw
33 30 0:28 / /var/lib/lab/with\040space rw - tmpfs tmpfs rw
"""


def test_mounts_below_a_directory_innermost_first() -> None:
    """Escapes are decoded, and directories with a common name prefix are excluded."""
    assert removal.mounts(Path("/var/lib/lab"), MOUNTS) == [
        "/var/lib/lab/hosts/node1/fs",
        "/var/lib/lab/with space",
        "/var/lib/lab",
    ]


def test_nothing_to_remove_is_fine(tmp_path: Path) -> None:
    """`down` is safe at any moment."""
    removal.remove_lab("no-such-lab", tmp_path / "absent", lambda _: None)

    assert removal.leftovers("no-such-lab", tmp_path / "absent") == []


def test_a_directory_that_is_no_lab_is_not_touched(tmp_path: Path) -> None:
    """A wrong `--dir` must not cost anyone their files."""
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(RequestError, match="not the folder of a lab cluster"):
        removal.remove_lab("no-such-lab", tmp_path, lambda _: None)

    assert (tmp_path / "thesis.txt").exists()


def test_a_directory_of_another_lab_is_not_touched(tmp_path: Path) -> None:
    """The name and the directory must belong together."""
    layout.save_lab(
        layout.make_lab(name="one", directory=tmp_path, subnet="10.77.0.0/24", nodes=1, gpus=1)
    )

    with pytest.raises(RequestError, match="`one`, not `two`"):
        removal.remove_lab("two", tmp_path, lambda _: None)


def test_an_incomplete_lab_is_removed_and_reported_until_then(tmp_path: Path) -> None:
    """A truncated record suffices to recognise the directory."""
    directory = tmp_path / "half"
    (directory / "hosts/node1/fs").mkdir(parents=True)
    (directory / layout.RECORD).write_text('{"name": "ha')

    assert removal.leftovers("half", directory) == [f"directory {directory}"]
    removal.remove_lab("half", directory, lambda _: None)
    assert removal.leftovers("half", directory) == []


def test_purging_the_cache_keeps_other_files(tmp_path: Path) -> None:
    """Only wheels, image, model and the other Debian are removed."""
    (tmp_path / "wheels-1").mkdir()
    (tmp_path / "debian13").mkdir()
    (tmp_path / "image-1.tar").touch()
    (tmp_path / "notes.txt").touch()

    removal.remove_cache(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
