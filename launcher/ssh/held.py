"""Commands that run: all of a call's can be ended at once, and one can be held beside the others
until it is ended.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from launcher.core.domain import Answer
from launcher.ssh import envelope

# lines that wait to be read; the oldest makes room for the next, for it may be in vain
_LINES: Final = 100
_LONGEST: Final = 8192  # characters of one

Talk = Callable[[Callable[[bytes], None]], None]


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


class Held:
    """A command that runs in a thread of its own until `end` is called, its connection breaks, or
    it ends by itself.

    Args:
        node: where it runs.
        run: runs it to its end; it registers with the `Running`, calls `put` of the second argument
            with each `Line`, and the last argument with a function that sends bytes to the command.
    """

    def __init__(self, node: str, run: Callable[[Running, Bounded, Talk], Answer]) -> None:
        self._node, self._run = node, run
        self._lock = threading.Lock()
        self._send: Callable[[bytes], None] | None = None
        self._unsent: list[bytes] = []
        self._running = Running()
        self._lines = Bounded()
        self.over: Answer | None = None  # its answer when it has ended, for whatever reason
        threading.Thread(target=self._work, name="held", daemon=True).start()

    def next(self, timeout: float) -> Any:
        """Return the next `Line` that it prints, or the `Answer` that ends it; None when nothing
        came in `timeout` seconds.
        """
        with contextlib.suppress(queue.Empty):
            return self._lines.get(timeout=timeout)
        return None

    def say(self, line: str) -> None:
        """Send a line to a command with `Command.talk`, once it has begun; in vain when it is over.

        Raises ValueError for a line that would not arrive as it is.
        """
        data = envelope.spoken(line)
        with self._lock:
            if self._send is None:
                self._unsent.append(data)
                return
        self._send(data)

    def end(self) -> None:
        """End it; returns at once."""
        self._running.cancel()

    def _work(self) -> None:
        try:
            self.over = self._run(self._running, self._lines, self._begin)
        # a bug here must reach the caller, not vanish with the thread
        except BaseException as error:
            self.over = Answer(node=self._node, code=255, err=f"{type(error).__name__}: {error}")
        self._lines.put(self.over)

    def _begin(self, send: Callable[[bytes], None]) -> None:
        with self._lock:
            for data in self._unsent:
                send(data)
            self._send = send


class Bounded(queue.SimpleQueue[Any]):
    """Lines, and the answer behind them; drops the oldest line when it is full."""

    def put(self, item: Any) -> None:  # type: ignore[override]
        """Keep a line or an answer."""
        if self.qsize() >= _LINES:
            with contextlib.suppress(queue.Empty):  # it is being read after all
                self.get_nowait()
        super().put(item if isinstance(item, Answer) else replace(item, text=item.text[:_LONGEST]))
