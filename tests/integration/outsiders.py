"""Clients without a valid certificate that connect to the mutual-TLS port of a run."""

from __future__ import annotations

import socket
import ssl
import time

import pytest

from launcher.app import certificates
from launcher.core import tls
from launcher.lab.layout import Host


def assert_refused(host: Host, port: int) -> None:
    """Assert that a host refuses clients with no certificate and with another run's.

    The clients do not verify the host's certificate.
    """
    none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    foreign = tls.contexts(certificates.make_certificate("foreign"))[1]
    for context, reason in ((none, "CERTIFICATE_REQUIRED"), (foreign, "UNKNOWN_CA|BAD_CERT")):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            _connect(host.ip, port) as sock,
            context.wrap_socket(sock) as client,
            pytest.raises(ssl.SSLError, match=reason),
        ):
            client.recv(1)


def _connect(ip: str, port: int) -> socket.socket:
    """Connect as soon as the port is open, within a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((ip, port), 10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
