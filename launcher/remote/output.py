"""What a command says: kept up to a limit, from the marker on, whole lines handed over as they come when someone follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LIMIT: Final = 8 * 2**20  # bytes kept of each stream of one command
TRUNCATED: Final = "\n…[truncated]"
_NOISE: Final = 64 * 2**10  # bytes looked through for the marker


class Output:
    """One stream of one command.

    Args:
        marker: the line before which everything is a login shell's noise.
        on_line: called with each line instead of keeping it.
    """

    def __init__(self, marker: str, on_line: Callable[[str], None] | None = None) -> None:
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._on_line = on_line
        self._parts: list[bytes] = []
        self._size = 0
        self._cut = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if not self._started:
            data = b"".join([*self._parts, data])
            _, found, rest = data.partition(self._marker)
            if not found:
                self._parts = [data[-_NOISE:]]
                return
            self._started, self._parts, data = True, [], rest
        if self._on_line is not None:
            self._follow(data, self._on_line)
        elif data:
            room = LIMIT - self._size
            self._cut = self._cut or len(data) > room
            self._parts.append(data[: max(room, 0)])
            self._size += len(self._parts[-1])

    def end(self) -> str:
        """Return the text kept; the noise itself when the command never started, for it then says why."""
        data = b"".join(self._parts)
        if self._on_line is not None and self._started:
            if data:
                self._on_line(_text(data))
            return ""
        return _text(data) + (TRUNCATED if self._cut else "")

    def _follow(self, data: bytes, on_line: Callable[[str], None]) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self._size = [], 0
            for text in lines:
                on_line(_text(text))
        if self._size < LIMIT:  # a line longer than this is cut
            self._parts.append(rest)
            self._size += len(rest)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
