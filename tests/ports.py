"""Free ports for programs that a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator


def _numbers() -> Iterator[int]:
    """Yield ports of this process: below Linux's dynamic ports, which any connection may take
    between the choice of a port and its use, and none of another pytest worker.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    first = random.SystemRandom().randrange(1000)
    for number in itertools.count(first):
        yield 16_000 + number % 1000 * 16 + worker


_PORTS = _numbers()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses and that no other call returned lately."""
    for port in _PORTS:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError  # `_numbers` does not end
