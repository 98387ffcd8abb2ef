"""Cancellation of running commands, and commands that run in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from launcher.core.domain import Answer
from launcher.ssh import envelope

_LINES: Final = 100  # unread lines; older ones are dropped
_LONGEST: Final = 8192  # characters per line

OnStart = Callable[[Callable[[bytes], None]], None]


class RunningCommands:
    """Commands of one call; `cancel` stops those that run and any that start afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], None]] = {}
        self.cancelled = False

    @contextlib.contextmanager
    def until_done(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `end`, from the cancelling thread, if `cancel` is called before the block exits."""
        with self._lock:
            self._ends[id(stop)] = stop
            cancelled = self.cancelled
        try:
            if cancelled:
                stop()
            yield
        finally:
            with self._lock:
                del self._ends[id(stop)]

    def cancel(self) -> None:
        """Stop all commands; returns at once, the nodes kill the processes."""
        with self._lock:
            self.cancelled = True
            callbacks = list(self._ends.values())
        for stop in callbacks:
            with contextlib.suppress(Exception):
                stop()


class BackgroundCommand:
    """Command in a thread of its own, until it exits, its connection breaks or `end` is called.

    Args:
        node: its name.
        run: runs the command; it registers with its first argument, puts each `Line` into the
            second, and calls the third with a function that sends bytes to the command.
    """

    def __init__(
        self, node: str, run: Callable[[RunningCommands, BoundedQueue, OnStart], Answer]
    ) -> None:
        self._node, self._run = node, run
        self._lock = threading.Lock()
        self._send: Callable[[bytes], None] | None = None
        self._unsent: list[bytes] = []
        self._running = RunningCommands()
        self._lines = BoundedQueue()
        self.over: Answer | None = None  # set once it has exited, for whatever reason
        threading.Thread(target=self._work, name="held", daemon=True).start()

    def next(self, timeout: float) -> Any:
        """Return the next `Line`, or the final `Answer`; None after `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._lines.get(timeout=timeout)
        return None

    def say(self, line: str) -> None:
        """Send a line to a `Command.interactive` once it has started; ignored after its exit.

        Raises ValueError for a line that would not arrive unchanged.
        """
        data = envelope.encode_line(line)
        with self._lock:
            if self._send is None:
                self._unsent.append(data)
                return
        self._send(data)

    def end(self) -> None:
        """Stop the command; returns at once."""
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


class BoundedQueue(queue.SimpleQueue[Any]):
    """Queue of lines and the final answer; drops the oldest line when full."""

    def put(self, item: Any) -> None:  # type: ignore[override]
        """Add a line or an answer."""
        if self.qsize() >= _LINES:
            with contextlib.suppress(queue.Empty):  # the reader was faster
                self.get_nowait()
        super().put(item if isinstance(item, Answer) else replace(item, text=item.text[:_LONGEST]))
