"""A machine in the middle of a connection, which changes what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """A port of loopback that leads to another one, or a `door` that listens elsewhere and what
    `connect` connects to.

    `change` is given what comes from the side that was connected to, and returns what is passed on;
    `back` is the same for the other direction.
    """

    def __init__(
        self,
        port: int,
        change: Callable[[bytes], bytes],
        back: Callable[[bytes], bytes] = bytes,
        *,
        door: socket.socket | None = None,
        connect: Callable[[], socket.socket] | None = None,
    ) -> None:
        self._connect = connect or (lambda: socket.create_connection(("127.0.0.1", port)))
        self._change, self._back = change, back
        self._door = door or socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._door, *self._ends):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join(10)
        for each in (self._door, *self._ends):
            each.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._door.accept()[0]
                self._ends.append(client)
                server = self._connect()
                self._ends.append(server)
                self._start(_pass, client, server, self._back)
                self._start(_pass, server, client, self._change)


def _pass(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
        target.shutdown(socket.SHUT_WR)
