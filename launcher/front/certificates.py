"""The front's certificate: the user's files, which are validated before anything changes, or a
self-signed one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core import redaction
from launcher.core.domain import Inventory, Secret
from launcher.core.errors import RequestError

if TYPE_CHECKING:
    from cryptography import x509


_BLOCK = re.compile(rb"-----BEGIN [A-Z0-9 ]+-----.*?-----END [A-Z0-9 ]+-----", re.DOTALL)


def served_names(inventory: Inventory) -> tuple[str, ...]:
    """Return the names and addresses for which a self-signed certificate must be valid: also that
    of `vlaunch tunnel`.
    """
    address = inventory.front.address if inventory.front else None
    ips = (node.ip for node in inventory.front_nodes)
    return tuple(dict.fromkeys((*filter(None, [address]), *ips, "127.0.0.1")))


def load_certificate(inventory: Inventory, now: datetime | None = None) -> Secret | None:
    """Return the user's certificate chain and private key (PEM); None without files.

    Raises RequestError with all that is wrong with them.
    """
    front = inventory.front
    if front is None or front.tls.cert is None or front.tls.key is None:
        return None
    names = (front.tls.cert, front.tls.key)
    mistakes: list[str] = []
    cert, key = (_read(inventory.path.parent / Path(n).expanduser(), mistakes) for n in names)
    if not mistakes:
        address = front.address or inventory.front_nodes[0].ip
        now = now or datetime.now(timezone.utc)
        mistakes = _find_mistakes(cert, key, names=names, address=address, now=now)
    if mistakes:
        hint = "correct `front: tls:` in the inventory, or use `tls: self-signed`"
        raise RequestError("the front's certificate is unusable", evidence=mistakes, hint=hint)
    # Comments between the blocks may have any encoding; both files may be one.
    blocks = dict.fromkeys(_BLOCK.findall(cert + b"\n" + key))
    return hide_key(Secret("".join(f"{block.decode(errors='replace')}\n" for block in blocks)))


def make_self_signed(inventory: Inventory) -> Secret:
    """Return a new certificate and its private key (PEM) for the front."""
    from launcher.app.certificates import make_certificate

    names = served_names(inventory)
    return hide_key(Secret(make_certificate(names[0], names)))


def hide_key(pair: Secret) -> Secret:
    """Mask a private key in all output; return it with its certificate."""
    from launcher.app.certificates import key_lines

    redaction.add_secrets(*key_lines(pair))
    return pair


def covers(pem: str, names: Sequence[str]) -> bool:
    """Return True if a certificate is valid for all names."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        certificate = x509.load_pem_x509_certificates(pem.encode())[0]
        return not _missing_names(certificate, names)
    except (ValueError, UnsupportedAlgorithm):
        return False


def _read(path: Path, mistakes: list[str]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        mistakes.append(f"{path}: {error.strerror}")
        return b""


def _find_mistakes(
    cert: bytes, key: bytes, *, names: tuple[str, str], address: str, now: datetime
) -> list[str]:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    mistakes, certificate, private_key = [], None, None
    try:
        certificate = x509.load_pem_x509_certificates(cert)[0]
    except (ValueError, UnsupportedAlgorithm):
        mistakes.append(f"{names[0]}: is not a certificate in PEM")
    try:
        private_key = serialization.load_pem_private_key(key, None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        mistakes.append(f"{names[1]}: is not a private key in PEM without a passphrase")
    if certificate is None:
        return mistakes
    if private_key and certificate.public_key() != private_key.public_key():
        mistakes.append(f"{names[1]}: is not the key of {names[0]}")
    if certificate.not_valid_after_utc < now:
        mistakes.append(f"{names[0]}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    if now < certificate.not_valid_before_utc:
        date = f"{certificate.not_valid_before_utc:%Y-%m-%d}"
        mistakes.append(f"{names[0]}: is not valid before {date}")
    if _missing_names(certificate, [address]):
        mistakes.append(f"{names[0]}: is not for {address}, the address of the front")
    return mistakes


def _missing_names(certificate: x509.Certificate, names: Sequence[str]) -> list[str]:
    """Return the names for which a certificate is not valid."""
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound):
        return list(names)
    addresses = extension.value.get_values_for_type(x509.IPAddress)
    domains = {name.lower() for name in extension.value.get_values_for_type(x509.DNSName)}

    def is_covered(name: str) -> bool:
        try:
            return ipaddress.ip_address(name) in addresses
        except ValueError:
            wildcard = f"*.{name.partition('.')[2]}"
            return not domains.isdisjoint((name.lower(), wildcard.lower()))

    return [name for name in names if not is_covered(name)]
