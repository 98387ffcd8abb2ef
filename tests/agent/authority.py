"""Certificates as `vlaunch up` delivers them, and invalid ones."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FIRST = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_PEM = serialization.Encoding.PEM


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "demo"),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


@dataclass
class Authority:
    """A cluster's CA."""

    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def certificate(self, days: float = 100.0) -> bytes:
        """Return the CA's own certificate."""
        created = self._builder("the CA", self.key.public_key(), days).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        return created.sign(self.key, hashes.SHA256()).public_bytes(_PEM)

    def issue(self, node: str, ip: str = "127.0.0.1", days: float = 100.0) -> bytes:
        """Return a node's certificate and key; negative days: expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(ip)), x509.DNSName(node)]
        created = (
            self._builder(node, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
        )
        private = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return created.sign(self.key, hashes.SHA256()).public_bytes(_PEM) + private

    def deliver(self, folder: Path, node: str, ip: str = "127.0.0.1", days: float = 100.0) -> None:
        """Write a node's files atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in (
            ("AGENT_CA", self.certificate()),
            ("AGENT_CERTIFICATE", self.issue(node, ip, days)),
        ):
            (folder / f".{file}").write_bytes(data)
            (folder / f".{file}").replace(folder / file)

    def _builder(
        self, common: str, key: ec.EllipticCurvePublicKey, days: float
    ) -> x509.CertificateBuilder:
        end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(common))
            .issuer_name(_name("the CA"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(FIRST)
            .not_valid_after(end)
        )
