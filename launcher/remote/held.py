"""A command that lives beside the others, for as long as it is needed: whoever ends its input, ends
it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from launcher.model import Answer
from launcher.remote import envelope
from launcher.remote.running import Running

# lines that nobody has read yet; the oldest makes room for the next, for nobody may be reading
_LINES: Final = 100
_LONGEST: Final = 8192  # characters of one

Talk = Callable[[Callable[[bytes], None]], None]


class Held:
    """A command that runs in a thread of its own until `end` is called, its connection breaks, or
    it ends by itself.

    Args:
        node: where it runs.
        run: runs it to its end; it registers with the `Running`, and calls `put` with each `Line`
            as it comes, and the last argument with what sends to it.
    """

    def __init__(self, node: str, run: Callable[[Running, Bounded, Talk], Answer]) -> None:
        self._node, self._run = node, run
        self._lock = threading.Lock()
        self._say: Callable[[bytes], None] | None = None
        self._unsaid: list[bytes] = []
        self._running = Running()
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over: Answer | None = None
        self._lines = Bounded(self._said)
        threading.Thread(target=self._work, name="held", daemon=True).start()

    @property
    def over(self) -> Answer | None:
        """Its answer when it has ended, for whatever reason; None while it runs."""
        return self._over

    def next(self, timeout: float) -> Any:
        """Return the next `Line` that it prints, or the `Answer` that ends it; None when nothing
        came in `timeout` seconds.
        """
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=timeout)
        return None

    def say(self, line: str) -> None:
        """Say a line to it, once it can be talked to (`Command.talk`); in vain when it is over.

        Raises ValueError for a line that would not arrive as it is.
        """
        data = envelope.spoken(line)
        with self._lock:
            if self._say is None:
                self._unsaid.append(data)
                return
        self._say(data)

    def end(self) -> None:
        """End it; returns at once."""
        self._running.cancel()

    def talk(self, say: Callable[[bytes], None]) -> None:
        """Take what sends to it, when it has begun."""
        with self._lock:
            for data in self._unsaid:
                say(data)
            self._say, self._unsaid = say, []

    def _work(self) -> None:
        try:
            self._over = self._run(self._running, self._lines, self.talk)
        # a bug here must reach the caller, not vanish with the thread
        except BaseException as error:
            self._over = Answer(node=self._node, code=255, err=f"{type(error).__name__}: {error}")
        self._said.put(self._over)


class Bounded:
    """Takes lines for a queue, as many as there is room for."""

    def __init__(self, kept: queue.SimpleQueue[Any]) -> None:
        self._queue = kept

    def put(self, line: Any) -> None:
        """Keep a line."""
        if self._queue.qsize() >= _LINES:
            with contextlib.suppress(queue.Empty):  # somebody reads after all
                self._queue.get_nowait()
        self._queue.put(replace(line, text=line.text[:_LONGEST]))
