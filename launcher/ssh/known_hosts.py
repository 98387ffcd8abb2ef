"""Host key verification against OpenSSH's known_hosts files, which are read once for all nodes.

Known keys pass, changed keys are always refused, and unknown keys are refused unless the user
accepts new ones.

The format is sshd(8)'s, "SSH_KNOWN_HOSTS FILE FORMAT": plain and hashed names, wildcards, `!`
exceptions and `@revoked` lines. paramiko cannot check host certificates, so `@cert-authority`
lines are ignored.
"""

import base64
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import paramiko

Verdict = Literal["known", "unknown", "changed", "revoked"]

# One key type, several signature algorithms (RFC 8332).
_ALGORITHMS: Final = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}


@dataclass(frozen=True, slots=True)
class _Line:
    revoked: bool
    names: tuple[str, ...]
    key: tuple[str, str]  # type and base64, as in the file


class KnownHosts:
    """Keys in `files`; new keys go to the first file.

    Missing files are empty. Raises OSError for an unreadable file.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._lock = threading.Lock()
        self._plain: dict[str, list[_Line]] = {}
        self._patterns: list[_Line] = []
        for file in self.files:
            if file.exists():
                for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._parse(text)

    def types(self, name: str) -> tuple[str, ...]:
        """Return the key types stored for `name` (`HOST`, or `[HOST]:PORT` unless 22)."""
        return tuple(dict.fromkeys(line.key[0] for line in self._lines(name) if not line.revoked))

    def judge(self, name: str, key_type: str, key: bytes) -> Verdict:
        """Compare the key presented by the server `name` with the stored ones."""
        presented = (key_type, base64.b64encode(key).decode())
        lines = self._lines(name)
        if any(line.revoked and line.key == presented for line in lines):
            return "revoked"
        trusted = [line.key for line in lines if not line.revoked]
        if presented in trusted:
            return "known"
        return "changed" if trusted else "unknown"

    def add(self, name: str, key_type: str, key: bytes) -> None:
        """Append a line to the first file; raises OSError."""
        text = f"{name} {key_type} {base64.b64encode(key).decode()}"
        with self._lock:
            if self.judge(name, key_type, key) == "known":
                return
            file = self.files[0]
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "r+b") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - 1))
                line_break = b"" if size == 0 or stream.read(1) == b"\n" else b"\n"
                stream.write(line_break + text.encode() + b"\n")
            self._parse(text)

    def _parse(self, text: str) -> None:
        fields = text.split()
        if not fields or fields[0].startswith("#"):
            return
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or marker not in ("", "@revoked"):
            return
        line = _Line(bool(marker), tuple(fields[0].split(",")), (fields[1], fields[2]))
        if any(name[0] in "|!" or "*" in name or "?" in name for name in line.names if name):
            self._patterns.append(line)
            return
        for name in line.names:
            self._plain.setdefault(name.lower(), []).append(line)

    def _lines(self, name: str) -> list[_Line]:
        name = name.lower()
        patterns = (line for line in self._patterns if _matches(line.names, name))
        return [*self._plain.get(name, ()), *patterns]


def _matches(patterns: Sequence[str], name: str) -> bool:
    if any(_matches_pattern(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_matches_pattern(pattern, name) for pattern in patterns)


def _matches_pattern(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|"):
        # Only `*` and `?` are wildcards; `[` is literal, as in `[host]:port`.
        return fnmatch.fnmatchcase(name, pattern.lower().replace("[", "[[]"))
    try:
        _, _, salt, digest = pattern.split("|")
        return hmac.compare_digest(
            hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest(),
            base64.b64decode(digest),
        )
    except ValueError:
        return False


class HostKeyRefused(paramiko.SSHException):
    """Rejected host key; `verdict` gives the reason."""

    def __init__(self, verdict: Verdict, name: str, key: paramiko.PKey, file: Path) -> None:
        digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        super().__init__(f"{name} presents {key.get_name()} SHA256:{digest}")
        self.verdict = verdict
        self.name = name
        self.file = file


class VerifyHostKey(paramiko.MissingHostKeyPolicy):
    """Host key policy for the server `name`.

    The SSH client itself has no keys, so paramiko calls this policy for every connection. With
    `accept_new`, unknown keys are added; changed keys are refused all the same.
    """

    def __init__(self, known_hosts: KnownHosts, name: str, *, accept_new: bool) -> None:
        self._known_hosts, self._name, self._accept_new = known_hosts, name, accept_new

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
        """Accept or add the key; raises HostKeyRefused, or OSError if it cannot be added."""
        verdict = self._known_hosts.judge(self._name, key.get_name(), key.asbytes())
        if verdict == "unknown" and self._accept_new:
            self._known_hosts.add(self._name, key.get_name(), key.asbytes())
        elif verdict != "known":
            raise HostKeyRefused(verdict, self._name, key, self._known_hosts.files[0])

    def prefer(self, transport: paramiko.Transport) -> None:
        """Prefer stored key types, so that a key of another type is not taken for a change."""
        algorithms = [
            name
            for kind in self._known_hosts.types(self._name)
            for name in _ALGORITHMS.get(kind, (kind,))
        ]
        options = transport.get_security_options()
        offered = list(options.key_types)
        options.key_types = sorted(offered, key=lambda name: name not in algorithms)
