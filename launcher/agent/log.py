"""Lines of the agent in its container's log."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

_EVERY = 60.0  # seconds in which one line of a limited log is printed once
_MOST = 20  # different lines in that time


def say(text: str) -> None:
    """Print a line between vLLM's own; replace characters that this output cannot show."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    encoding = sys.stdout.encoding or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # ValueError: the output is closed
        print(
            "vlaunch agent: " + printable.encode(encoding, "replace").decode(encoding), flush=True
        )


def trace(where: str) -> None:
    """Print the current exception, with a prefix on each line."""
    for line in traceback.format_exc().splitlines():
        say(f"{where}: {line}")


class LimitedLog:
    """Log that prints each line once a minute, because other hosts can cause any number."""

    def __init__(self) -> None:
        self._printed: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line, unless it was printed a moment ago."""
        if self._is_new(text):
            say(text)

    def trace(self, where: str, text: str) -> None:
        """Print the current exception, unless one with this text was printed a moment ago."""
        if self._is_new(text):
            trace(where)

    def _is_new(self, text: str) -> bool:
        now = time.monotonic()
        self._printed = {line: at for line, at in self._printed.items() if now - at < _EVERY}
        if text in self._printed or len(self._printed) >= _MOST:
            return False
        self._printed[text] = now
        return True
