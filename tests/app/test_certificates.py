"""Certificates of a cluster's agents, in TLS handshakes."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher.app import certificates
from launcher.core import redaction
from launcher.core.domain import Secret
from launcher.inventory.load import loads

NOW = datetime.now(timezone.utc)
INVENTORY = loads(
    "cluster: c\nimage: x:1\naccelerator: cpu\nnodes: [{host: 'n[1-2]', ip: '10.0.0.[1-2]', gpus:"
    " 1}]\n",
    Path("inventory.yaml"),
)


def context(folder: Path, authority: str, own: Secret | None, *, server: bool) -> ssl.SSLContext:
    """Return a context for mutual TLS 1.3 with Python's strictest verification."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.verify_flags |= ssl.VERIFY_X509_STRICT
    tls.load_verify_locations(cadata=authority)
    if own:
        (folder / "own.pem").write_text(own.reveal())
        tls.load_cert_chain(folder / "own.pem")
    return tls


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "10.0.0.1") -> str:
    """Shake hands in memory; return the name that the server reads in the client's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=name)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    subject = (server_side.getpeercert() or {})["subject"]
    assert server_side.version() == "TLSv1.3"
    return str(dict(pair for part in subject for pair in part)["commonName"])


def test_nodes_verify_names_and_addresses(tmp_path: Path) -> None:
    """They reject certificates of another cluster, and clients without one."""
    authority, nodes = certificates.issue_certificates(INVENTORY, NOW)
    other_authority, other_nodes = certificates.issue_certificates(INVENTORY, NOW)
    server = context(tmp_path, authority, nodes["n1"], server=True)
    client = context(tmp_path, authority, nodes["n2"], server=False)

    assert shake_hands(server, client) == "n2"
    assert shake_hands(server, client, "n1") == "n2"
    for name in ("10.0.0.2", "n2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server, client, name)
    for outsider in (
        context(tmp_path, other_authority, other_nodes["n2"], server=False),
        context(tmp_path, authority, other_nodes["n2"], server=False),
        context(tmp_path, authority, None, server=False),
    ):
        with pytest.raises(ssl.SSLError):
            shake_hands(server, outsider)


def test_a_nodes_certificate_cannot_sign(tmp_path: Path) -> None:
    """A stolen key impersonates one node, not the authority."""
    authority, nodes = certificates.issue_certificates(INVENTORY, NOW)
    own = nodes["n1"].reveal().partition("-----BEGIN PRIVATE")[0]
    server = context(tmp_path, own, nodes["n1"], server=True)

    with pytest.raises(ssl.SSLError):
        shake_hands(server, context(tmp_path, authority, nodes["n2"], server=False))


def test_an_expired_certificate_is_rejected(tmp_path: Path) -> None:
    """Certificates expire five years after they were issued."""
    authority, nodes = certificates.issue_certificates(INVENTORY, NOW.replace(year=NOW.year - 6))
    server = context(tmp_path, authority, nodes["n1"], server=True)
    client = context(tmp_path, authority, nodes["n2"], server=False)

    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(server, client)


def test_private_keys_are_never_shown() -> None:
    """Neither whole nor line by line."""
    _, nodes = certificates.issue_certificates(INVENTORY, NOW)
    for pair in nodes.values():
        public, _, private = pair.reveal().partition("-----BEGIN PRIVATE KEY-----\n")
        lines = private.splitlines()[:-1]
        assert len(lines) == 3
        assert not [line for line in lines if line in redaction.redact(pair.reveal())]
        assert redaction.redact(f"openssl: {lines[1]} is bad") == "openssl: *** is bad"
        assert redaction.redact(public) == public
        assert "PRIVATE" not in repr(pair)
