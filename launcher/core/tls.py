"""Mutual TLS 1.3 between the programs of one run, which share one certificate.

Standard library only. The launcher creates the certificate and sends it with the request, on
standard input. Both sides present it and trust no other: only the run's programs have its key.
"""

from __future__ import annotations

import os
import ssl

# Parts of OpenSSL's reasons when the other side rejects this side's certificate.
_REFUSAL_ALERTS = ("ALERT", "CERTIFICATE_REQUIRED")


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
    # OpenSSL reads keys only from files; this one exists in memory alone.
    with os.fdopen(os.memfd_create("certificate"), "w") as file:
        file.write(certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def reason(error: OSError) -> str:
    """Describe why a connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is from another run: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        alert = error.reason or ""
        if any(fragment in alert for fragment in _REFUSAL_ALERTS):
            return f"it refused this node's certificate ({alert.lower().replace('_', ' ')})"
        return f"TLS failed: {alert.lower().replace('_', ' ') or error}"
    return error.strerror or str(error) or type(error).__name__
