"""Data files of dependencies on other programs, and the versions in them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import upstream
from launcher.batch import archive as batch_archive
from launcher.core.registry import Files
from launcher.network import archive as network_archive
from launcher.tools.shipped import zipapps
from launcher.upstream import PROGRAMS, entries
from launcher.upstream.entries import Entry, Rejection, VersionRange

RANGE = VersionRange(
    program="vllm",
    checked=("0.31.0", "0.32.0", "0.33.0"),
    tried=("0.32.0",),
    rejected=(Rejection(below="0.22", reason="no timeout"),),
)


@pytest.mark.parametrize(
    ("version", "position"),
    [
        ("0.33.0", "checked"),
        ("0.33.2+cu130", "checked"),
        ("0.31.0rc1", "checked"),
        ("0.34.0", "newer"),
        ("0.99", "newer"),
        ("1.0", "newer"),
        ("0.30.1", "older"),
        ("0.22.0", "older"),
        ("0.21.9", "broken"),
        ("0.19", "broken"),
        ("dev", "unknown"),
        ("", "unknown"),
    ],
)
def test_position_of_a_version(version: str, position: str) -> None:
    """Releases are compared by their first two numbers with the checked ones."""
    assert RANGE.position(version) == position


def test_range_of_versions() -> None:
    """A range has its ends, and the reasons for rejections."""
    assert (RANGE.oldest, RANGE.newest, RANGE.broken_below) == ("0.31.0", "0.33.0", "0.22")
    assert RANGE.reasons("0.21.1") == ("no timeout",)
    assert RANGE.reasons("0.22.0") == ()


def test_entry_is_in_its_versions() -> None:
    """The last version of an entry includes its patch releases."""
    entry = Entry(id="x", kind="flag", text="--x", file="", used_by=(), first="0.22", last="0.32")
    versions = ("0.21.3", "0.22", "0.22.1", "0.32.1", "0.33.0")
    assert [entry.is_in(version) for version in versions] == [False, True, True, True, False]


@pytest.mark.parametrize("name", upstream.PROGRAMS)
def test_data_file_loads(name: str) -> None:
    """Each program has a data file."""
    program = entries.load_program(name)
    assert program.title


def test_text_of_an_entry() -> None:
    """Code refers to an entry by program and id."""
    option = "flag-cpu-distributed-timeout-seconds"
    assert upstream.text(f"vllm.{option}") == "--cpu-distributed-timeout-seconds"
    assert option in {entry.id for entry in entries.load_program("vllm").lost("0.21.0")}
    assert option not in {entry.id for entry in entries.load_program("vllm").lost("0.22.0")}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "package"),
    [
        (zipapps.agent_files, "vlaunch_agent"),
        (batch_archive.files, "vlaunch_batch"),
        (network_archive.files, "launcher"),
    ],
)
def test_texts_in_an_archive(files: Callable[[], Files], package: str, tmp_path: Path) -> None:
    """Programs on nodes have the texts of all programs, without the data files."""
    archive = tmp_path / "program.pyz"
    archive.write_bytes(zipapps.pack(files()))
    names = [f"{name}.{next(iter(entries.load_program(name).entries))}" for name in PROGRAMS]
    program = (
        f"import sys; sys.path.insert(0, {str(archive)!r})\n"
        f"from {package} import upstream; print([upstream.text(name) for name in {names!r}])"
    )
    argv = (sys.executable, "-I", "-S", "-c", program)
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([upstream.text(name) for name in names])
