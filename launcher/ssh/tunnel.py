"""A local TCP port that leads to an address as a node sees it, for endpoints behind a firewall."""

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
_EVERY: Final = 1.0  # seconds between looks at the SSH connection


class Tunnel:
    """Listens on 127.0.0.1 until closed; `port` is where.

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
        self._node, self._transport, self._there = node, transport, (host, port)
        try:
            self._listener = socket.create_server(("127.0.0.1", local_port))
        except OSError as error:
            hint = "choose another local port, or 0 for any free one"
            raise NodeError(
                node, f"port {local_port} of this machine is taken", evidence=str(error), hint=hint
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._open: set[Any] = {self._listener}  # sockets and channels, which have the same methods
        threading.Thread(target=self._accept, name=f"tunnel-{node}", daemon=True).start()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Carry connections until the caller is interrupted; raises NodeError when the SSH
        connection ends.
        """
        never = threading.Event()
        while self._transport is None or self._transport.is_active():
            never.wait(_EVERY)
        raise NodeError(
            self._node,
            "the SSH connection ended, and the tunnel with it",
            hint="run the same command again",
        )

    def close(self) -> None:
        """Stop listening and drop the connections in it."""
        for stream in list(self._open):
            with contextlib.suppress(OSError, EOFError):
                stream.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            with contextlib.suppress(OSError, EOFError):
                stream.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, origin = self._listener.accept()
                threading.Thread(target=self._carry, args=(here, origin), daemon=True).start()

    def _carry(self, here: socket.socket, origin: tuple[str, int]) -> None:
        with contextlib.closing(here):
            try:
                there = self._connect(origin)
            except Exception:  # whatever it was, the caller sees its connection close
                return
            with contextlib.closing(there):
                self._open |= {here, there}
                back = threading.Thread(target=_pump, args=(there, here), daemon=True)
                back.start()
                _pump(here, there)
                back.join()
                self._open -= {here, there}

    def _connect(self, origin: tuple[str, int]) -> Any:
        if self._transport is None:
            return socket.create_connection(self._there, timeout=_CONNECT_TIMEOUT)
        return self._transport.open_channel(
            "direct-tcpip", self._there, origin, timeout=_CONNECT_TIMEOUT
        )


def _pump(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        sink.shutdown(socket.SHUT_WR)
