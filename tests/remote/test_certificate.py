"""Certificates of a cluster's agents: what TLS makes of them."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher import redaction
from launcher.inventory.load import loads
from launcher.model import Secret
from launcher.remote import certificate

NOW = datetime.now(timezone.utc)
INVENTORY = loads(
    "cluster: c\nimage: x:1\naccelerator: cpu\nnodes: [{host: 'n[1-2]', ip: '10.0.0.[1-2]', gpus:"
    " 1}]\n",
    Path("inventory.yaml"),
)


def context(folder: Path, authority: str, own: Secret | None, *, server: bool) -> ssl.SSLContext:
    """Return mutual TLS 1.3, as strict as Python has it."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(cadata=authority)
    if own:
        (folder / "own.pem").write_text(own.reveal())
        made.load_cert_chain(folder / "own.pem")
    return made


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "10.0.0.1") -> str:
    """Shake hands in memory; return the name that the server reads in the client's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    subject = (other.getpeercert() or {})["subject"]
    assert other.version() == "TLSv1.3"
    return str(dict(pair for part in subject for pair in part)["commonName"])


def test_nodes_of_a_cluster_know_each_other_by_name_and_address(tmp_path: Path) -> None:
    """And nobody with the certificate of another cluster, or with none."""
    authority, nodes = certificate.issue(INVENTORY, NOW)
    other, others = certificate.issue(INVENTORY, NOW)
    server = context(tmp_path, authority, nodes["n1"], server=True)
    client = context(tmp_path, authority, nodes["n2"], server=False)

    assert meet(server, client) == "n2"
    assert meet(server, client, "n1") == "n2"
    for name in ("10.0.0.2", "n2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            meet(server, client, name)
    for stranger in (
        context(tmp_path, other, others["n2"], server=False),
        context(tmp_path, authority, others["n2"], server=False),
        context(tmp_path, authority, None, server=False),
    ):
        with pytest.raises(ssl.SSLError):
            meet(server, stranger)


def test_a_node_signs_no_other(tmp_path: Path) -> None:
    """Who takes one's key is that node, and no authority."""
    authority, nodes = certificate.issue(INVENTORY, NOW)
    own = nodes["n1"].reveal().partition("-----BEGIN PRIVATE")[0]
    server = context(tmp_path, own, nodes["n1"], server=True)

    with pytest.raises(ssl.SSLError):
        meet(server, context(tmp_path, authority, nodes["n2"], server=False))


def test_one_that_has_ended_is_refused(tmp_path: Path) -> None:
    """Five years after it was issued; clocks that are behind are none the wiser."""
    authority, nodes = certificate.issue(INVENTORY, NOW.replace(year=NOW.year - 6))
    server = context(tmp_path, authority, nodes["n1"], server=True)
    client = context(tmp_path, authority, nodes["n2"], server=False)

    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        meet(server, client)


def test_private_keys_are_never_shown() -> None:
    """Not whole, and not one line of them."""
    _, nodes = certificate.issue(INVENTORY, NOW)
    for pair in nodes.values():
        public, _, private = pair.reveal().partition("-----BEGIN PRIVATE KEY-----\n")
        lines = private.splitlines()[:-1]
        assert len(lines) == 3
        assert not [line for line in lines if line in redaction.redact(pair.reveal())]
        assert redaction.redact(f"openssl: {lines[1]} is bad") == "openssl: *** is bad"
        assert redaction.redact(public) == public
        assert "PRIVATE" not in repr(pair)
