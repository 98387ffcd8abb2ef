"""Logs from files and from standard input: what `vlaunch doctor --from` reads.

A line is of the pod or host that a prefix names, by `kubectl logs --prefix` (`[pod/NAME/CONTAINER]
…`) or by journalctl's short forms (`… HOST UNIT[PID]: …`), else of the file.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from launcher.app.terminal import say
from launcher.core import sizes, untrusted
from launcher.core.errors import RequestError
from launcher.core.secret_patterns import clean
from launcher.tools.diagnosis import Log, Told, log_of

_MOST, _LINES = 16 << 20, 200_000  # bytes and lines of one text: of more, the end
_FILES = 5000  # in an archive
_ALL, _ALL_LINES = 256 << 20, 4_000_000  # of an archive: of more, the beginning
_HINT = "name a file, the archive of `vlaunch collect`, or `-` for standard input"
_KUBECTL = re.compile(r"\[pod/([a-z0-9.-]{1,253})/([a-z0-9-]{1,63})\] ?(.*)")
# Nov 22 10:00:00 host unit[12]: text; or the first column is 2026-11-22T10:00:00+00:00.
_JOURNAL = re.compile(
    r"((?:[A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:Z|[+-]\d\d:?\d\d)))"
    r" ([\w.-]{1,253}) ([\w@.\\/:-]{1,128}?)(?:\[\d{1,9}\])?: (.*)"
)
_LOGS = 400  # of all pods and hosts of a text
# What reading a broken or hostile archive raises.
ERRORS: Any = OSError, EOFError, RecursionError, ValueError
ERRORS += tarfile.TarError, lzma.LZMAError, zlib.error
_AT_ONCE: Final = 2 << 20  # bytes: `tarfile` reads a header of any size in one piece
_PACKED: Any = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))


def read(names: tuple[str, ...]) -> dict[str, Told]:
    """Return what each pod, host or file told; raises RequestError for what cannot be read."""
    found: dict[str, Told] = {}
    for name in names:
        for label, data in _texts(name):
            # Others' logs hold secrets that nobody has told us of.
            text = clean(data.decode(errors="replace"))
            for node, one in split_logs(text, label).items():
                before = found.get(node)
                found[node] = Told(logs=(*before.logs, *one.logs)) if before else one
    return found


def split_logs(text: str, name: str) -> dict[str, Told]:
    """Return what each pod, host or container told, by its name; `name` is of lines without a
    prefix.
    """
    sorted_out: dict[tuple[str, str], list[str]] = {}
    for node, what, line in _split_lines(text, name):
        key = (node, what) if (node, what) in sorted_out or len(sorted_out) < _LOGS else (name, "")
        sorted_out.setdefault(key, []).append(line)
    found: dict[str, list[Log]] = {}
    for number, ((node, what), lines) in enumerate(sorted_out.items()):
        # An engine's log, for all that is known: what it says after it was ready counts.
        log = log_of(f"engine-{number}", what or "log", "\n".join(lines))
        if log.lines:
            found.setdefault(node, []).append(log)
    return {node: Told(logs=tuple(logs)) for node, logs in found.items()}


class TooLarge(ValueError):
    """An archive unpacks to more than may be read."""


def is_archive(file: IO[bytes]) -> bool:
    """True for a tar archive, and for a file that gzip, bzip2 or xz has packed."""
    start = file.read(512)
    file.seek(0)
    return start[257:262] == b"ustar" or any(start.startswith(magic) for magic, _ in _PACKED)


def members(file: IO[bytes], most: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the plain files of an archive, of which `most` bytes are unpacked; raises `ERRORS`."""
    start = file.read(6)
    file.seek(0)
    unpack = next((unpack for magic, unpack in _PACKED if start.startswith(magic)), None)
    bounded: Any = _Bounded(unpack(file) if unpack else file, most)
    with tarfile.open(fileobj=bounded, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]
            if (content := archive.extractfile(member) if member.isreg() else None) is not None:
                yield member, content


class _Bounded:
    """A file of which only the beginning may be read, in small pieces."""

    def __init__(self, inner: IO[bytes], most: int) -> None:
        self._inner, self._most = inner, most
        self.tell, self.seekable = inner.tell, inner.seekable

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise TooLarge(f"it has a header of {size} bytes")
        if self.tell() + size > self._most:
            self.seek(self._most + 1)
        return self._inner.read(size)

    def seek(self, place: int) -> None:
        if place > self._most:
            raise TooLarge(f"it unpacks to more than {self._most >> 20} MiB")
        self._inner.seek(place)


def _texts(name: str) -> Iterator[tuple[str, bytes]]:
    if name == "-":
        yield "standard input", _end(sys.stdin.buffer, "standard input")
        return
    path = Path(name)
    try:
        with path.open("rb") as file:
            if file.seekable() and is_archive(file):
                yield from _members(file, path.name)
            else:
                yield path.name, _end(file, path.name)
    except ERRORS as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(f"{name} cannot be read", evidence=said, hint=_HINT) from None


def _members(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the logs of an archive, each by the folder that it lies in: a bundle has one for each
    node.
    """
    size = lines = 0
    try:
        for number, (member, content) in enumerate(members(file, _ALL)):
            # Holes are not stored, but read.
            if number == _FILES or lines > _ALL_LINES or size > _ALL:
                raise TooLarge
            if member.name.endswith((".log", ".txt")):
                data = _end(content, f"{name}: {member.name}")
                size, lines = size + len(data), lines + data.count(b"\n")
                yield Path(member.name).parent.name or name, data
    except TooLarge:
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


def _split_lines(text: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield whose each line is, of which log, and what it says."""
    for line in untrusted.plain(text.replace("\r", "\n")).splitlines():
        if match := _KUBECTL.match(line):
            yield match[1], match[2], match[3]
        elif match := _JOURNAL.match(line):
            yield match[2], match[3], f"{match[1]} {match[4]}"
        else:
            yield name, "", line
