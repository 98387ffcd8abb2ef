"""Renewal of the agents' certificates, and the warning before they expire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher.app import certificates as issue_certificates
from launcher.core.domain import Inventory
from launcher.inventory.load import loads
from launcher.tools.host import HostFacts
from launcher.tools.shipped import certificates

NOW = datetime(2027, 3, 1, tzinfo=timezone.utc)
YEARS = timedelta(days=5 * 365)
Facts = dict[str, HostFacts]


def cluster(settings: str = "", ip: str = "10.0.0.12") -> Inventory:
    nodes = f"[{{host: gpu01, ip: 10.0.0.11, gpus: 8}}, {{host: gpu02, ip: {ip}, gpus: 8}}]"
    text = f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\nnodes: {nodes}\n{settings}"
    return loads(text, Path("inventory.yaml"))


def issue(inventory: Inventory | None = None, at: datetime = NOW) -> Facts:
    """Issue certificates as in `up`, and return the nodes' facts."""
    authority, nodes = issue_certificates.issue_certificates(inventory or cluster(), at)
    return {
        name: HostFacts(
            secret_names=certificates.SECRET_NAMES,
            certificates=authority + pair.reveal().partition("-----BEGIN PRIVATE")[0],
        )
        for name, pair in nodes.items()
    }


def test_certificates_are_renewed_90_days_before_they_expire() -> None:
    """On all nodes at once."""
    facts, day = issue(), timedelta(days=1)

    for at in (NOW - 1000 * day, NOW, NOW + YEARS - 90 * day):
        assert certificates.renewal_reasons(cluster(), facts, at) == {}
    for at, verb in ((NOW + YEARS - 89 * day, "expires"), (NOW + YEARS, "expired")):
        assert certificates.renewal_reasons(cluster(), facts, at) == dict.fromkeys(
            ("gpu01", "gpu02"), f"its agent's certificate {verb} on 2032-02-28"
        )


def _remove_file(facts: Facts) -> None:
    facts["gpu02"] = replace(facts["gpu02"], secret_names=("AGENT_CA", "HF_TOKEN"))


def _empty_file(facts: Facts) -> None:
    facts["gpu02"] = replace(facts["gpu02"], certificates="")


def _damage_file(facts: Facts) -> None:
    text = facts["gpu02"].certificates.replace("M", "\N{SNOWMAN}")
    facts["gpu02"] = replace(facts["gpu02"], certificates=text)


def _change_authority(facts: Facts) -> None:
    facts["gpu02"] = issue()["gpu02"]


def _change_signature(facts: Facts) -> None:
    mark = "-----END CERTIFICATE-----\n"
    authority, own = (facts["gpu01"].certificates, issue()["gpu02"].certificates)
    text = authority.partition(mark)[0] + mark + own.partition(mark)[2]
    facts["gpu02"] = replace(facts["gpu02"], certificates=text)


def _copy_from_other_node(facts: Facts) -> None:
    facts["gpu02"] = facts["gpu01"]


def _change_address(facts: Facts) -> None:
    facts.update(issue(cluster(ip="10.0.0.99")))


def _change_cluster(facts: Facts) -> None:
    facts.update(issue(replace(cluster(), cluster="d")))


def _remove_node(facts: Facts) -> None:
    del facts["gpu02"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_remove_file, "its agent has no certificate"),
        (_empty_file, "its agent has no certificate"),
        (_damage_file, "its agent has no certificate"),
        (_remove_node, "its agent has no certificate"),
        (
            _change_authority,
            "its agent's certificate is signed by another authority",
        ),
        (
            _change_signature,
            "its agent's certificate is not signed by its own authority",
        ),
        (
            _copy_from_other_node,
            "it has gpu01's certificate; set a separate `state_dir` for each of these nodes",
        ),
        (_change_address, "its agent's certificate does not match its cluster, name or address"),
        (_change_cluster, "its agent's certificate does not match its cluster, name or address"),
    ],
)
def test_an_invalid_certificate_has_a_reason(change: Callable[[Facts], None], reason: str) -> None:
    """By node."""
    facts = issue()
    change(facts)

    assert certificates.renewal_reasons(cluster(), facts, NOW)["gpu02"] == reason


def test_certificates_must_be_in_the_inventorys_place() -> None:
    """With `secrets_in: memory`, those on the disk do not count."""
    facts, inventory = issue(), cluster("secrets_in: memory")
    assert set(certificates.renewal_reasons(inventory, facts, NOW)) == {"gpu01", "gpu02"}
    facts = {
        name: replace(host, secret_names=(), secrets_in_memory=certificates.SECRET_NAMES)
        for name, host in facts.items()
    }

    assert certificates.renewal_reasons(inventory, facts, NOW) == {}


def test_the_warning_starts_30_days_before_the_first_expires() -> None:
    """Missing and damaged certificates are ignored."""
    texts = [*(host.certificates for host in issue().values()), "", "garbage"]
    texts += [host.certificates for host in issue(at=NOW + timedelta(days=9)).values()]
    end = NOW + YEARS

    assert certificates.earliest_expiry(texts) == end
    assert certificates.earliest_expiry(["", "garbage"]) is None
    assert certificates.expiry_warning(texts, end - timedelta(days=31)) == ""
    assert certificates.expiry_warning([], end) == ""
    warnings = [certificates.expiry_warning(texts, at) for at in (end - timedelta(days=30), end)]
    assert warnings == [
        f"the agents' certificates {verb} on 2032-02-28; run `vlaunch up` to renew them"
        for verb in ("expire", "expired")
    ]
