"""Logs from files and from standard input, for `vlaunch doctor --log`.

A line belongs to the pod, container or host in its prefix, of `kubectl logs --prefix`
(`[pod/NAME/CONTAINER] …`), `docker compose logs` (`NAME-1 | …`) or journalctl's short formats (`…
HOST UNIT[PID]: …`), otherwise to the file.
"""

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
from launcher.core.secret_patterns import redact_secrets
from launcher.failures.frames import split_lines
from launcher.tools.diagnosis import Log, NodeReport, make_log

_MOST, _LINES = 16 << 20, 200_000  # bytes and lines of one text; the end of longer ones
_MAX_FILES = 5000  # in an archive
_ALL, _ALL_LINES = 256 << 20, 4_000_000  # of an archive; the beginning of larger ones
_HINT = "use a file, the archive of `vlaunch collect`, or `-` for standard input"
_KUBECTL = re.compile(r"\[pod/([a-z0-9.-]{1,253})/([a-z0-9-]{1,63})\] ?(.*)")
_COMPOSE = re.compile(r"([a-zA-Z0-9][\w.-]{0,250}-\d{1,4}) +\| (.*)")
# Nov 22 10:00:00 host unit[12]: text; or the first column is 2026-11-22T10:00:00+00:00.
_JOURNAL = re.compile(
    r"((?:[A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:Z|[+-]\d\d:?\d\d)))"
    r" ([\w.-]{1,253}) ([\w@.\\/:-]{1,128}?)(?:\[\d{1,9}\])?: (.*)"
)
_MAX_LOGS = 400  # of all pods and hosts of a text
# Errors of reading a broken or hostile archive.
ERRORS: Any = OSError, EOFError, RecursionError, ValueError
ERRORS += tarfile.TarError, lzma.LZMAError, zlib.error
_MAX_READ: Final = 2 << 20  # bytes: `tarfile` reads a header of any size in one piece
_PACKED: Any = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))


def read_logs(names: tuple[str, ...]) -> dict[str, NodeReport]:
    """Read the logs of each pod, host or file; raises RequestError for an unreadable file."""
    reports: dict[str, NodeReport] = {}
    for name in names:
        for label, data in _read_texts(name):
            # Logs from other machines may contain secrets that are not in this inventory.
            text = redact_secrets(data.decode(errors="replace"))
            for node, report in split_logs(text, label).items():
                earlier = reports[node].logs if node in reports else ()
                reports[node] = NodeReport(logs=(*earlier, *report.logs))
    return reports


def split_logs(text: str, name: str) -> dict[str, NodeReport]:
    """Split a text into logs by pod, host or container; lines without a prefix belong to `name`."""
    lines_by_log: dict[tuple[str, str], list[str]] = {}
    for node, source, line in _split_lines(text, name):
        key = (node, source)
        if key not in lines_by_log and len(lines_by_log) >= _MAX_LOGS:
            key = (name, "")
        lines_by_log.setdefault(key, []).append(line)
    logs_by_node: dict[str, list[Log]] = {}
    for number, ((node, source), lines) in enumerate(lines_by_log.items()):
        # Possibly an engine's log, so that lines after its readiness count.
        log = make_log(f"engine-{number}", source or "log", "\n".join(lines))
        if log.lines:
            logs_by_node.setdefault(node, []).append(log)
    return {node: NodeReport(logs=tuple(logs)) for node, logs in logs_by_node.items()}


class ArchiveTooLarge(ValueError):
    """An archive unpacks to more than may be read."""


def is_archive(file: IO[bytes]) -> bool:
    """True for a tar archive, and for a file compressed by gzip, bzip2 or xz."""
    start = file.read(512)
    file.seek(0)
    return start[257:262] == b"ustar" or any(start.startswith(magic) for magic, _ in _PACKED)


def archive_members(file: IO[bytes], max_bytes: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the regular files of an archive, up to `max_bytes` unpacked; raises `ERRORS`."""
    start = file.read(6)
    file.seek(0)
    unpack = next((unpack for magic, unpack in _PACKED if start.startswith(magic)), None)
    bounded: Any = _BoundedFile(unpack(file) if unpack else file, max_bytes)
    with tarfile.open(fileobj=bounded, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]
            if (content := archive.extractfile(member) if member.isreg() else None) is not None:
                yield member, content


class _BoundedFile:
    """Reader of a file's beginning, in small pieces."""

    def __init__(self, inner: IO[bytes], max_bytes: int) -> None:
        self._inner, self._most = inner, max_bytes
        self.tell, self.seekable = inner.tell, inner.seekable

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise ArchiveTooLarge(f"it has a header of {size} bytes")
        if self.tell() + size > self._most:
            self.seek(self._most + 1)
        return self._inner.read(size)

    def seek(self, offset: int) -> None:
        if offset > self._most:
            raise ArchiveTooLarge(f"it unpacks to more than {self._most >> 20} MiB")
        self._inner.seek(offset)


def _read_texts(name: str) -> Iterator[tuple[str, bytes]]:
    if name == "-":
        yield "standard input", _read_end(sys.stdin.buffer, "standard input")
        return
    path = Path(name)
    try:
        with path.open("rb") as file:
            if file.seekable() and is_archive(file):
                yield from _archive_logs(file, path.name)
            else:
                yield path.name, _read_end(file, path.name)
    except ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(f"{name} cannot be read", evidence=reason, hint=_HINT) from None


def _archive_logs(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the logs of an archive by their folders: a bundle has one folder per node."""
    size = lines = 0
    try:
        for number, (member, content) in enumerate(archive_members(file, _ALL)):
            # Sparse files are larger than their stored bytes.
            if number == _MAX_FILES or lines > _ALL_LINES or size > _ALL:
                raise ArchiveTooLarge
            if member.name.endswith((".log", ".txt")):
                data = _read_end(content, f"{name}: {member.name}")
                size, lines = size + len(data), lines + data.count(b"\n")
                yield Path(member.name).parent.name or name, data
    except ArchiveTooLarge:
        limits = f"{sizes.format_size(_ALL)}, {_ALL_LINES:,} lines or {_MAX_FILES:,} files"
        say(f"{name}: read only the first {limits}; to read the rest, unpack it and name its logs")


def _read_end(file: IO[bytes], name: str) -> bytes:
    """Return the end of a text, from the first complete line; reports the skipped bytes."""
    skipped, data = 0, bytearray()
    if file.seekable():
        skipped = max(0, file.seek(0, 2) - _MOST)
        file.seek(skipped)
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > 2 * _MOST:  # a pipe
            skipped += len(data) - _MOST
            del data[:-_MOST]
    start = len(data)
    for _ in range(_LINES):
        if (start := data.rfind(b"\n", 0, start)) < 0:
            break
    first = max(0, len(data) - _MOST, start + 1)
    if skipped or first:
        first = max(first, data.find(b"\n", max(0, first - 1)) + 1)
        say(f"{name}: read only its end; skipped its first {skipped + first:,} bytes")
    return bytes(data[first:])


def _split_lines(text: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the node, the log and the text of each line."""
    for line in split_lines(untrusted.sanitize(text.replace("\r", "\n")), copied=True):
        if match := _KUBECTL.match(line):
            yield match[1], match[2], match[3]
        elif match := _COMPOSE.match(line):
            yield match[1], "", match[2]
        elif match := _JOURNAL.match(line):
            yield match[2], match[3], f"{match[1]} {match[4]}"
        else:
            yield name, "", line
