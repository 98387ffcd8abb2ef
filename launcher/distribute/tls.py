"""Mutual TLS 1.3 between the programs of one run, which all hold the same certificate.

Standard library only. The launcher makes the certificate and sends it with the request, on standard
input. Holding its private key is the proof of belonging to the run, so both sides present it and
trust no other.
"""

from __future__ import annotations

import os
import ssl

# OpenSSL's words for what the other side thinks of this one's certificate.
_REFUSED = ("ALERT", "CERTIFICATE_REQUIRED")


def contexts(certificate: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the side that accepts and of the one that connects.

    `certificate` is PEM, with its private key. Raises OSError (ssl.SSLError) for anything else.
    """
    return (
        _context(ssl.PROTOCOL_TLS_SERVER, certificate),
        _context(ssl.PROTOCOL_TLS_CLIENT, certificate),
    )


def _context(kind: int, certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are not resumed
    # OpenSSL reads keys from files only: this one has no name, and is in memory alone.
    with os.fdopen(os.memfd_create("certificate"), "w") as file:
        file.write(certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def reason(error: OSError) -> str:
    """Return why a connection failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not this run's: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        words = error.reason or ""
        if any(word in words for word in _REFUSED):
            return f"it refused this node's certificate ({words.lower().replace('_', ' ')})"
        return f"TLS failed: {words.lower().replace('_', ' ') or error}"
    return error.strerror or str(error) or type(error).__name__
