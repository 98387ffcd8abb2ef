"""The lines of a log that comes in blocks: escaped in JSON or not, with any line ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_LINE = 64 << 10  # bytes of a line that are kept
_ESCAPES = (
    (b"\\n", b"\n"),
    (b"\\r", b"\n"),
    (b"\\t", b" "),
    (b"\\u003e", b">"),
    (b"\\u003E", b">"),
    (b"\\u003c", b"<"),
    (b"\\u001b", b"\x1b"),
    (b"\\/", b"/"),
    (b'"', b"\n"),
)


def split(chunks: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a stream, many at a time, at most `MAX_LINE` bytes of each; false with a
    last line that has no end.

    Lines that are escaped in JSON (or in Python's `repr`) are unescaped.
    """
    rest: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *more = chunk.replace(b"\r", b"\n").split(b"\n")
        if size <= MAX_LINE:
            rest.append(first)
            size += len(first)
        if more:
            lines = [b"".join(rest), *more]
            last = lines.pop()
            if _is_escaped(chunk) or _is_escaped(lines[0]):
                lines = [part for line in lines for part in _unescape(line[:MAX_LINE])]
            yield [line[:MAX_LINE] for line in lines], True
            rest, size = [last], len(last)
    *lines, last = _unescape(b"".join(rest)[:MAX_LINE])
    if lines:
        yield lines, True
    if last:
        yield [last], False


def _is_escaped(text: bytes) -> bool:
    return b"\\n" in text or b"\\u003" in text or b'{"' in text


def _unescape(line: bytes) -> list[bytes]:
    """Return the strings of a line of JSON, each line of them by itself."""
    if not _is_escaped(line):
        return [line]
    for code, meaning in _ESCAPES:
        line = line.replace(code, meaning)
    return line.split(b"\n")
