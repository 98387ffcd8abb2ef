"""Hostile servers, and the command line on hostile nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command_line import cluster  # noqa: F401 - a fixture
from tests.hostile.adversary import Act, Adversary

Start = Callable[..., Adversary]


@pytest.fixture
def adversary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start hostile servers for one test; never use the user's own keys."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    started: list[Adversary] = []

    def start(act: Act, **options: int) -> Adversary:
        started.append(Adversary(tmp_path / f"adversary-{len(started)}", act, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()
