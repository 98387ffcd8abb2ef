"""Encryption of what nodes send each other: TLS 1.3, with one certificate a copy that both sides
present and neither takes another for. Who is who, the key of the copy proves besides (`wire.py`).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any


class Cipher:
    """What wraps the connections of a copy: nothing where no certificate was given.

    Raises OSError (ssl.SSLError) for a certificate that is none.
    """

    def __init__(self, said: Mapping[str, Any] | None) -> None:
        self._as_server = _context(ssl.PROTOCOL_TLS_SERVER, said) if said else None
        self._as_client = _context(ssl.PROTOCOL_TLS_CLIENT, said) if said else None

    def accepted(self, sock: socket.socket, patience: float) -> socket.socket:
        """Return a connection that was accepted, after the greeting; raises OSError."""
        return _wrapped(self._as_server, sock, patience, server=True)

    def made(self, sock: socket.socket, patience: float) -> socket.socket:
        """Return a connection that was made, after the greeting; raises OSError."""
        return _wrapped(self._as_client, sock, patience, server=False)


def _wrapped(
    context: ssl.SSLContext | None, sock: socket.socket, patience: float, *, server: bool
) -> socket.socket:
    if context is None:
        return sock
    sock.settimeout(patience)
    return context.wrap_socket(sock, server_side=server)


def _context(kind: Any, said: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the copy's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=said["certificate"])
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody comes back with one
    # The only way in is a file: one that has no name, and is nowhere but in memory.
    with os.fdopen(os.memfd_create("copy"), "w") as file:
        file.write(said["certificate"] + said["key"])
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
