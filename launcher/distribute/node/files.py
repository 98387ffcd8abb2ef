"""Files of a copy: names below a folder, split into consecutively numbered chunks.

Names come from another machine, so each is checked not to lead out of the folder.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

STATE = ".vlaunch"  # subfolder with unfinished parts and records of complete copies
_GIT_HASH = "sha1"  # git's hash of blobs


class UnsafeName(ValueError):
    """A file name or path that is unsafe to write."""


@dataclass(frozen=True)
class ManifestFile:
    """A file: name below the folder, bytes, time of change, and publisher's digest.

    `digest` is the SHA-256 of its bytes (64 digits) or git's SHA-1 of its blob (40 digits), as in
    the names of Hugging Face's blobs; empty where unknown.
    """

    name: str
    size: int
    mtime: int = 0
    digest: str = ""


def safe_name(name: str) -> str:
    """Return the name if it stays below the folder; raises UnsafeName."""
    parts = name.split("/")
    bad = any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    if bad or "\0" in name or parts[0] == STATE:
        raise UnsafeName(f"the name {name[:200]!r} is invalid, or leads out of its folder")
    return name


def safe_path(root: str, name: str) -> str:
    """Return the path of a name below `root`; raises UnsafeName where a link leads out."""
    path = os.path.join(root, safe_name(name))
    if "/" not in name:  # no folder in between; skips realpath() for thousands of blobs
        return path
    real, parent = os.path.realpath(root), os.path.realpath(os.path.dirname(path))
    if parent != real and not parent.startswith(real.rstrip("/") + "/"):
        raise UnsafeName(f"{path} is outside {root}: a folder on the way is a link")
    return path


def state_folder(root: str, *names: str) -> str:
    """Make `.vlaunch` below `root`, or a folder in it, and return its path; raises OSError, and
    UnsafeName for a link or another user's folder.
    """
    path = root
    for name in (STATE, *names):
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeName(f"{path} is not a folder but a link or a file: remove it")
        if status.st_uid not in (0, os.geteuid()) and status.st_uid not in _allowed_owners(root):
            raise UnsafeName(f"{path} belongs to another user (UID {status.st_uid}): remove it")
    return path


def _allowed_owners(root: str) -> set[int]:
    """Return the user IDs that may own `.vlaunch` besides root: the owners of the model, and the
    user to which a network file system maps this process.
    """
    with tempfile.TemporaryFile(dir=root) as new_file:
        parent = os.path.dirname(root.rstrip("/"))
        owners = {os.stat(folder).st_uid for folder in (root, parent)}
        return {os.fstat(new_file.fileno()).st_uid, *owners}


def open_plain(path: str, flags: int) -> int:
    """Open or create a file, and return its descriptor; raises OSError, UnsafeName for a link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeName(f"{path} is a link: remove it") from None
        raise


class CopyManifest:
    """Ordered files of a copy, in chunks of `chunk_size` bytes.

    Raises UnsafeName for a name that leads out, and ValueError for an invalid list of files.
    """

    def __init__(self, files: list[ManifestFile], chunk: int) -> None:
        self.files, self.chunk_size = files, chunk
        if chunk < 1 or any(file.size < 0 for file in files):
            raise ValueError("a size is negative")
        if len({safe_name(file.name) for file in files}) != len(files):
            raise ValueError("a file is named twice")
        self.first_chunks: list[int] = []  # number of each file's first chunk
        number = 0
        for file in files:
            self.first_chunks.append(number)
            number += -(-file.size // chunk)
        self.chunk_count = number
        self.total_bytes = sum(file.size for file in files)

    @classmethod
    def from_json(cls, payload: dict[str, Any]) -> CopyManifest:
        """Parse the result of `as_json`."""
        return cls([ManifestFile(*row) for row in payload["files"]], int(payload["chunk"]))

    def as_json(self) -> dict[str, Any]:
        """Return the manifest ready for `json.dumps`."""
        rows = [[file.name, file.size, file.mtime, file.digest] for file in self.files]
        return {"files": rows, "chunk": self.chunk_size}

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest: equal for equal files and chunks."""
        text = json.dumps(self.as_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def locate_chunk(self, number: int) -> tuple[int, int, int]:
        """Return a chunk's file index, offset in the file, and size in bytes."""
        # Empty files have no chunks: of several files with this first chunk, the last one has it.
        index = bisect.bisect_right(self.first_chunks, number) - 1
        offset = (number - self.first_chunks[index]) * self.chunk_size
        return index, offset, min(self.chunk_size, self.files[index].size - offset)

    def file_chunks(self, index: int) -> range:
        """Return the numbers of a file's chunks."""
        first = self.first_chunks[index]
        return range(first, first + -(-self.files[index].size // self.chunk_size))


class PublisherDigest:
    """Check of a file against its publisher's digest, computed while it is read in order."""

    def __init__(self, file: ManifestFile) -> None:
        self._expected = file.digest
        if len(file.digest) == 40:  # git's name of a blob
            self._hash = hashlib.new(_GIT_HASH, b"blob %d\0" % file.size)
        else:
            self._hash = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        if self._expected:
            self._hash.update(data)

    @property
    def mismatch(self) -> bool:
        """True when the bytes do not match the publisher's digest; False without a digest."""
        return bool(self._expected) and self._hash.hexdigest() != self._expected
