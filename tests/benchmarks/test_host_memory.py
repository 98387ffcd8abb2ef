"""The limits of memory for lab hosts: what is written where, without a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import host_memory
from launcher.core.errors import VlaunchError


def test_a_limit_that_the_kernel_refuses(tmp_path: Path) -> None:
    """Memory is limited to what is held and some more; a group that cannot be limited is an error
    of the lab hosts.
    """
    (tmp_path / "memory.stat").write_text("cache 5\ntotal_rss 1000\n")
    host_memory._limit(tmp_path, "limit", "total_rss", 64)
    (tmp_path / "refuses").mkdir()

    assert (tmp_path / "limit").read_text() == "1064"
    with pytest.raises(VlaunchError, match="cannot be limited"):
        host_memory._limit(tmp_path, "refuses", "total_rss", 64)
    assert host_memory._count(tmp_path / "gone", "oom_kill") == 0
