"""SSH servers, a private home directory, and a fake package index."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Node
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.ssh.fleet import Fleet
from launcher.tools.image import ImagePython
from tests import wheel
from tests.ssh import sshd

IMAGE = ImagePython(
    python="3.99.1",
    implementation="cpython",
    abiflags="",
    machine="x86_64",
    libc="glibc",
    libc_version="2.31",
    uid=0,
    uv=False,
    pip=True,
    managed=False,
    distributions={"click": "8.1.0+vendor.1", "torch": "2.13.0+cpu"},
)


class Shelf:
    """A folder of wheels that `PIP_FIND_LINKS` names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        version: str,
        *requires: str,
        tags: str = "py3-none-any",
        extras: Sequence[str] = (),
    ) -> None:
        lines = [f"Provides-Extra: {extra}\n" for extra in extras]
        text = "".join([*lines, *(f"Requires-Dist: {line}\n" for line in requires)])
        file, data = wheel.build(name, version, text)
        (self.folder / file.replace("py3-none-any", tags)).write_bytes(data)

    def ray(
        self,
        *requires: str,
        version: str = "2.60.0",
        tags: str = "cp399-cp399-manylinux2014_x86_64",
    ) -> None:
        self.add("ray", version, *requires, tags=tags, extras=("default", "data", "serve", "llm"))

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the user's own ~/.ssh and agent."""
    folder = tmp_path / "home"
    for name, value in sshd.make_home(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    """One server for all tests that only log in and run commands."""
    running = sshd.start(tmp_path_factory.mktemp("sshd"))
    yield running
    sshd.stop(running)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., sshd.Sshd]]:
    """Start servers that are stopped after the test."""
    started: list[sshd.Sshd] = []

    def start(name: str = "sshd", **options: object) -> sshd.Sshd:
        started.append(sshd.start(tmp_path / name, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for running in started:
        sshd.stop(running)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """An ssh-agent; call it with a key to add."""
    path = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # printed once it listens
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))

    def add(key: Path) -> None:
        subprocess.run(["ssh-add", "-q", str(key)], check=True, stdin=subprocess.DEVNULL)

    yield add
    process.terminate()
    process.communicate(timeout=60)


def refusal(node: Node, **options: Any) -> ConnectError:
    """Return the error of a failing connection."""
    with Fleet(sshd.inventory(node), **options) as fleet:
        errors = fleet.connect()
    assert list(errors) == ["gpu01"], "it connected"
    assert errors["gpu01"].node == "gpu01"
    assert errors["gpu01"].hint
    return errors["gpu01"]


def works(node: Node, **options: Any) -> bool:
    """Check that a connection can run a command."""
    with Fleet(sshd.inventory(node), **options) as fleet:
        errors = fleet.connect()
        for error in errors.values():
            raise error
        return all(answer.ok for answer in fleet.run([Command(node=node.name, argv=("true",))]))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Restrict pip and uv to the shelf's wheels."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings: Mapping[str, str] = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CACHE_DIR": str(tmp_path / "pip"),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "HOME": str(tmp_path),
        # pip reports the system to indexes, and runs other programs to identify it
        "PATH": str(folder),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return Shelf(folder)
