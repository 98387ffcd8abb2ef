"""A node's Docker API over the SSH connection it already has: HTTP through `docker system dial-stdio` on one more channel.

The channel is kept and reused for every request: each new one starts a docker client on the node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.transport.basehttpadapter import BaseHTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from launcher.model import Node
from launcher.remote import docker_errors, envelope
from launcher.remote.output import Output

if TYPE_CHECKING:
    import paramiko

_DIAL_TIMEOUT: Final = 20.0  # seconds for the docker client on the node to start
_IDLE: Final = 4  # channels kept open; sshd allows ten sessions per connection (MaxSessions)
_PROGRAM: Final = 'echo "$1"; echo "$1" >&2; shift; exec "$@"'  # the marker, after whatever a login shell prints


def connect(node: Node, transport: paramiko.Transport | None) -> docker.APIClient:
    """Return the API of the Docker daemon on `node`, in the version it speaks; raises NodeError.

    Args:
        node: whose `docker` words reach the daemon.
        transport: its SSH connection; None when the node is this machine, whose socket is then used directly.
    """
    dial = _Dial(node, transport)
    try:
        if transport is None and node.docker == ("docker",):
            return docker.APIClient(base_url=os.environ.get("DOCKER_HOST"), version="auto")
        return _Client(dial)
    except docker_errors.KINDS as error:
        complaint = dial.complaint()
        dial.close()
        raise docker_errors.node_error(node.name, error, complaint) from error


@contextlib.contextmanager
def errors(node: str) -> Iterator[None]:
    """Turn what the Docker SDK raises inside the block into NodeError."""
    try:
        yield
    except docker_errors.KINDS as error:
        raise docker_errors.node_error(node, error) from error


class _Client(docker.APIClient):
    """The SDK's client, with its HTTP going through `dial`."""

    def __init__(self, dial: _Dial) -> None:
        super().__init__(base_url="tcp://127.0.0.1", version=DEFAULT_DOCKER_API_VERSION)
        self._dial = dial
        self._custom_adapter = _Adapter(dial)
        self.mount("http+docker://", self._custom_adapter)
        # The SDK looks for a raw socket under a paramiko file when the address says so, and under a plain one otherwise.
        self.base_url = "http+docker://localhost" if dial.transport is None else "http+docker://ssh"
        self._version = self._retrieve_server_version()  # type: ignore[attr-defined]

    def close(self) -> None:
        super().close()
        self._dial.close()


class _Dial:
    """Opens byte streams to the daemon, and remembers what the docker client on the other side complained about."""

    def __init__(self, node: Node, transport: paramiko.Transport | None) -> None:
        self.transport = transport
        self._argv = (*node.docker, "system", "dial-stdio")
        self._lock = threading.Lock()
        self._processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._channel: paramiko.Channel | None = None
        self._marker = f"vlaunch-{secrets.token_hex(8)}"

    def open(self) -> Any:
        """Return a new socket, or something enough like one."""
        return self._local() if self.transport is None else self._remote(self.transport)

    def complaint(self) -> str:
        """What the last docker client printed on standard error; waits a moment for it to finish."""
        if self._channel is not None:
            output = Output(self._marker)
            self._channel.settimeout(2.0)
            with contextlib.suppress(OSError):
                while data := self._channel.recv_stderr(65536):
                    output.feed(data)
            return output.end()
        for process, log in self._processes[-1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            log.seek(0)
            return log.read().decode("utf-8", errors="replace")
        return ""

    def close(self) -> None:
        """End the docker clients of this machine; those on a node end with their channels."""
        with self._lock:
            processes, self._processes = self._processes, []
        for process, log in processes:
            process.terminate()
            process.wait(timeout=10)
            log.close()

    def _remote(self, transport: paramiko.Transport) -> paramiko.Channel:
        channel = self._channel = transport.open_session(timeout=_DIAL_TIMEOUT)
        channel.settimeout(_DIAL_TIMEOUT)
        channel.exec_command(f"exec {envelope.line(('sh', '-c', _PROGRAM, 'vlaunch', self._marker, *self._argv))}")
        said = b""
        while not said.endswith(f"{self._marker}\n".encode()):
            data = channel.recv(4096)
            if not data:
                raise ConnectionError(said.decode("utf-8", errors="replace") or "the login shell ended at once")
            said += data
        return channel

    def _local(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with theirs:
            process = subprocess.Popen(
                self._argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=log, start_new_session=True
            )
        with self._lock:
            self._processes.append((process, log))
        return ours


class _Connection(HTTPConnection):
    def __init__(self, dial: _Dial, **options: Any) -> None:
        super().__init__("localhost", **options)
        self._dial = dial

    def connect(self) -> None:
        self.sock = self._dial.open()
        if isinstance(self.timeout, (int, float)):
            self.sock.settimeout(self.timeout)

    @property
    def is_connected(self) -> bool:
        # The stock answer asks for a file descriptor, for which paramiko would open a pipe per channel.
        if self.sock is None:
            return False
        if self._dial.transport is None:
            return super().is_connected
        channel: Any = self.sock
        return not (channel.closed or channel.eof_received)


class _Pool(HTTPConnectionPool):
    scheme = "http+docker"

    def __init__(self, dial: _Dial) -> None:
        super().__init__("localhost", maxsize=_IDLE)
        self._dial = dial

    def _new_conn(self) -> _Connection:
        return _Connection(self._dial, timeout=self.timeout.connect_timeout)


class _Adapter(BaseHTTPAdapter):
    def __init__(self, dial: _Dial) -> None:
        self._pool = _Pool(dial)
        super().__init__()

    def get_connection(self, url: str | bytes, proxies: object = None) -> _Pool:
        """Every address is the one daemon."""
        return self._pool

    def close(self) -> None:
        super().close()
        self._pool.close()
