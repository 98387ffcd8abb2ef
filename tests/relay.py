"""A relay that changes the data of a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """A relay from a new port on loopback to `port`, or from `listener` to the result of `connect`.
    `change` maps data from the server, `back` data from the client.
    """

    def __init__(
        self,
        port: int,
        change: Callable[[bytes], bytes],
        back: Callable[[bytes], bytes] = bytes,
        *,
        listener: socket.socket | None = None,
        connect: Callable[[], socket.socket] | None = None,
    ) -> None:
        self._connect = connect or (lambda: socket.create_connection(("127.0.0.1", port)))
        self._change, self._back = change, back
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join(60)
        for sock in (self._listener, *self._connections):
            sock.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._connections.append(client)
                server = self._connect()
                self._connections.append(server)
                self._start(_forward, client, server, self._back)
                self._start(_forward, server, client, self._change)


def _forward(
    source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
        target.shutdown(socket.SHUT_WR)
