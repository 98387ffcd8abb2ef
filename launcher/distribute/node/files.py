"""Files of a copy: names below a folder, cut into chunks that are numbered consecutively.

Names come from another machine, and none may lead out of the folder.
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

STATE = ".vlaunch"  # below the folder: what is not finished, and the record of what is
_GIT_HASH = "sha1"  # of git's choosing, not ours


class UnsafeName(ValueError):
    """A name that must not be written."""


@dataclass(frozen=True)
class ManifestFile:
    """One file: its name below the folder, bytes, time of change, and its publisher's digest.

    `sum` is the SHA-256 of its bytes (64 digits) or git's SHA-1 of it as a blob (40), as Hugging
    Face names its blobs; empty where nobody says.
    """

    name: str
    size: int
    mtime: int = 0
    digest: str = ""


def safe_name(name: str) -> str:
    """Return a name that stays below the folder; raises Unsafe."""
    parts = name.split("/")
    bad = any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    if bad or "\0" in name or parts[0] == STATE:
        raise UnsafeName(f"the name {name[:200]!r} leads out of its folder, or is none")
    return name


def safe_path(root: str, name: str) -> str:
    """Return the path of a name below `root`; raises Unsafe where a link in between leads out."""
    path = os.path.join(root, safe_name(name))
    if "/" not in name:  # no folder is in between, and there may be ten thousand of these
        return path
    real, parent = os.path.realpath(root), os.path.realpath(os.path.dirname(path))
    if parent != real and not parent.startswith(real.rstrip("/") + "/"):
        raise UnsafeName(f"{path} lies outside {root}: a folder on the way is a link")
    return path


def state_folder(root: str, *names: str) -> str:
    """Make `.vlaunch` below `root`, or a folder in it, and return its path; raises OSError, and
    Unsafe where a link or another user's folder lies there.
    """
    path = root
    for name in (STATE, *names):
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        there = os.lstat(path)
        if not stat.S_ISDIR(there.st_mode):
            raise UnsafeName(f"{path} is not a folder but a link or a file: remove it")
        if there.st_uid not in (0, os.geteuid()) and there.st_uid not in _allowed_owners(root):
            raise UnsafeName(f"{path} belongs to another user (UID {there.st_uid}): remove it")
    return path


def _allowed_owners(root: str) -> set[int]:
    """Return the users who may own `.vlaunch` besides root: the owners of the model, and the user
    that a network file system takes this process for.
    """
    with tempfile.TemporaryFile(dir=root) as probe:
        parent = os.path.dirname(root.rstrip("/"))
        return {os.fstat(probe.fileno()).st_uid, *(os.stat(one).st_uid for one in (root, parent))}


def open_plain(path: str, flags: int) -> int:
    """Open a file, or make it, and return its descriptor; raises OSError, and Unsafe for a link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeName(f"{path} is a link: remove it") from None
        raise


class CopyManifest:
    """The files of one copy in their order, and its chunks of `chunk` bytes each.

    Raises Unsafe for a name that leads out, and ValueError for what is no list of files.
    """

    def __init__(self, files: list[ManifestFile], chunk: int) -> None:
        self.files, self.chunk_size = files, chunk
        if chunk < 1 or any(each.size < 0 for each in files):
            raise ValueError("a size is negative")
        if len({safe_name(each.name) for each in files}) != len(files):
            raise ValueError("a file is named twice")
        self.first_chunks: list[int] = []  # number of each file's first chunk
        number = 0
        for each in files:
            self.first_chunks.append(number)
            number += -(-each.size // chunk)
        self.chunk_count = number
        self.total_bytes = sum(each.size for each in files)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> CopyManifest:
        """Read what `as_json` wrote."""
        return cls([ManifestFile(*each) for each in said["files"]], int(said["chunk"]))

    def as_json(self) -> dict[str, Any]:
        """Return it ready for `json.dumps`."""
        rows = [[each.name, each.size, each.mtime, each.sum] for each in self.files]
        return {"files": rows, "chunk": self.chunk_size}

    @cached_property
    def identity(self) -> str:
        """64 digits that are the same for the same files in the same chunks."""
        text = json.dumps(self.as_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def locate_chunk(self, number: int) -> tuple[int, int, int]:
        """Return which file a chunk is of, where it begins there, and how many bytes it has."""
        # Files without bytes have no chunk: of several that begin at a number, the last has it.
        at = bisect.bisect_right(self.first_chunks, number) - 1
        offset = (number - self.first_chunks[at]) * self.chunk_size
        return at, offset, min(self.chunk_size, self.files[at].size - offset)

    def file_chunks(self, at: int) -> range:
        """Return the numbers of a file's chunks."""
        return range(
            self.first_chunks[at],
            self.first_chunks[at] + -(-self.files[at].size // self.chunk_size),
        )


class PublisherDigest:
    """The publisher's digest of a file, taken while it is read from its beginning to its end."""

    def __init__(self, file: ManifestFile) -> None:
        self._expected = file.sum
        if len(file.sum) == 40:  # git's name of a blob
            self._hash = hashlib.new(_GIT_HASH, b"blob %d\0" % file.size)
        else:
            self._hash = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        if self._expected:
            self._hash.update(data)

    @property
    def mismatch(self) -> bool:
        """True when the bytes are not what was published; False where nobody says what was."""
        return bool(self._expected) and self._hash.hexdigest() != self._expected
