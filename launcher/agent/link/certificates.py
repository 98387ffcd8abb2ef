"""The node's certificate and its cluster's CA, for the connections between agents: mutual TLS 1.3.

`vlaunch up` signs the certificates and writes the files.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any

from ..health.api import SECRETS
from ..log import say

CA = "AGENT_CA"  # the CA's certificate
CERTIFICATE = "AGENT_CERTIFICATE"  # the node's own, and its private key


class Certificates:
    """TLS contexts of one side, recreated whenever the files change."""

    def __init__(self, *, server: bool, folder: str = SECRETS) -> None:
        self._server = server
        self._ca, self._certificate = os.path.join(folder, CA), os.path.join(folder, CERTIFICATE)
        self._context: ssl.SSLContext | None = None
        self._files: object = None  # as they were at the last attempt

    def context(self) -> ssl.SSLContext | None:
        """Return the context of the newest usable files; None if there were none yet.

        Unusable files are tried again when they change; the reason is printed once.
        """
        files = [_version(path) for path in (self._ca, self._certificate)]
        if files != self._files:
            self._files = files
            try:
                self._context = self._make_context()
            except (OSError, ValueError) as error:
                say(
                    f"cannot use this node's {CA} and {CERTIFICATE}: {describe_error(error)}; run"
                    " `vlaunch up`"
                )
        return self._context

    def _make_context(self) -> ssl.SSLContext:
        """Create a context that accepts only the CA's certificates; raise OSError or ValueError."""
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if self._server:
            context.num_tickets = 0  # a resumed session would not be verified again
        context.load_verify_locations(self._ca)
        # else OpenSSL prompts for the password of an encrypted key
        context.load_cert_chain(self._certificate, password=_no_password)
        return context


def _version(path: str) -> object:
    """Return a value that changes with a file; None while it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_size  # ctime also follows a file's mode


def _no_password() -> str:
    raise ValueError(f"the private key of {CERTIFICATE} is encrypted")


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Return the node in a verified certificate's CN; empty if there is none."""
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def describe_error(error: BaseException) -> str:
    """Describe why a connection failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "the connection was closed"
    if isinstance(error, ConnectionAbortedError):
        return "there was no TLS handshake in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__
