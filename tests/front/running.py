"""HAProxy with the configuration of a front on loopback, and stand-ins of servers behind it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.agent.front import router_process
from launcher.core.domain import FrontSettings, TlsSettings
from launcher.front import node_program
from launcher.front.configuration import (
    LUA,
    TARGETS,
    FrontServer,
    Replica,
    render,
    render_table,
)
from launcher.front.front_plan import START
from tests.ports import free_port

STAND_IN = Path(__file__).with_name("stand_in_server.py")
PROGRAM = Path(node_program.__file__).read_text(encoding="utf-8")
OFF = TlsSettings(kind="off")
CHAT, EMBED = ("Qwen/chat", "shared"), ("e5", 'odd "name"', "shared")  # models of the stand-ins


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until a condition is true, and return its value."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if value := condition():
                return value
        if time.monotonic() > until:
            raise AssertionError("the condition did not become true")
        time.sleep(0.02)


@dataclass
class StandIn:
    """A server, which can be killed and started again."""

    folder: Path
    name: str
    port: int = field(default_factory=free_port)
    models: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, str(STAND_IN), str(self.port), str(self.log), *self.models]
        self.process = process = subprocess.Popen(command)

        def listens() -> bool:
            assert process.poll() is None, f"port {self.port}: see its traceback"
            return not socket.create_connection(("127.0.0.1", self.port)).close()

        wait_for(listens)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> Path:
        """File with the ids of the requests that it ran."""
        return self.folder / f"{self.name}.log"

    @property
    def ran(self) -> list[str]:
        """The ids of the requests that it ran."""
        return self.log.read_text().split() if self.log.exists() else []


@dataclass
class Running:
    """A running front; `settings` and `servers` can be changed before a reload."""

    folder: Path
    settings: FrontSettings
    servers: tuple[FrontServer, ...] = ()
    server_key: bool = False
    targets: str = "[]"
    before: str = ""  # a shell command in the container's start, such as a limit of it
    process: subprocess.Popen[bytes] | None = None
    router: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.folder / "haproxy.cfg"

    def write(self) -> str:
        """Write the configuration; return its digest."""
        shutil.copy(LUA, self.folder)
        keys = self.folder / "keys.map"
        keys.touch()
        (self.folder / TARGETS).write_text(self.targets)
        table = self.folder / router_process.TABLE
        table.write_text(render_table(self.settings, self.servers))
        folders = dict.fromkeys(("files", "secrets", "run"), str(self.folder))
        text = render(
            self.settings,
            self.servers,
            metrics_address="127.0.0.1",
            server_key=self.server_key,
            **folders,
        )
        if os.geteuid():  # only root can become another user
            text = re.sub(r"(?m)^    (user|group) haproxy\n| user haproxy", "", text)
        self.config.write_text(text)
        return text.split("description ")[1].split()[0]

    def start(self) -> None:
        """Start HAProxy, and wait for its socket."""
        digest = self.write()
        with (self.folder / "log").open("ab") as log:
            master = f"{self.folder}/master.sock"
            command = ["sh", "-c", f"{self.before}{START}", "start", master, str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: digest in (self.status()["info"] or ""))
        self.start_router()

    def start_router(self) -> None:
        """Start the router, and wait until HAProxy may connect to it."""
        command = [sys.executable, "-m", "launcher.agent.front.router", str(self.folder)]
        self.router = subprocess.Popen(command)
        sockets = [self.folder / name for name in (router_process.SOCKET, router_process.SERVERS)]
        wait_for(lambda: sockets[0].stat().st_uid == sockets[1].stat().st_uid)

    def stop_router(self) -> None:
        """Kill the router."""
        if self.router is not None:
            self.router.kill()
            self.router.wait()

    def reload(self) -> None:
        """Reload the configuration, as `docker kill --signal USR2` does."""
        digest = self.write()
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: digest in (self.status()["info"] or ""))

    def stop(self) -> None:
        """Kill HAProxy with its workers, and the router."""
        self.stop_router()
        if self.process is not None:
            children = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
                check=False,
                capture_output=True,
            ).stdout.split()
            self.process.kill()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            self.process.wait()

    def node(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the node program."""
        argv = [sys.executable, "-c", PROGRAM, str(self.folder), f"{self.folder}/keys.map"]
        return subprocess.run([*argv, *command], capture_output=True, text=True, check=check)

    def status(self) -> dict[str, Any]:
        """Return the keys and HAProxy's answers."""
        status: dict[str, Any] = json.loads(self.node("status").stdout)
        return status

    def add_key(self, name: str, *, rpm: int = 0, concurrent: int = 0, models: str = "*") -> str:
        """Add a key, and return it."""
        key = f"sk-{name}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        self.node("add", digest, f"{name}:{rpm}:{concurrent}:{models}")
        return key

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: Any = None, *, key: str = "", **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and yield its response; the body is bytes, parts of it, or JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.settings.port, timeout=60)
        try:
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            headers.setdefault("Content-Type", "application/json")
            authorization = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(method, path, content, {**authorization, **headers})
            yield connection.getresponse()
        finally:
            connection.close()

    def post(
        self, path: str, body: Any = None, *, key: str = "", **headers: str
    ) -> tuple[int, Any]:
        """Return the status and the JSON of a POST."""
        with self.request("POST", path, body or {}, key=key, **headers) as response:
            return response.status, json.loads(response.read())

    def get(self, path: str, *, key: str = "", **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of a GET."""
        with self.request("GET", path, key=key, **headers) as response:
            return response.status, json.loads(response.read())

    def raw(self, data: bytes, *, seconds: float = 60.0, until: bytes = b"") -> bytes:
        """Send bytes, and return everything that comes back until the connection ends, or until
        some bytes of an answer.
        """
        address = ("127.0.0.1", self.settings.port)
        with socket.create_connection(address, timeout=seconds) as client:
            client.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while not (until and until in received) and (part := client.recv(65536)):
                    received += part
            return received

    @property
    def log(self) -> list[dict[str, Any]]:
        """The access log."""
        lines = (self.folder / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def running(
    before: str = "", targets: str = "[]", **settings: Any
) -> Iterator[tuple[Running, StandIn, StandIn]]:
    """Run a front with two stand-ins behind the servers `chat` (both) and `embed` (the second)."""
    # HAProxy's worker, as another user, must reach its sockets.
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    folder.chmod(0o755)
    stand_ins = StandIn(folder, "one", models=CHAT), StandIn(folder, "two", models=EMBED)
    first, second = (Replica(name=s.name, address=f"127.0.0.1:{s.port}") for s in stand_ins)
    front = Running(
        folder=folder,
        before=before,
        targets=targets,
        settings=replace(
            FrontSettings(bind="127.0.0.1", port=free_port(), metrics=free_port(), tls=OFF),
            **settings,
        ),
        servers=(
            FrontServer(name="chat", replicas=(first, second), models=CHAT),
            FrontServer(name="embed", replicas=(replace(second, name="embed"),), models=EMBED),
        ),
    )
    try:
        for stand_in in stand_ins:
            stand_in.start()
        front.start()
        yield front, *stand_ins
    finally:
        front.stop()
        for stand_in in stand_ins:
            stand_in.kill()
        shutil.rmtree(folder)
