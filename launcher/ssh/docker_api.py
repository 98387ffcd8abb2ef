"""Docker API of a node over its SSH connection: HTTP through `docker system dial-stdio`.

The channel is reused for all requests, since each new one starts a docker client on the node.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import docker
import docker.errors
import paramiko
import requests
import urllib3
from docker.constants import DEFAULT_DOCKER_API_VERSION, STREAM_HEADER_SIZE_BYTES
from docker.transport.basehttpadapter import BaseHTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from launcher.core.domain import Node
from launcher.core.errors import NodeError
from launcher.ssh import envelope

DIAL_TIMEOUT: Final = 20.0  # seconds for the docker client on the node to start
_NOISE: Final = 64 * 2**10  # bytes that a login shell may print first
_LIMIT: Final = 32 * 2**20  # bytes of one answer
_TIMEOUT: Final = 60.0  # seconds for one answer
_PIECE: Final = 64 * 2**10
_BLOCK: Final = 2**20  # bytes of a file per read
_TRAILER: Final = 16  # blocks after the last file of an archive
_IDLE: Final = 4  # channels kept open; sshd allows ten sessions per connection (MaxSessions)
# The marker separates the stream from anything the login shell prints.
_PROGRAM: Final = 'echo "$1"; shift; exec "$@"'


Explain = Callable[[str, str], NodeError | None]
FAILURES: Final = (
    docker.errors.DockerException,
    docker.errors.StreamParseError,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    paramiko.SSHException,
    tarfile.TarError,
    OSError,
    EOFError,
)


def connect(node: Node, transport: paramiko.Transport | None) -> docker.APIClient:
    """Return the API client of the Docker daemon on `node`, for its version; raises `FAILURES`.

    Args:
        node: its `docker` command reaches the daemon.
        transport: its SSH connection; None when the node is this machine.
    """
    dial = _Dial(node, transport)
    try:
        return _Client(dial)
    except FAILURES:
        dial.close()
        raise


def node_error(
    node: str, error: BaseException, output: str = "", *, explain: Explain | None = None
) -> NodeError:
    """Convert one of `FAILURES` to a NodeError; `output` is that of the docker client on the node,
    and `explain` recognises known errors.
    """
    if isinstance(error, docker.errors.APIError):
        reason = str(error.explanation or error)
        first = reason.splitlines()[0] if reason else str(error)
        return NodeError(node, f"Docker refused: {first}", evidence=reason)
    evidence = output.strip() or str(error)
    if explain is not None and (explained := explain(node, evidence)):
        return explained
    message, hint = "Docker's API did not answer", "run `vlaunch check`"
    return NodeError(node, message, evidence=evidence, hint=hint)


@contextlib.contextmanager
def errors(node: str, explain: Explain | None = None) -> Iterator[None]:
    """Convert exceptions of the Docker SDK inside the block to NodeError."""
    try:
        yield
    except FAILURES as error:
        raise node_error(node, error, explain=explain) from error
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # The SDK does not validate replies.
        raise NodeError(
            node,
            "cannot parse the response of Docker's API",
            evidence=repr(error)[:300],
            hint="run `docker version` on the node",
        ) from error


def read_file(client: docker.APIClient, node: str, container: str, path: str) -> Iterator[bytes]:
    """Yield the content of a regular file in a container; raises NodeError, also for a link."""
    with errors(node):
        blocks, _ = client.get_archive(container, path)
        with tarfile.open(fileobj=_Blocks(blocks), mode="r|") as archive:
            member = archive.next()
            content = archive.extractfile(member) if member and member.isreg() else None
            if content is None:
                raise NodeError(node, f"{path} is not a regular file")
            while block := content.read(_BLOCK):
                yield block
        for _ in zip(range(_TRAILER), blocks, strict=False):  # so that the channel can be reused
            pass


class _Blocks(io.RawIOBase):
    """Read-once file made of blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        self._rest = self._rest or next(self._blocks, b"")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


