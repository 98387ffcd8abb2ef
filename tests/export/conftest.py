"""Fixtures for tests of exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.kubernetes_export import PAIR


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two nodes with InfiniBand and many settings."""
    path = tmp_path / "inventory.yaml"
    path.write_text(PAIR, encoding="utf-8")
    return path
