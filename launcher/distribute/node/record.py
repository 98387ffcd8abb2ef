"""Records of earlier copies, kept beside the files, so that unchanged files are not read again.

A file counts as unchanged while its size, its times of change and its inode are what they were.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from .files import STATE, File, Manifest, open_plain, safe, state_folder

_RECORDS = "records"


class DigestRecords:
    """The records below a folder; what cannot be read is not known, and nothing is that is not
    believed.
    """

    def __init__(self, root: str, *, believed: bool = True) -> None:
        self._root = root
        self._last_read = ("", b"")  # a file of digests: all files of a copy have theirs in one
        self._files: dict[str, tuple[list[Any], int, str, int]] = {}
        folder = os.path.join(root, STATE, _RECORDS)
        names = os.listdir(folder) if believed and os.path.isdir(folder) else []
        for name in sorted(names):
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    self._load_record(os.path.join(folder, name))

    def _load_record(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        manifest = Manifest([File(*row[:4]) for row in said["files"]], said["chunk"])
        for at, row in enumerate(said["files"]):
            kept = (row, said["chunk"], f"{path[:-5]}.digests", manifest.first[at])
            self._files[row[0]] = kept

    def find_digests(self, file: File, path: str, chunk: int) -> list[bytes]:
        """Return the digests of a file's chunks, if it is what it was and they are known."""
        row, size, source, first = self._files.get(file.name, ([], 0, "", 0))
        count = -(-file.size // chunk)
        if not row or size != chunk or not is_unchanged(row, path, file):
            return []
        data = self._read_digests(source)[32 * first : 32 * (first + count)]
        if len(data) != 32 * count:
            return []
        return [data[at : at + 32] for at in range(0, len(data), 32)]

    def _read_digests(self, source: str) -> bytes:
        if self._last_read[0] != source:
            data = b""
            with contextlib.suppress(OSError), open(source, "rb") as kept:
                data = kept.read()
            self._last_read = (source, data)
        return self._last_read[1]


def is_unchanged(row: list[Any], path: str, file: File) -> bool:
    """True when a file is as a record's row says: size, sum, its own times, inode."""
    with contextlib.suppress(OSError):
        now = os.stat(path)
        return (row[1], row[3]) == (file.size, file.sum) and row[4:] == _stat_marks(now)
    return False


def _stat_marks(now: os.stat_result) -> list[int]:
    """Return what is another after a file was written. Nobody can set the last one."""
    return [now.st_size, now.st_mtime_ns, now.st_ino, now.st_ctime_ns]


def write_record(root: str, label: str, manifest: Manifest, digests: bytes) -> None:
    """Write a record over any earlier one of its label; the digests first. Raises OSError, and
    Unsafe where the label, or a link in its place, leads out of the folder.
    """
    folder = state_folder(root, _RECORDS)
    rows = []
    for each in manifest.files:
        now = os.stat(os.path.join(root, each.name))
        rows.append([each.name, each.size, each.mtime, each.sum, *_stat_marks(now)])
    said = {"chunk": manifest.chunk, "files": rows}
    for name, data in ((f"{label}.digests", digests), (f"{label}.json", json.dumps(said).encode())):
        path = os.path.join(folder, safe(name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_plain(f"{path}.new", flags), "wb") as file:
            file.write(data)
        os.replace(f"{path}.new", path)
