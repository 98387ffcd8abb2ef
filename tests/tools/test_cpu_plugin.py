"""The files of the plugin that lets vLLM's CPU build run under Ray."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from launcher.tools import cpu_plugin


def test_vllm_finds_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a distribution with an entry point, from the files alone."""
    for path, data in cpu_plugin.files().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    (point,) = importlib.metadata.entry_points(group="vllm.platform_plugins")

    assert (point.name, point.value) == ("vlaunch_cpu_ray", "vlaunch_cpu_ray:register")
    assert importlib.metadata.version("vlaunch-cpu-ray") == "1.0"
    assert (tmp_path / "vlaunch_cpu_ray" / "platform.py").is_file()
