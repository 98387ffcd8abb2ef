"""Slow work in threads, beside a loop that must not block. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .health.probe import QUERY_ERRORS

T = TypeVar("T")


class Background(Generic[T]):
    """Slow work in a thread: `value` is set once it is `done`; None if it failed."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error = ""
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.value = work()
        except QUERY_ERRORS as error:
            self.error = f"{type(error).__name__}: {error}"

    @property
    def done(self) -> bool:
        """True if the work has ended, successfully or not."""
        return not self._thread.is_alive()
