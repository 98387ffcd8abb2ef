"""What a command says: kept up to a limit, from the marker on, whole lines handed over as they come
when someone follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LIMIT: Final = 8 * 2**20  # bytes kept of each stream of one command
LONGEST_LINE: Final = 2**20  # bytes of one line that is followed
TRUNCATED: Final = "\n…[truncated]"
_NOISE: Final = 64 * 2**10  # bytes looked through for the marker

OnLine = Callable[[str, bool], None]  # a line, and True for one of standard error


class Output:
    """One stream of one command.

    Args:
        marker: the line before which everything is a login shell's noise.
        on_line: called with each line instead of keeping it.
    """

    def __init__(self, marker: str, on_line: Callable[[str], None] | None = None) -> None:
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._lines = Lines(on_line) if on_line is not None else None
        self._kept = bytearray()
        self._cut = False

    @classmethod
    def both(cls, marker: str, on_line: OnLine | None) -> tuple[Output, Output]:
        """Return the standard output and the standard error of a command."""
        if on_line is None:
            return cls(marker), cls(marker)
        return cls(marker, lambda text: on_line(text, False)), cls(
            marker, lambda text: on_line(text, True)
        )

    @property
    def started(self) -> bool:
        """True once the marker has come: the command began."""
        return self._started

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if not self._started:
            self._kept += data
            _, found, rest = self._kept.partition(self._marker)
            if not found:
                del self._kept[:-_NOISE]
                return
            self._started, self._kept, data = True, bytearray(), bytes(rest)
        if self._lines is not None:
            self._lines.feed(data)
            return
        room = LIMIT - len(self._kept)
        self._cut = self._cut or len(data) > room
        if room > 0:
            self._kept += data[:room]

    def end(self) -> str:
        """Return the text kept; the noise itself when the command never started, for it then says
        why.
        """
        if self._lines is not None and self._started:
            self._lines.end()
            return ""
        return _text(self._kept) + (TRUNCATED if self._cut else "")


class Lines:
    """Bytes as whole lines of text; of a line that is too long the beginning counts.

    Args:
        on_line: called with each line, without its line break.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._keep(line)
            self._on_line(_text(self._rest))
            self._rest.clear()
        self._keep(rest)

    def end(self) -> None:
        """Hand over a last line that has no line break."""
        if self._rest:
            self._on_line(_text(self._rest))
            self._rest.clear()

    def _keep(self, data: bytes) -> None:
        if (room := LONGEST_LINE - len(self._rest)) > 0:
            self._rest += data[:room]


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", errors="replace")
