"""The network probe's modules, as in a container."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

LAUNCHER = Path(__file__).parents[3] / "launcher"
FOLDER = LAUNCHER / "network" / "probe"
FOLDERS = [str(FOLDER), str(LAUNCHER / "core")]
PATH = os.pathsep.join(FOLDERS)
NAMES = (
    "tls",
    "network",
    "network_start",
    "network_node",
    "network_lanes",
    "network_work",
    "network_rank",
)


@pytest.fixture(scope="module")
def payload() -> Iterator[SimpleNamespace]:
    """The payload's modules, imported as in a container, and removed after the test."""
    sys.path[:0] = FOLDERS
    saved = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    try:
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in NAMES}
        yield SimpleNamespace(
            **{name.removeprefix("network_"): module for name, module in modules.items()}
        )
    finally:
        del sys.path[:2]
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(saved)
