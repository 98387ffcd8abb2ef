"""Records of earlier copies beside the files, so that unchanged files are not read again.

A file counts as unchanged while its size, its times of change and its inode stay the same.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from .files import STATE, CopyManifest, ManifestFile, open_plain, safe_name, state_folder

_RECORDS = "records"


class DigestRecords:
    """The records below a folder; none unless `trusted`. Unreadable records are ignored."""

    def __init__(self, root: str, *, trusted: bool = True) -> None:
        self._root = root
        self._last_read = ("", b"")  # path and content; all files of a copy share a file of digests
        self._files: dict[str, tuple[list[Any], int, str, int]] = {}
        folder = os.path.join(root, STATE, _RECORDS)
        names = os.listdir(folder) if trusted and os.path.isdir(folder) else []
        for name in sorted(names):
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    self._load_record(os.path.join(folder, name))

    def _load_record(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            payload = json.load(file)
        files = [ManifestFile(*row[:4]) for row in payload["files"]]
        manifest = CopyManifest(files, payload["chunk"])
        for index, row in enumerate(payload["files"]):
            entry = (row, payload["chunk"], f"{path[:-5]}.digests", manifest.first_chunks[index])
            self._files[row[0]] = entry

    def find_digests(self, file: ManifestFile, path: str, chunk: int) -> list[bytes]:
        """Return the recorded digests of a file's chunks; empty for a new or changed file."""
        row, size, source, first = self._files.get(file.name, ([], 0, "", 0))
        count = -(-file.size // chunk)
        if not row or size != chunk or not is_unchanged(row, path, file):
            return []
        data = self._read_digests(source)[32 * first : 32 * (first + count)]
        if len(data) != 32 * count:
            return []
        return [data[offset : offset + 32] for offset in range(0, len(data), 32)]

    def _read_digests(self, source: str) -> bytes:
        if self._last_read[0] != source:
            data = b""
            with contextlib.suppress(OSError), open(source, "rb") as file:
                data = file.read()
            self._last_read = (source, data)
        return self._last_read[1]


def is_unchanged(row: list[Any], path: str, file: ManifestFile) -> bool:
    """True when a file matches a record's row: size, digest, times and inode."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return (row[1], row[3]) == (file.size, file.digest) and row[4:] == _stat_marks(status)
    return False


def _stat_marks(status: os.stat_result) -> list[int]:
    """Return the attributes that change with a file's content; users cannot set the last one."""
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]


def write_record(root: str, label: str, manifest: CopyManifest, digests: bytes) -> None:
    """Write a record over any earlier one of its label; the digests first. Raises OSError, and
    UnsafeName where the label, or a link in its place, leads out of the folder.
    """
    folder = state_folder(root, _RECORDS)
    rows = []
    for entry in manifest.files:
        status = os.stat(os.path.join(root, entry.name))
        rows.append([entry.name, entry.size, entry.mtime, entry.digest, *_stat_marks(status)])
    payload = {"chunk": manifest.chunk_size, "files": rows}
    text = json.dumps(payload).encode()
    for name, data in ((f"{label}.digests", digests), (f"{label}.json", text)):
        path = os.path.join(folder, safe_name(name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_plain(f"{path}.new", flags), "wb") as file:
            file.write(data)
        os.replace(f"{path}.new", path)
