"""Fixtures of the driver tests: a disk without fsync."""

from __future__ import annotations

import os

import pytest

from launcher.batch.driver import cluster, ray_internals, replica


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip `fsync`: tests kill processes, not machines."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def no_logs_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Ray's logs: this process is no Ray worker."""
    for module in (ray_internals, replica):
        monkeypatch.setattr(module, "log_paths", lambda: ("", ""))
    monkeypatch.setattr(cluster, "node_address", lambda: "10.0.0.1")
