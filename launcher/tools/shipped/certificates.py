"""Validity of the certificates with which the agents of a cluster authenticate each other.

A node reports its own certificate and its authority's, without private keys. All certificates of a
cluster are renewed together, because the authority's key is not stored.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from launcher.core.domain import Inventory, Node, Secret
from launcher.tools.host import HostFacts

AUTHORITY, CERTIFICATE = "AGENT_CA", "AGENT_CERTIFICATE"
SECRET_NAMES = (AUTHORITY, CERTIFICATE)  # among the files of a node's secrets
_RENEW_BEFORE, _WARN_BEFORE = timedelta(days=90), timedelta(days=30)  # the earliest expiry


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """New certificates (PEM): the authority's, and each node's with its private key, by node name.

    `reasons` has the faults of the current ones, by node name.
    """

    authority: str = ""
    nodes: Mapping[str, Secret]
    reasons: Mapping[str, str]


def renewal_reasons(
    inventory: Inventory, facts: Mapping[str, HostFacts], now: datetime
) -> dict[str, str]:
    """Return by node the reasons to renew the certificates; empty when all are valid."""
    problems: dict[str, str] = {}
    authorities = {}
    for node in inventory.nodes:
        host = facts.get(node.name)
        missing = host is None or not set(SECRET_NAMES) <= set(_stored_secrets(inventory, host))
        chain = () if missing or host is None else _parse_chain(host.certificates)
        if not chain:
            problems[node.name] = "its agent has no certificate"
            continue
        authorities[node.name] = chain[0]
        if fault := _certificate_fault(inventory, node, chain, now):
            problems[node.name] = fault
    first = next(iter(authorities.values()), None)
    for name, authority in authorities.items():
        if authority != first:
            problems.setdefault(name, "its agent's certificate is signed by another authority")
    return problems


def earliest_expiry(texts: Iterable[str]) -> datetime | None:
    """Return the earliest expiry of some nodes' certificates; None if there are none."""
    certificates = [certificate for text in texts for certificate in _parse_chain(text)]
    return min((certificate.not_valid_after_utc for certificate in certificates), default=None)


def expiry_warning(texts: Iterable[str], now: datetime) -> str:
    """Return a warning if certificates expire soon or have expired; else an empty string."""
    expiry = earliest_expiry(texts)
    if expiry is None or expiry - now > _WARN_BEFORE:
        return ""
    verb = "expired" if expiry <= now else "expire"
    return f"the agents' certificates {verb} on {expiry:%Y-%m-%d}; run `vlaunch up` to renew them"


def front_warning(inventory: Inventory, facts: Mapping[str, HostFacts], now: datetime) -> str:
    """Return a warning if the front's certificate expires soon or has `expired`; else empty."""
    secure = inventory.front is not None and inventory.front.tls.kind != "off"
    nodes = [node.name for node in inventory.front_nodes if secure and node.name in facts]
    pems = (facts[name].front_certificate for name in nodes)
    ends = (cert.not_valid_after_utc for pem in pems for cert in _parse_pem(pem))
    expiry = min(ends, default=None)
    if expiry is None or expiry - now > _WARN_BEFORE:
        return ""
    text = f"the front's certificate {'expired' if expiry <= now else 'expires'} on"
    return f"{text} {expiry:%Y-%m-%d}; renew it, then run `vlaunch front reload`"


def _stored_secrets(inventory: Inventory, facts: HostFacts) -> tuple[str, ...]:
    """Return the names of the secrets stored where the inventory wants them (`secrets_in`)."""
    return (
        (facts.secrets_in_memory or ()) if inventory.secrets_in == "memory" else facts.secret_names
    )


def _parse_chain(text: str) -> Sequence[x509.Certificate]:
    """Parse the certificates of the newest authority, of older ones left by an interrupted renewal,
    and of the node, in this order.
    """
    chain = _parse_pem(text)
    return chain if len(chain) > 1 else ()


def _parse_pem(text: str) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode(errors="replace"))
    except (ValueError, UnsupportedAlgorithm):
        return ()


def _certificate_fault(
    inventory: Inventory, node: Node, chain: Sequence[x509.Certificate], now: datetime
) -> str:
    authority, *older_authorities, node_certificate = chain
    if older_authorities:
        return "the renewal of its agent's certificate was interrupted"
    expiry = min(certificate.not_valid_after_utc for certificate in chain)
    if expiry - now < _RENEW_BEFORE:
        verb = "expired" if expiry <= now else "expires"
        return f"its agent's certificate {verb} on {expiry:%Y-%m-%d}"
    try:
        node_certificate.verify_directly_issued_by(authority)
        names = node_certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
        name = node_certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        matches = (
            name == node.name
            and node_certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
            == inventory.cluster
            and ipaddress.ip_address(node.ip) in names.get_values_for_type(x509.IPAddress)
        )
    except (ValueError, TypeError, LookupError, InvalidSignature, UnsupportedAlgorithm):
        return "its agent's certificate is not signed by its own authority"
    except x509.ExtensionNotFound:
        name, matches = "", False
    if any(name == other.name != node.name for other in inventory.nodes):
        return f"it has {name!s}'s certificate; set a separate `state_dir` for each of these nodes"
    return "" if matches else "its agent's certificate does not match its cluster, name or address"
