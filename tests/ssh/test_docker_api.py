"""Docker API over a node's SSH connection, with a fake docker client; the lab tests use a real
daemon.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import docker.errors
import pytest

from launcher.core.domain import Node
from launcher.core.errors import NodeError
from launcher.core.transport import Command
from launcher.failures.explain import docker_error
from launcher.ssh import docker_api
from launcher.ssh.fleet import Fleet
from tests.ssh import sshd

STAND_IN = '''
"""`docker system dial-stdio`, with a daemon that knows three addresses."""
import json, os, sys
assert sys.argv[1:] == ["system", "dial-stdio"], sys.argv
open(os.path.join(os.path.dirname(__file__), "starts"), "a").write("x")
while True:
    request = sys.stdin.buffer.readline()
    if not request:
        break
    while sys.stdin.buffer.readline().strip():
        pass
    path = request.split()[1].decode()
    if path.endswith("/logs?stderr=1&stdout=1&timestamps=0&follow=1&tail=all"):
        texts = (b"one\\n", b"two\\n")
        frames = b"".join(b"\\x01\\0\\0\\0" + len(t).to_bytes(4, "big") + t for t in texts)
        sys.stdout.buffer.write(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n" + frames)
        sys.stdout.flush()
        break
    if path == "/version":
        status, body = "200 OK", {"ApiVersion": "1.44"}
    elif path == "/v1.44/containers/c/json":
        status, body = "200 OK", {"Id": "c", "Config": {"Tty": False}}
    elif "/archive?path=" in path:
        import io, tarfile
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            entry = tarfile.TarInfo("f")
            entry.size = 3_000_000
            if path.endswith("link"):
                entry.size, entry.type, entry.linkname = 0, tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry, io.BytesIO(b"0123456789" * 300_000))
        stat = "X-Docker-Container-Path-Stat: e30=\\r\\n"
        data = buffer.getvalue()
        head = f"HTTP/1.1 200 OK\\r\\n{stat}Transfer-Encoding: chunked\\r\\n\\r\\n"
        head += f"{len(data):x}\\r\\n"
        sys.stdout.buffer.write(head.encode() + data + b"\\r\\n0\\r\\n\\r\\n")
        sys.stdout.flush()
        continue
    elif path == "/v1.44/_ping":
        status, body = "200 OK", "OK"
    else:
        status, body = "404 Not Found", {"message": "No such container: nothing"}
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\\r\\nContent-Type: application/json\\r\\n"
    head += f"Content-Length: {len(data)}\\r\\n\\r\\n"
    sys.stdout.buffer.write(head.encode() + data)
    sys.stdout.flush()
'''

Kind = Literal["ssh", "local"]


@pytest.fixture
def make(server: sshd.Sshd, tmp_path: Path) -> Callable[..., Node]:
    """Return a node with a fake docker client."""

    def node(program: str = STAND_IN, kind: Kind = "ssh", on: sshd.Sshd = server) -> Node:
        (tmp_path / "docker.py").write_text(program)
        command = (sys.executable, "-I", str(tmp_path / "docker.py"))
        return replace(on.node(), docker=command, connection=kind)

    return node


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_files_are_read_from_a_container(
    make: Callable[..., Node], tmp_path: Path, kind: Kind
) -> None:
    """Over one channel, for any size; a link is rejected."""
    with Fleet(sshd.inventory(make(kind=kind))) as fleet:
        for _ in range(3):
            blocks = list(fleet.read_file("gpu01", "c", "/data/file"))
            assert b"".join(blocks) == b"0123456789" * 300_000
            assert max(map(len, blocks)) <= 2**20
        with pytest.raises(NodeError, match="not a regular file"):
            list(fleet.read_file("gpu01", "c", "/data/link"))
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_one_client_serves_many_requests(
    make: Callable[..., Node], tmp_path: Path, kind: Kind
) -> None:
    """The version is the daemon's, and all requests go through one docker client on the node."""
    with Fleet(sshd.inventory(make(kind=kind))) as fleet:
        client = fleet.docker("gpu01")
        assert client.api_version == "1.44"
        for _ in range(3):
            assert client.inspect_container("c")["Id"] == "c"
        assert fleet.docker("gpu01") is client
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_logs_are_followed(make: Callable[..., Node], kind: Kind) -> None:
    """Frames are decoded to the container's output."""
    with Fleet(sshd.inventory(make(kind=kind))) as fleet:
        assert list(fleet.docker("gpu01").logs("c", stream=True, follow=True)) == [
            b"one\n",
            b"two\n",
        ]


def test_commands_and_docker_share_the_connection(make: Callable[..., Node]) -> None:
    """Docker's API opens no second SSH connection."""
    with Fleet(sshd.inventory(make())) as fleet:
        fleet.docker("gpu01")
        before = fleet.transport("gpu01")
        assert [answer.code for answer in fleet.run([Command(node="gpu01", argv=("true",))])] == [0]
        assert fleet.transport("gpu01") is before


def test_noise_of_a_login_shell(
    make: Callable[..., Node], start_server: Callable[..., sshd.Sshd]
) -> None:
    """Output of start-up files is not parsed as HTTP."""
    noisy = start_server(
        extra=(
            'ForceCommand echo "HTTP/1.1 500 Welcome"; printf "no line break"; eval'
            ' "$SSH_ORIGINAL_COMMAND"'
        )
    )
    with Fleet(sshd.inventory(make(on=noisy))) as fleet:
        assert fleet.docker("gpu01").api_version == "1.44"


def test_errors_of_the_daemon(make: Callable[..., Node]) -> None:
    """The error names the node and quotes the daemon."""
    with (
        Fleet(sshd.inventory(make())) as fleet,
        pytest.raises(NodeError, match="gpu01: Docker refused: No such container: nothing"),
        docker_api.errors("gpu01"),
    ):
        fleet.docker("gpu01").inspect_container("nothing")


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_errors_of_the_docker_client(make: Callable[..., Node], kind: Kind) -> None:
    """A failed docker client's message is quoted."""
    program = (
        "import sys; sys.exit('Cannot connect to the Docker daemon at unix:///x. Is the docker"
        " daemon running?')"
    )
    with (
        Fleet(sshd.inventory(make(program, kind)), explain=docker_error) as fleet,
        pytest.raises(NodeError, match="Docker is not running") as caught,
    ):
        fleet.docker("gpu01")
    assert caught.value.evidence.startswith("Cannot connect to the Docker daemon")


def test_docker_is_not_installed(server: sshd.Sshd) -> None:
    """The error of a node without docker is clear."""
    node = replace(server.node(), docker=("no-such-docker",))
    with (
        Fleet(sshd.inventory(node)) as fleet,
        pytest.raises(NodeError, match="Docker's API did not answer"),
    ):
        fleet.docker("gpu01")


def test_all_of_dockers_exceptions_are_mapped() -> None:
    """New exception classes in the SDK fail this test unless they are mapped."""
    for value in vars(docker.errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, docker_api.FAILURES), value
