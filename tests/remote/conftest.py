"""Servers to log in to, and a home directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.remote import sshd


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own ~/.ssh and agent out of the test."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    """One server for all tests that only log in and run things."""
    running = sshd.start(tmp_path_factory.mktemp("sshd"))
    yield running
    sshd.stop(running)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., sshd.Sshd]]:
    """Start servers that end with the test."""
    started: list[sshd.Sshd] = []

    def start(name: str = "sshd", **options: object) -> sshd.Sshd:
        started.append(sshd.start(tmp_path / name, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        sshd.stop(one)
