"""TLS certificates: one shared by all nodes for a copy or network check, and one per agent."""

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from launcher.core import redaction
from launcher.core.domain import Inventory, Secret

# Nodes' clocks may be wrong: validity starts in 2000, and the certificate of one run ends in 2100.
_NOT_BEFORE, _RUN_EXPIRY = (datetime(year, 1, 1, tzinfo=timezone.utc) for year in (2000, 2100))
_AGENT_LIFETIME = timedelta(days=5 * 365)
_PEM = serialization.Encoding.PEM


def make_certificate(name: str, alternative_names: Iterable[str] = ()) -> str:
    """Return a self-signed certificate and its key (PEM), on a curve of all TLS 1.3 libraries."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), _x509_name(name)
    builder = _unsigned(subject, subject, key, _RUN_EXPIRY)
    if names := [_general_name(text) for text in alternative_names]:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return _to_pem(builder.sign(key, hashes.SHA256())) + _key_to_pem(key)


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def issue_certificates(inventory: Inventory, now: datetime) -> tuple[str, dict[str, Secret]]:
    """Return the certificate of a new authority, and the nodes' certificates with private keys
    (PEM); the authority's key is discarded.
    """
    until = now + _AGENT_LIFETIME
    authority = Authority(inventory.cluster, until)
    issued = {node.name: authority.sign(node.name, node.ip, until) for node in inventory.nodes}
    redaction.add_secrets(*(line for pair in issued.values() for line in key_lines(pair)))
    return authority.certificate, issued


class Authority:
    """Signer of the certificates of one cluster's agents; its key is in memory only."""

    def __init__(self, cluster: str, until: datetime) -> None:
        self._cluster, self._name = cluster, _x509_name("vlaunch", cluster)
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = self._key.public_key()
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
        self.certificate = _to_pem(
            _unsigned(self._name, self._name, self._key, until)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def sign(self, node: str, ip: str, until: datetime) -> Secret:
        """Return a node's certificate and its private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(node), x509.IPAddress(ipaddress.ip_address(ip))]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _unsigned(_x509_name(node, self._cluster), self._name, key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Secret(_to_pem(signed) + _key_to_pem(key))


def key_lines(pair: Secret) -> Iterable[str]:
    """Return the lines of a private key, since output may show them one by one."""
    key = pair.reveal().partition("PRIVATE KEY-----\n")[2]
    return key.partition("\n-----END")[0].splitlines()


def _x509_name(name: str, cluster: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if cluster:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster))
    return x509.Name(parts)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(until)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """Return a key's usage: to sign certificates, for an authority; to authenticate, for a node."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(_PEM).decode()


def _key_to_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
