"""The wheel of the plugin that lets vLLM's CPU build run under Ray."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.tools import cpu_plugin

pytestmark = pytest.mark.processes


def test_the_wheel_is_whole_and_the_same_every_time() -> None:
    """Its RECORD lists every file with its hash, and nothing in it depends on the day or the
    machine.
    """
    name, data = cpu_plugin.wheel()
    cpu_plugin.wheel.cache_clear()

    assert name == "vlaunch_cpu_ray-1.0-py3-none-any.whl"
    assert cpu_plugin.wheel()[1] == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}
        record = archive.read("vlaunch_cpu_ray-1.0.dist-info/RECORD").decode()
        rows = [line.split(",") for line in record.splitlines()]
        assert sorted(path for path, *_ in rows) == sorted(archive.namelist())
        for path, digest, size in rows[:-1]:
            content = archive.read(path)
            hashed = (
                base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            )
            assert (digest, size) == (f"sha256={hashed}", str(len(content)))


def test_pip_installs_the_wheel(tmp_path: Path) -> None:
    """As the image's build does: no index, no dependencies."""
    name, data = cpu_plugin.wheel()
    (tmp_path / name).write_bytes(data)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
    ]

    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(tmp_path / name)], check=True)

    assert (tmp_path / "site" / "vlaunch_cpu_ray" / "platform.py").is_file()
