"""The command line on simulated nodes; only `Fleet` is replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.app.apply import apply
from launcher.cli.main import run_command
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.inventory.load import load
from launcher.serving.watch import watch_start
from launcher.ssh.fleet import Line
from launcher.tools.shipped import py_spy
from tests.fakes import FakeTransport
from tests.simulated import World

INVENTORY = """\
cluster: c
image: vllm/vllm-openai:v0.32.0
secrets: {HF_TOKEN: {env: HF_TOKEN}}
nodes:
  - {host: gpu01, ip: 10.0.0.11, gpus: 8}
  - {host: gpu02, ip: 10.0.0.12, gpus: 8}
"""
SECRET = "hf_thisMustStayHidden"
VLAUNCH = [sys.executable, "-c", "from launcher.cli.main import main; main()"]
ANNA = (
    '{"pid": 4242, "since": "2026-11-21T21:00:05Z", "who": "anna", "host": "laptop", "command":'
    ' "vlaunch up"}'
)
# A Docker that answers once the file `go` exists.
_SLOW = '#!/bin/sh\ntouch "{0}/asked"\nwhile [ ! -e "{0}/go" ]; do sleep 0.02; done\n'


@dataclass(frozen=True)
class Ran:
    """Exit code and output of one command line."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The printed events of `--json`."""
        return [json.loads(line) for line in self.out.splitlines()]


class FakeDocker:
    """The part of the Docker API that `logs` uses."""

    def __init__(self, logs: dict[str, bytes]) -> None:
        self._logs = logs
        self._all_read = threading.Barrier(max(1, len(logs)))

    def containers(self, **filters: Any) -> list[dict[str, Any]]:
        assert filters == {"all": True, "filters": {"label": "vlaunch.cluster=c"}}
        return [{"Id": role, "Labels": {"vlaunch.role": role}} for role in self._logs]

    def logs(self, container: str, *, stream: bool, follow: bool, tail: int) -> Iterator[bytes]:
        # Split inside a line and a character, as over a network.
        data = self._logs[container]
        yield data[:7]
        yield data[7:]
        if follow:  # until all other logs have been read as well
            self._all_read.wait(timeout=60)


