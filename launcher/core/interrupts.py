"""Deferral of signals, for steps that must not be interrupted halfway. Standard library only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGTERM and SIGINT to the end of the block; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[tuple[int, Any]] = []
    handlers = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGINT)
        if callable(handler := signal.getsignal(number))
    }
    for signal_number in handlers:
        signal.signal(signal_number, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    for number, frame in deferred[:1]:
        handlers[signal.Signals(number)](number, frame)
