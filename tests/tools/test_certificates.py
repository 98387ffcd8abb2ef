"""When the agents' certificates must be renewed, and when their end is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher.inventory.load import loads
from launcher.model import Inventory
from launcher.remote import certificate
from launcher.tools import certificates
from launcher.tools.host import HostFacts

NOW = datetime(2027, 3, 1, tzinfo=timezone.utc)
YEARS = timedelta(days=5 * 365)
Facts = dict[str, HostFacts]


def cluster(more: str = "", second: str = "gpu02", ip: str = "10.0.0.12") -> Inventory:
    nodes = f"[{{host: gpu01, ip: 10.0.0.11, gpus: 8}}, {{host: {second}, ip: {ip}, gpus: 8}}]"
    text = f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\nnodes: {nodes}\n{more}"
    return loads(text, Path("inventory.yaml"))


def issued(inventory: Inventory | None = None, at: datetime = NOW) -> Facts:
    """Return nodes as `up` leaves them."""
    authority, nodes = certificate.issue(inventory or cluster(), at)
    return {
        name: HostFacts(
            secret_names=certificates.NAMES,
            certificates=authority + pair.reveal().partition("-----BEGIN PRIVATE")[0],
        )
        for name, pair in nodes.items()
    }


def test_what_up_issued_stays_until_90_days_before_its_end() -> None:
    """Then all nodes get new ones."""
    facts, day = issued(), timedelta(days=1)

    for at in (NOW - 1000 * day, NOW, NOW + YEARS - 90 * day):
        assert certificates.reasons(cluster(), facts, at) == {}
    for at, verb in ((NOW + YEARS - 89 * day, "ends"), (NOW + YEARS, "ended")):
        assert certificates.reasons(cluster(), facts, at) == dict.fromkeys(
            ("gpu01", "gpu02"), f"its agent's certificate {verb} on 2032-02-28"
        )


def _one_lacks_it(facts: Facts) -> None:
    facts["gpu02"] = replace(facts["gpu02"], secret_names=("AGENT_CA", "HF_TOKEN"))


def _one_shows_none(facts: Facts) -> None:
    facts["gpu02"] = replace(facts["gpu02"], certificates="")


def _one_shows_garbage(facts: Facts) -> None:
    text = facts["gpu02"].certificates.replace("M", "\N{SNOWMAN}")
    facts["gpu02"] = replace(facts["gpu02"], certificates=text)


def _one_is_of_another_authority(facts: Facts) -> None:
    facts["gpu02"] = issued()["gpu02"]


def _one_has_another_authority_than_signed_it(facts: Facts) -> None:
    mark = "-----END CERTIFICATE-----\n"
    authority, own = (facts["gpu01"].certificates, issued()["gpu02"].certificates)
    text = authority.partition(mark)[0] + mark + own.partition(mark)[2]
    facts["gpu02"] = replace(facts["gpu02"], certificates=text)


def _one_has_anothers(facts: Facts) -> None:
    facts["gpu02"] = facts["gpu01"]


def _of_another_address(facts: Facts) -> None:
    facts.update(issued(cluster(ip="10.0.0.99")))


def _of_another_cluster(facts: Facts) -> None:
    facts.update(issued(replace(cluster(), cluster="d")))


def _one_was_not_seen(facts: Facts) -> None:
    del facts["gpu02"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_one_lacks_it, "its agent has no certificate"),
        (_one_shows_none, "its agent has no certificate"),
        (_one_shows_garbage, "its agent has no certificate"),
        (_one_was_not_seen, "its agent has no certificate"),
        (
            _one_is_of_another_authority,
            "its agent's certificate is not signed as the others' are",
        ),
        (
            _one_has_another_authority_than_signed_it,
            "its agent's certificate is not signed by the authority that it has",
        ),
        (
            _one_has_anothers,
            "it has gpu01's certificate; nodes that share a folder need a `state_dir` each",
        ),
        (_of_another_address, "its agent's certificate has another name or address"),
        (_of_another_cluster, "its agent's certificate has another name or address"),
    ],
)
def test_a_wrong_one_is_told(change: Callable[[Facts], None], why: str) -> None:
    """Of the node that has it, in words."""
    facts = issued()
    change(facts)

    assert certificates.reasons(cluster(), facts, NOW)["gpu02"] == why


def test_they_must_lie_where_the_inventory_says() -> None:
    """With `secrets_in: memory`, those on the disk are none."""
    facts, wanted = issued(), cluster("secrets_in: memory")
    assert set(certificates.reasons(wanted, facts, NOW)) == {"gpu01", "gpu02"}
    facts = {
        name: replace(each, secret_names=(), in_memory=certificates.NAMES)
        for name, each in facts.items()
    }

    assert certificates.reasons(wanted, facts, NOW) == {}


def test_their_end_is_told_30_days_before() -> None:
    """Of the first that ends, whatever other nodes have."""
    texts = [*(each.certificates for each in issued().values()), "", "garbage"]
    texts += [each.certificates for each in issued(at=NOW + timedelta(days=9)).values()]
    end = NOW + YEARS

    assert certificates.ends(texts) == end
    assert certificates.ends(["", "garbage"]) is None
    assert certificates.warning(texts, end - timedelta(days=31)) == ""
    assert certificates.warning([], end) == ""
    said = [certificates.warning(texts, at) for at in (end - timedelta(days=30), end)]
    assert said == [
        f"the agents' certificates {verb} on 2032-02-28; run `vlaunch up` to renew them"
        for verb in ("end", "ended")
    ]
