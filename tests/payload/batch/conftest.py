"""What the tests of a batch job's programs share: a disk that nobody waits for."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave `fsync` out: here processes die and machines do not, so that what was written is there
    without it.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
