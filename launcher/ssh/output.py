"""Output of a command after the marker, buffered up to a limit or passed on line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LIMIT: Final = 8 * 2**20  # bytes buffered per stream of one command
LONGEST_LINE: Final = 2**20  # bytes passed on of one line
TRUNCATED: Final = "\n…[truncated]"
_NOISE: Final = 64 * 2**10  # bytes searched for the marker

OnLine = Callable[[str, bool], None]  # a line, and True if it is from standard error


class Output:
    """One stream of one command.

    Args:
        marker: the line that ends the login shell's own output.
        on_line: called with each line, which is then not buffered.
    """

    def __init__(self, marker: str, on_line: Callable[[str], None] | None = None) -> None:
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._lines = Lines(on_line) if on_line is not None else None
        self._buffer = bytearray()
        self._cut = False

    @classmethod
    def make_pair(cls, marker: str, on_line: OnLine | None) -> tuple[Output, Output]:
        """Create the standard output and the standard error of a command."""
        if on_line is None:
            return cls(marker), cls(marker)
        return cls(marker, lambda text: on_line(text, False)), cls(
            marker, lambda text: on_line(text, True)
        )

    @property
    def started(self) -> bool:
        """True once the marker has arrived: the command has started."""
        return self._started

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        if not self._started:
            self._buffer += data
            _, separator, rest = self._buffer.partition(self._marker)
            if not separator:
                del self._buffer[:-_NOISE]
                return
            self._started, self._buffer, data = True, bytearray(), bytes(rest)
        if self._lines is not None:
            self._lines.feed(data)
            return
        room = LIMIT - len(self._buffer)
        self._cut = self._cut or len(data) > room
        if room > 0:
            self._buffer += data[:room]

    def end(self) -> str:
        """Return the buffered text; if the command never started, the login shell's output, which
        usually shows the reason.
        """
        if self._lines is not None and self._started:
            self._lines.end()
            return ""
        return _text(self._buffer) + (TRUNCATED if self._cut else "")


class Lines:
    """Splitter of bytes into lines of text; truncates long lines.

    Args:
        on_line: called with each line, without its line break.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        *complete_lines, rest = data.split(b"\n")
        for line in complete_lines:
            self._keep(line)
            self._on_line(_text(self._rest))
            self._rest.clear()
        self._keep(rest)

    def end(self) -> None:
        """Pass on a last line that has no line break."""
        if self._rest:
            self._on_line(_text(self._rest))
            self._rest.clear()

    def _keep(self, data: bytes) -> None:
        if (room := LONGEST_LINE - len(self._rest)) > 0:
            self._rest += data[:room]


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", errors="replace")