class _Client(docker.APIClient):
    """Client of the Docker SDK with HTTP over `dial`."""

    def __init__(self, dial: _Dial) -> None:
        super().__init__(base_url="tcp://127.0.0.1:2375", version=DEFAULT_DOCKER_API_VERSION)
        self._dial = dial
        self._custom_adapter = _Adapter(dial)
        self.mount("http+docker://", self._custom_adapter)
        # redirects must stay on the node
        self._unmount("http://", "https://")  # type: ignore[attr-defined]
        # The address tells the SDK where the raw socket is: in a paramiko file, or in a plain one.
        self.base_url = "http+docker://localhost" if dial.transport is None else "http+docker://ssh"
        self._version = self._retrieve_server_version()  # type: ignore[attr-defined]

    def close(self) -> None:
        super().close()
        self._dial.close()

    def _multiplexed_response_stream_helper(self, response: Any) -> Iterator[bytes]:
        """Read log frames in pieces: the SDK reads each at once, and a frame may have 4 GB."""
        raw = self._get_raw_response_socket(response)  # type: ignore[attr-defined]
        self._disable_socket_timeout(raw)  # type: ignore[attr-defined]
        while (
            len(header := response.raw.read(STREAM_HEADER_SIZE_BYTES)) == STREAM_HEADER_SIZE_BYTES
        ):
            remaining = int.from_bytes(header[4:], "big")
            while remaining and (data := response.raw.read(min(remaining, _PIECE))):
                remaining -= len(data)
                yield data


class _Dial:
    """Factory of byte streams to the daemon."""

    def __init__(self, node: Node, transport: paramiko.Transport | None) -> None:
        self.transport = transport
        self._argv = (*node.docker, "system", "dial-stdio")
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._marker = f"vlaunch-{secrets.token_hex(8)}"

    def open(self) -> Any:
        """Return a new socket, or a channel with the same methods."""
        return self._local() if self.transport is None else self._remote(self.transport)

    def close(self) -> None:
        """Stop the docker clients on this machine; those on a node exit with their channels."""
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.terminate()
            process.wait(timeout=10)

    def _remote(self, transport: paramiko.Transport) -> paramiko.Channel:
        channel = transport.open_session(timeout=DIAL_TIMEOUT)
        channel.settimeout(DIAL_TIMEOUT)
        argv = ("sh", "-c", _PROGRAM, "vlaunch", self._marker, *self._argv)
        channel.exec_command(f"exec {envelope.shell_line(argv)}")
        output = bytearray()
        deadline = time.monotonic() + DIAL_TIMEOUT
        while not output.endswith(f"{self._marker}\n".encode()):
            data = channel.recv(4096)
            if not data or len(output) > _NOISE or time.monotonic() > deadline:
                channel.close()
                raise ConnectionError(
                    output[-2000:].decode("utf-8", errors="replace") or "the login shell exited"
                )
            output += data
        return channel

    def _local(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                end = theirs.fileno()
                process = subprocess.Popen(
                    self._argv,
                    stdin=end,
                    stdout=end,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        with self._lock:
            self._processes.append(process)
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
        # urllib3's version needs a file descriptor, for which paramiko opens a pipe per channel.
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

    def send(
        self, request: Any, stream: bool = False, *args: Any, **options: Any
    ) -> requests.Response:
        """Send a request; limits the size and duration of replies that are not streamed."""
        response = super().send(request, True, *args, **options)
        if not stream or response.status_code >= 400:
            deadline, content = time.monotonic() + _TIMEOUT, bytearray()
            for piece in response.iter_content(_PIECE):
                content += piece
                if len(content) > _LIMIT or time.monotonic() > deadline:
                    response.close()
                    raise ConnectionError(
                        f"an answer of more than {_LIMIT >> 20} MiB, or {_TIMEOUT:.0f} seconds"
                    )
            response._content = bytes(content)
        return response

    def get_connection(self, url: str | bytes, proxies: object = None) -> _Pool:
        """Return the pool of the daemon for any address."""
        return self._pool

    def close(self) -> None:
        super().close()
        self._pool.close()
