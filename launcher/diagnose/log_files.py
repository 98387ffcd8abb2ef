"""Logs from files and from standard input: what `vlaunch doctor --from` reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from launcher.app.terminal import say
from launcher.core import sizes
from launcher.core.errors import RequestError
from launcher.core.secret_patterns import clean
from launcher.diagnose import log_text
from launcher.distribute import archive
from launcher.tools.diagnosis_read import Told

_MOST, _LINES = 16 << 20, 200_000  # bytes and lines of one text: of more, the end
_FILES = 5000  # in an archive
_ALL, _ALL_LINES = 256 << 20, 4_000_000  # of an archive: of more, the beginning
_HINT = "name a file, the archive of `vlaunch collect`, or `-` for standard input"


def read(names: tuple[str, ...]) -> dict[str, Told]:
    """Return what each pod, host or file told; raises RequestError for what cannot be read."""
    found: dict[str, Told] = {}
    for name in names:
        for label, data in _texts(name):
            # Others' logs hold secrets that nobody has told us of.
            text = clean(data.decode(errors="replace"))
            for node, one in log_text.told(text, label).items():
                before = found.get(node)
                found[node] = Told(logs=(*before.logs, *one.logs)) if before else one
    return found


def _texts(name: str) -> Iterator[tuple[str, bytes]]:
    if name == "-":
        yield "standard input", _end(sys.stdin.buffer, "standard input")
        return
    path = Path(name)
    try:
        with path.open("rb") as file:
            if file.seekable() and archive.is_archive(file):
                yield from _members(file, path.name)
            else:
                yield path.name, _end(file, path.name)
    except archive.ERRORS as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(f"{name} cannot be read", evidence=said, hint=_HINT) from None


def _members(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the logs of an archive, each by the folder that it lies in: a bundle has one for each
    node.
    """
    size = lines = 0
    try:
        for number, (member, content) in enumerate(archive.members(file, _ALL)):
            # Holes are not stored, but read.
            if number == _FILES or lines > _ALL_LINES or size > _ALL:
                raise archive.TooLarge
            if member.name.endswith((".log", ".txt")):
                data = _end(content, f"{name}: {member.name}")
                size, lines = size + len(data), lines + data.count(b"\n")
                yield Path(member.name).parent.name or name, data
    except archive.TooLarge:
        most = f"{sizes.told(_ALL)}, {_ALL_LINES:,} lines or {_FILES:,} files"
        say(f"{name}: read the first {most}, and left out the rest; unpack it, and name the logs")


def _end(file: IO[bytes], name: str) -> bytes:
    """Return the end of a text, from the first whole line on; say what is left out."""
    left_out, data = 0, bytearray()
    if file.seekable():
        left_out = max(0, file.seek(0, 2) - _MOST)
        file.seek(left_out)
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > 2 * _MOST:  # of a pipe
            left_out += len(data) - _MOST
            del data[:-_MOST]
    place = len(data)
    for _ in range(_LINES):
        if (place := data.rfind(b"\n", 0, place)) < 0:
            break
    begin = max(0, len(data) - _MOST, place + 1)
    if left_out or begin:
        begin = max(begin, data.find(b"\n", max(0, begin - 1)) + 1)
        say(f"{name}: only its end was read; its first {left_out + begin:,} bytes were left out")
    return bytes(data[begin:])
