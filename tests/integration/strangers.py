"""Programs that connect to a port of a run's mutual TLS and are no part of the run."""

from __future__ import annotations

import socket
import ssl
import time

import pytest

from launcher.lab.layout import Host
from launcher.payload import tls
from launcher.remote import certificate


def refused(host: Host, port: int) -> None:
    """Assert that a host refuses who has no certificate, or another run's, though both take the
    host's for good.
    """
    none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    foreign = tls.contexts(certificate.make("foreign"))[1]
    for context, reason in ((none, "CERTIFICATE_REQUIRED"), (foreign, "UNKNOWN_CA|BAD_CERT")):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            _connected(host.ip, port) as sock,
            context.wrap_socket(sock) as stranger,
            pytest.raises(ssl.SSLError, match=reason),
        ):
            stranger.recv(1)


def _connected(ip: str, port: int) -> socket.socket:
    """Connect as soon as somebody listens; within a minute."""
    until = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((ip, port), 10)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
