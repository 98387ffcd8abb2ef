"""What takes its time, done beside a loop that must not wait. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .probe import SILENT

T = TypeVar("T")


class Background(Generic[T]):
    """Something that takes its time, in a thread: `value` is there when it is `over`; None where it
    could not be had.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error = ""
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.value = work()
        except SILENT as error:
            self.error = f"{type(error).__name__}: {error}"

    @property
    def over(self) -> bool:
        """True when it has ended, well or not."""
        return not self._thread.is_alive()
