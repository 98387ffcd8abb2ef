"""Whose key is this?

OpenSSH's known_hosts files, read once for all nodes, and the verdict on a key a server shows.

The format is sshd(8)'s, "SSH_KNOWN_HOSTS FILE FORMAT": plain and hashed names, wildcards, `!`
exceptions and `@revoked` lines. Host certificates (`@cert-authority`) are not something paramiko
can check, so such a line vouches for nobody.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["known", "unknown", "changed", "revoked"]


@dataclass(frozen=True, slots=True)
class _Line:
    revoked: bool
    names: tuple[str, ...]
    type: str
    key: str  # base64, as in the file


class KnownHosts:
    """The keys in `files`; the first file is the one a new key is added to.

    A file that does not exist holds no keys. Raises OSError for one that cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._lock = threading.Lock()
        self._plain: dict[str, list[_Line]] = {}
        self._other: list[_Line] = []
        for file in self.files:
            if file.exists():
                for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._read(text)

    def types(self, name: str) -> tuple[str, ...]:
        """Return the key types on file for `name` (`HOST`, or `[HOST]:PORT` off port 22), to ask
        the server for one of them.
        """
        return tuple(dict.fromkeys(line.type for line in self._lines(name) if not line.revoked))

    def judge(self, name: str, key_type: str, key: bytes) -> Verdict:
        """Say what the files say about `key` being shown by the server called `name`."""
        shown = (key_type, base64.b64encode(key).decode())
        lines = self._lines(name)
        if any(line.revoked and (line.type, line.key) == shown for line in lines):
            return "revoked"
        good = [line for line in lines if not line.revoked]
        if any((line.type, line.key) == shown for line in good):
            return "known"
        return "changed" if good else "unknown"

    def add(self, name: str, key_type: str, key: bytes) -> None:
        """Append one line to the first file, leaving the rest of it as it is; raises OSError."""
        text = f"{name} {key_type} {base64.b64encode(key).decode()}"
        with self._lock:
            if self.judge(name, key_type, key) == "known":
                return
            file = self.files[0]
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(
                os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b"
            ) as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - 1))
                ends_in_line_break = size == 0 or stream.read(1) == b"\n"
                stream.write(("" if ends_in_line_break else "\n").encode() + text.encode() + b"\n")
            self._read(text)

    def _read(self, text: str) -> None:
        fields = text.split()
        if not fields or fields[0].startswith("#"):
            return
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or marker not in ("", "@revoked"):
            return
        line = _Line(bool(marker), tuple(fields[0].split(",")), fields[1], fields[2])
        if any(_is_pattern(name) for name in line.names):
            self._other.append(line)
            return
        for name in line.names:
            self._plain.setdefault(name.lower(), []).append(line)

    def _lines(self, name: str) -> list[_Line]:
        name = name.lower()
        return [
            *self._plain.get(name, ()),
            *(line for line in self._other if _matches(line.names, name)),
        ]


def _is_pattern(name: str) -> bool:
    return name.startswith(("|", "!")) or "*" in name or "?" in name


def _matches(patterns: Sequence[str], name: str) -> bool:
    found = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            found = found or _hashed(pattern, name)
        elif pattern.startswith("!"):
            if _glob(pattern[1:], name):
                return False
        else:
            found = found or _glob(pattern, name)
    return found


def _glob(pattern: str, name: str) -> bool:
    # Only `*` and `?` are special here; a `[` is the one of `[host]:port`.
    return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))


def _hashed(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        return hmac.compare_digest(
            hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest(),
            base64.b64decode(digest),
        )
    except ValueError:
        return False
