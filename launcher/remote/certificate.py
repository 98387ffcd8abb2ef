"""A certificate for one run of programs on several nodes: a copy, or the network check."""

from __future__ import annotations

from datetime import datetime, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# Nodes' clocks may be anything; who holds the key is judged by nothing else.
_FROM, _UNTIL = (datetime(year, 1, 1, tzinfo=timezone.utc) for year in (2000, 2100))
_FORM = serialization.Encoding.PEM


def make(name: str) -> str:
    """Return a certificate with its private key as text (PEM), of an elliptic curve that every TLS
    1.3 has.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        _FORM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (certificate.public_bytes(_FORM) + secret).decode()
