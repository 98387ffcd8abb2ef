"""The rule for a server's key: known is fine, unknown is refused unless the user said otherwise,
changed is always refused.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import paramiko

from launcher.remote.known_hosts import KnownHosts, Verdict


class HostKeyRefused(paramiko.SSHException):
    """A server's key was not accepted; `verdict` says why."""

    def __init__(self, verdict: Verdict, name: str, key: paramiko.PKey, known: KnownHosts) -> None:
        digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        super().__init__(f"{name} shows {key.get_name()} SHA256:{digest}")
        self.verdict = verdict
        self.name = name
        self.file = known.files[0]


class VerifyHostKey(paramiko.MissingHostKeyPolicy):
    """Judges every key a server shows.

    The SSH client itself is given no keys, so paramiko asks here each time.

    Args:
        known: the files that count.
        accept_new: take an unknown key and write it down; a changed one is refused all the same.
        alias: the name to look up, in place of the server's (`HostKeyAlias`).
    """

    def __init__(self, known: KnownHosts, *, accept_new: bool, alias: str | None = None) -> None:
        self.known = known
        self.accept_new = accept_new
        self.alias = alias

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return if the key is good; raises HostKeyRefused, or OSError if a new key cannot be
        written down.
        """
        name = self.alias or hostname
        verdict = self.known.judge(name, key.get_name(), key.asbytes())
        if verdict == "unknown" and self.accept_new:
            self.known.add(name, key.get_name(), key.asbytes())
        elif verdict != "known":
            raise HostKeyRefused(verdict, name, key, self.known)

    def prefer(self, transport: paramiko.Transport, name: str) -> None:
        """Ask the server for a key of a type that is on file, so that a second key of another type
        is no "change".
        """
        types = [
            t
            for known in self.known.types(self.alias or name)
            for t in _ALGORITHMS.get(known, (known,))
        ]
        options = transport.get_security_options()
        offered = list(options.key_types)
        first = [t for t in types if t in offered]
        options.key_types = (*first, *(t for t in offered if t not in first))


# One kind of key, several signatures (RFC 8332).
_ALGORITHMS: Final = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}
