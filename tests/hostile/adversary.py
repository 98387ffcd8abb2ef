"""An SSH server, in this process, that admits every user and answers as a test likes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

from launcher.core.domain import Node, Ssh
from tests.ssh import sshd

# Answers a command: its channel, and its line.
Act = Callable[[paramiko.Channel, str], None]


class Adversary:
    """A server on loopback; `act` answers every command in its own thread.

    After `window` bytes a client must wait for `act` to read.
    """

    def __init__(self, folder: Path, act: Act, *, window: int = 2**21) -> None:
        self.act, self.sent, self._window = act, 0, window
        self._host_key = paramiko.ECDSAKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self.closed = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._known_hosts = folder / "known_hosts"
        self._known_hosts.write_text(
            f"[127.0.0.1]:{self.port} {self._host_key.get_name()} {self._host_key.get_base64()}\n"
        )
        self._key = folder / "key"
        paramiko.ECDSAKey.generate().write_private_key_file(str(self._key))
        threading.Thread(target=self._accept, daemon=True).start()

    def node(self, name: str = "gpu01") -> Node:
        """Return this server as a node."""
        ssh = Ssh(
            user="ops",
            port=self.port,
            identity=str(self._key),
            known_hosts=str(self._known_hosts),
            connect_timeout=10.0,
        )
        return Node(
            name=name, host="127.0.0.1", ip="127.0.0.1", gpus=0, head=name == "gpu01", ssh=ssh
        )

    def send(self, channel: paramiko.Channel, data: bytes, *, error: bool = False) -> bool:
        """Send data; False when the client is gone."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            (channel.sendall_stderr if error else channel.sendall)(data)
            self.sent += len(data)
            return True
        return False

    @staticmethod
    @contextlib.contextmanager
    def listening() -> Iterator[tuple[int, list[object]]]:
        """Listen on a local port inside the block, and record a connection."""
        connections: list[object] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1], connections
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connections.append(listener.accept())

    def close(self) -> None:
        """Close the listener and all connections."""
        self.closed.set()
        self._listener.close()
        for transport in self._transports:
            transport.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                transport = paramiko.Transport(client, default_window_size=self._window)
                self._transports.append(transport)
                transport.add_server_key(self._host_key)
                transport.start_server(server=_Server(self))


class _Server(paramiko.ServerInterface):
    def __init__(self, of: Adversary) -> None:
        self._of = of

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._act, args=(channel, command.decode()), daemon=True).start()
        return True

    def _act(self, channel: paramiko.Channel, line: str) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._of.act(channel, line)
            channel.close()


def marker(line: str) -> bytes:
    """Return the marker that the client expects before a command's output."""
    match = re.search(r"vlaunch-[0-9a-f]{16}", line)
    assert match
    return match[0].encode() + b"\n"


def inventory_of(adversary: Adversary, *names: str):  # type: ignore[no-untyped-def]
    """Return an inventory whose nodes all are this server."""
    return sshd.inventory(*(adversary.node(name) for name in names or ("gpu01",)))
