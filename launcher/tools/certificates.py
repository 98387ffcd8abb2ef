"""The certificates by which the agents of a cluster know one another: validity and end.

A node shows its own and that of the authority that signed it, without private keys. All of a
cluster are renewed together, for the authority's key is not kept.
"""

from __future__ import annotations

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
NAMES = (AUTHORITY, CERTIFICATE)
_RENEWED, _WARNED = timedelta(days=90), timedelta(days=30)  # before the first of them ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Certificates to write: the authority's, and those of the nodes with their private keys (PEM),
    by the node's name.

    `reasons` says what is wrong with the present ones.
    """

    authority: str = ""
    nodes: Mapping[str, Secret]
    reasons: Mapping[str, str]


def reasons(inventory: Inventory, facts: Mapping[str, HostFacts], now: datetime) -> dict[str, str]:
    """Return by node why the certificates must be renewed; nothing when they are valid."""
    problems: dict[str, str] = {}
    authorities = {}
    for node in inventory.nodes:
        host = facts.get(node.name)
        missing = host is None or not set(NAMES) <= set(_there(inventory, host))
        chain = () if missing or host is None else _chain(host.certificates)
        if not chain:
            problems[node.name] = "its agent has no certificate"
            continue
        authorities[node.name] = chain[0]
        if wrong := _wrong(inventory, node, chain, now):
            problems[node.name] = wrong
    first = next(iter(authorities.values()), None)
    for name, authority in authorities.items():
        if authority != first:
            problems.setdefault(name, "its agent's certificate is not signed as the others' are")
    return problems


def ends(texts: Iterable[str]) -> datetime | None:
    """Return when the first of some nodes' certificates ends; None where there is none."""
    certificates = [certificate for text in texts for certificate in _chain(text)]
    return min((certificate.not_valid_after_utc for certificate in certificates), default=None)


def warning(texts: Iterable[str], now: datetime) -> str:
    """Say that certificates end soon, or have ended; nothing when they do not."""
    end = ends(texts)
    if end is None or end - now > _WARNED:
        return ""
    verb = "ended" if end <= now else "end"
    return f"the agents' certificates {verb} on {end:%Y-%m-%d}; run `vlaunch up` to renew them"


def _there(inventory: Inventory, facts: HostFacts) -> tuple[str, ...]:
    """Return the names of the secrets that lie where the inventory says."""
    return (facts.in_memory or ()) if inventory.secrets_in == "memory" else facts.secret_names


def _chain(text: str) -> Sequence[x509.Certificate]:
    """Read the certificate of the newest authority, those of earlier ones that an interrupted
    renewal has left, and the node's.
    """
    try:
        chain = x509.load_pem_x509_certificates(text.encode(errors="replace"))
    except (ValueError, UnsupportedAlgorithm):
        return ()
    return chain if len(chain) > 1 else ()


def _wrong(
    inventory: Inventory, node: Node, chain: Sequence[x509.Certificate], now: datetime
) -> str:
    authority, *earlier, own = chain
    if earlier:
        return "the renewal of its agent's certificate was interrupted"
    end = min(certificate.not_valid_after_utc for certificate in chain)
    if end - now < _RENEWED:
        verb = "ended" if end <= now else "ends"
        return f"its agent's certificate {verb} on {end:%Y-%m-%d}"
    try:
        own.verify_directly_issued_by(authority)
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        name = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        known = (
            name == node.name
            and own.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
            == inventory.cluster
            and ipaddress.ip_address(node.ip) in names.get_values_for_type(x509.IPAddress)
        )
    except (ValueError, TypeError, LookupError, InvalidSignature, UnsupportedAlgorithm):
        return "its agent's certificate is not signed by the authority that it has"
    except x509.ExtensionNotFound:
        name, known = "", False
    if any(name == other.name != node.name for other in inventory.nodes):
        return f"it has {name!s}'s certificate; nodes that share a folder need a `state_dir` each"
    return "" if known else "its agent's certificate has another name or address"
