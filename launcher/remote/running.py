"""What is running right now, so that all of it can be ended at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Running:
    """The commands of one call. `cancel` ends those that run and any that start afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], None]] = {}
        self.cancelled = False

    @contextlib.contextmanager
    def until_done(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `end` called, from another thread, if all is cancelled before the block is left."""
        with self._lock:
            self._ends[id(end)] = end
            cancelled = self.cancelled
        try:
            if cancelled:
                end()
            yield
        finally:
            with self._lock:
                del self._ends[id(end)]

    def cancel(self) -> None:
        """End everything; returns at once, the nodes do the killing."""
        with self._lock:
            self.cancelled = True
            ends = list(self._ends.values())
        for end in ends:
            with contextlib.suppress(Exception):
                end()
