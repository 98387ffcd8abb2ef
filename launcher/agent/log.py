"""The agent's lines in its container's log."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

_EVERY = 60.0  # seconds in which one line of a limited log is printed once
_MOST = 20  # different lines in that time


def say(text: str) -> None:
    """Print a line between vLLM's own; parts of it may come from other hosts, in letters that this
    output cannot show.
    """
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    encoding = sys.stdout.encoding or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # ValueError: the output is closed
        print(
            "vlaunch agent: " + printable.encode(encoding, "replace").decode(encoding), flush=True
        )


def trace(where: str) -> None:
    """Print the exception that is being handled, each line with where it was raised."""
    for line in traceback.format_exc().splitlines():
        say(f"{where}: {line}")


class LimitedLog:
    """Lines of which each is printed once a minute, because other hosts can cause any number."""

    def __init__(self) -> None:
        self._printed: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line unless that was done a moment ago."""
        now = time.monotonic()
        self._printed = {line: at for line, at in self._printed.items() if now - at < _EVERY}
        if text not in self._printed and len(self._printed) < _MOST:
            self._printed[text] = now
            say(text)