class FakeBackgroundCommand:
    """A command beside the others: prints these lines; ends with an answer, or on request."""

    def __init__(
        self, items: Iterable[Line | Answer], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._items = list(items)
        self._ended = ended
        self.over: Answer | None = None

    def next(self, timeout: float) -> Line | Answer | None:
        item = self._items.pop(0) if self._items else None
        self.over = item if isinstance(item, Answer) else self.over
        return item

    def end(self) -> None:
        self._ended()


class Tunnel:
    """A tunnel that closes at once."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self) -> None:
        return None


@pytest.fixture
def _no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `up` from downloading py-spy: leave no build for any architecture."""
    for architecture in list(py_spy.BUILDS):
        monkeypatch.delitem(py_spy.BUILDS, architecture)


@dataclass
class Cluster:
    """Simulated nodes and the command line on them."""

    path: Path
    world: World
    capsys: pytest.CaptureFixture[str]
    missing: dict[str, ConnectError] = field(default_factory=dict)
    logs: dict[str, dict[str, bytes]] = field(default_factory=dict)
    server_log: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    followed: list[Command] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    background_commands: list[Command] = field(default_factory=list)
    lock: list[Line | Answer] = field(default_factory=lambda: [Line(node="gpu01", text="locked")])
    background: list[FakeBackgroundCommand] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    forwards: list[tuple[Any, ...]] = field(default_factory=list)
    fleet_options: list[dict[str, Any]] = field(default_factory=list)
    tunnel_port: int = 45678

    def run(self, *argv: str) -> Ran:
        """Run one command line with this cluster's inventory."""
        self.capsys.readouterr()
        code = run_command(list(argv))
        return Ran(code, *self.capsys.readouterr())

    def unwant(self, name: str = "default") -> None:
        """Remove a server as another operator's `vlaunch stop` would."""
        del self.world.machines["gpu01"].files[f"server/{name}/desired.json"]

    def write(self, text: str) -> Inventory:
        """Change the inventory; nodes stay as they are."""
        self.path.write_text(text)
        self.world.inventory = load(self.path)
        return self.world.inventory


@pytest.fixture
def cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    _no_py_spy: None,
) -> Cluster:
    """Two nodes with the image and nothing else; the inventory is in the working directory."""
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("VLAUNCH_INVENTORY", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    cluster = Cluster(path=path, world=World(load(path)), capsys=capsys)

    class FakeFleet(contextlib.nullcontext["FakeFleet"]):
        """The replacement of `Fleet`."""

        def __init__(self, inventory: Inventory, **options: Any) -> None:
            super().__init__(self)
            cluster.fleet_options.append(options)

        def __enter__(self) -> FakeFleet:
            return self

        def connect(self, nodes: Iterable[str] | None = None) -> dict[str, ConnectError]:
            return {
                name: error
                for name, error in cluster.missing.items()
                if nodes is None or name in set(nodes)
            }

        def hold(self, command: Command) -> FakeBackgroundCommand:
            cluster.background_commands.append(command)
            cluster.trace.append("hold")
            cluster.background.append(
                FakeBackgroundCommand(cluster.lock, lambda: cluster.trace.append("free"))
            )
            return cluster.background[-1]

        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            cluster.commands.extend(commands)
            cluster.trace.append("run")
            lost = [command.node for command in commands if command.node in cluster.missing]
            assert not lost, f"queried although not reached: {lost}"
            return FakeTransport(cluster.world.answer).run(commands)

        def stream(self, commands: Sequence[Command]) -> Iterator[Line | Answer]:
            cluster.followed.extend(commands)
            for command in commands:
                for text in cluster.server_log:
                    yield Line(node=command.node, text=text)
                yield Line(node=command.node, text="noise", error=True)
                yield Answer(node=command.node, code=0)

        def docker(self, node: str) -> FakeDocker:
            return FakeDocker(cluster.logs.get(node, {}))

        def read_file(self, node: str, container: str, path: str) -> Iterator[bytes]:
            yield cluster.contents.get(Path(path).name) or Path(path).read_bytes()

        def forward(self, node: str, host: str, port: int, local_port: int = 0) -> Tunnel:
            cluster.forwards.append((node, host, port, local_port))
            return Tunnel(local_port or cluster.tunnel_port)

    monkeypatch.setattr("launcher.ssh.fleet.Fleet", FakeFleet)
    # Waits cost no time; the clock advances a second per reading.
    ticks = itertools.count()
    defaults = apply.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "clock", lambda: float(next(ticks)))
    monkeypatch.setitem(defaults, "sleep", lambda _: None)
    # Servers are watched by the real clock; without a short sleep, the wait would spin.
    defaults = watch_start.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "sleep", lambda seconds: time.sleep(min(seconds, 0.02)))
    return cluster


@pytest.fixture
def up(cluster: Cluster) -> Cluster:
    """A running cluster."""
    assert cluster.run("up").code == 0
    for recorded in (
        cluster.world.changes,
        cluster.commands,
        cluster.trace,
        cluster.background_commands,
        cluster.background,
    ):
        recorded.clear()
    return cluster


@pytest.fixture
def local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of this machine without Docker, whose `down` holds the lock until `go` exists."""
    hook = tmp_path / "hooks" / "pre-down"
    hook.parent.mkdir()
    hook.write_text(_SLOW.format(tmp_path))
    hook.chmod(0o755)
    (tmp_path / "inventory.yaml").write_text(
        "cluster: c\nimage: x:1\naccelerator: cpu\nconnection: local\nstate_dir:"
        f" {tmp_path}/state\ndocker: [/bin/false]\nhf_home: {tmp_path}/hf\n"
        "nodes: [{host: localhost, name: me, ip: 192.0.2.1, gpus: 1}]\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    yield tmp_path
    (tmp_path / "go").touch()


@pytest.fixture
def launch(local_cluster: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start launchers as processes; end them after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, user: str = "anna") -> subprocess.Popen[str]:
        env = {**os.environ, "LOGNAME": user}
        started.append(
            subprocess.Popen(
                [*VLAUNCH, *argv],
                env=env,
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    (local_cluster / "go").touch()
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def is_locked(capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    assert run_command(["lock", "--json"]) == 0
    return bool(json.loads(capsys.readouterr().out)["held"])
