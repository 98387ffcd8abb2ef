"""Local TCP port forwarded to an address that a node can reach, for endpoints behind a firewall."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from launcher.core.errors import NodeError

if TYPE_CHECKING:
    import paramiko

_CHUNK: Final = 64 * 2**10
_CONNECT_TIMEOUT: Final = 15.0
_EVERY: Final = 1.0  # seconds between checks of the SSH connection


class Tunnel:
    """Listener on 127.0.0.1:`port`, until closed.

    Args:
        node: its name, for errors.
        transport: its SSH connection; None when the node is this machine.
        host: where to connect to, as seen from the node; `port` likewise.
        local_port: 0 for any free one.

    Raises NodeError when the local port is taken.
    """

    def __init__(
        self, node: str, transport: paramiko.Transport | None, host: str, port: int, local_port: int
    ) -> None:
        self._node, self._transport, self._destination = node, transport, (host, port)
        try:
            self._listener = socket.create_server(("127.0.0.1", local_port))
        except OSError as error:
            hint = "choose another local port, or 0 for any free one"
            raise NodeError(
                node, f"port {local_port} of this machine is in use", evidence=str(error), hint=hint
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._open: set[Any] = {self._listener}  # sockets and channels, which have the same methods
        threading.Thread(target=self._accept, name=f"tunnel-{node}", daemon=True).start()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Block until interrupted; raises NodeError when the SSH connection ends."""
        never = threading.Event()
        while self._transport is None or self._transport.is_active():
            never.wait(_EVERY)
        raise NodeError(
            self._node,
            "the SSH connection closed, and the tunnel with it",
            hint="run the same command again",
        )

    def close(self) -> None:
        """Stop listening and drop open connections."""
        for stream in list(self._open):
            with contextlib.suppress(OSError, EOFError):
                stream.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            with contextlib.suppress(OSError, EOFError):
                stream.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, origin = self._listener.accept()
                threading.Thread(target=self._carry, args=(client, origin), daemon=True).start()

    def _carry(self, client: socket.socket, origin: tuple[str, int]) -> None:
        with contextlib.closing(client):
            try:
                remote = self._connect(origin)
            except Exception:  # the client sees its connection close, whatever the error
                return
            with contextlib.closing(remote):
                self._open |= {client, remote}
                reply_thread = threading.Thread(target=_pump, args=(remote, client), daemon=True)
                reply_thread.start()
                _pump(client, remote)
                reply_thread.join()
                self._open -= {client, remote}

    def _connect(self, origin: tuple[str, int]) -> Any:
        if self._transport is None:
            return socket.create_connection(self._destination, timeout=_CONNECT_TIMEOUT)
        return self._transport.open_channel(
            "direct-tcpip", self._destination, origin, timeout=_CONNECT_TIMEOUT
        )


def _pump(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        sink.shutdown(socket.SHUT_WR)
