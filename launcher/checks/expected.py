"""Measured bandwidth and latency against what network cards are known to do: the right kind of link
may still be sick.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.checks.network import Cell, Verdict, rate
from launcher.checks.rdma import in_use
from launcher.checks.shape import Finding
from launcher.checks.transport_kinds import over_tcp
from launcher.model import Inventory, Node
from launcher.tools.expectations import Expectations, Nic
from launcher.tools.host import HostFacts
from launcher.tools.survey import Survey

_ANY = Nic(model="a network card", match=".", source="defaults")


def judge(
    inventory: Inventory,
    verdict: Verdict,
    facts: Mapping[str, HostFacts],
    known: Expectations,
    *,
    ranks_per_node: int,
) -> list[Finding]:
    """Warn of directions with less bandwidth, or more latency, than their cards should give; silent
    where cards are unknown.

    Args:
        inventory: which of a node's RDMA devices may be used.
        verdict: what was measured.
        facts: each node with its survey, for its cards and their rates.
        known: figures by card.
        ranks_per_node: as many cards work at once at most.
    """
    findings = []
    for cell in verdict.cells:
        if cell.bandwidth is None or cell.status == "fail" or cell.transport.endswith("MNNVL"):
            continue
        tcp = over_tcp(cell.transport)
        ends = [
            _end(inventory.node(name), facts.get(name), known, ranks_per_node, tcp)
            for name in (cell.source, cell.target)
        ]
        if any(end is None for end in ends):
            continue
        least, bound, card = min(end for end in ends if end is not None)
        findings += _compare(cell, least, bound, card)
    return findings


def _compare(cell: Cell, least: float, bound: float, card: str) -> list[Finding]:
    where, said = f"{cell.source} → {cell.target}", []
    if cell.bandwidth is not None and cell.bandwidth < least:
        said.append(f"{rate(cell.bandwidth)}, where {card} should give {rate(least)} or more")
    if cell.latency is not None and cell.latency * 1e6 > bound:
        said.append(f"{cell.latency * 1e6:.0f} µs, where {card} should take {bound:.0f} µs or less")
    fix = (
        "look for errors and a slow port: `vlaunch check --group rdma --group network`, `ibstat`,"
        " `ethtool -S`"
    )
    return [Finding(node=where, status="warn", text=text, fix=fix) for text in said]


def _end(
    node: Node, facts: HostFacts | None, known: Expectations, ranks: int, tcp: bool
) -> tuple[float, float, str] | None:
    """Return the least bandwidth (bytes/s), the most latency (µs) and the card of one end; `None`
    where that is not known.
    """
    if facts is None or facts.survey is None:
        return None
    if tcp:
        return _end_over_tcp(node, facts, facts.survey, known)
    return _end_over_rdma(node, facts.survey, known, ranks)


def _end_over_tcp(
    node: Node, facts: HostFacts, survey: Survey, known: Expectations
) -> tuple[float, float, str] | None:
    name = node.interface or facts.interface_of(node.ip)
    nic = next((each for each in survey.nics or () if each.name == name and each.physical), None)
    if nic is None or not nic.speed:
        return None
    card = known.nic(nic.driver) or _ANY
    return (
        nic.speed * 1e6 / 8 * card.share_tcp,
        card.latency_tcp,
        f"{nic.name} with {nic.speed / 1000:g} Gbit/s",
    )


def _end_over_rdma(
    node: Node, survey: Survey, known: Expectations, ranks: int
) -> tuple[float, float, str] | None:
    ports = [
        (device, port)
        for device, port in in_use(node, survey)
        if port.state == "ACTIVE" and port.rate
    ]
    if not ports:
        return None
    working = sorted(ports, key=lambda each: -each[1].rate)[: max(1, ranks)]
    cards = [known.nic(device.model) or _ANY for device, _ in working]
    least = sum(
        port.rate * 1e9 / 8 * card.share for (_, port), card in zip(working, cards, strict=True)
    )
    title = ", ".join(
        dict.fromkeys(f"{device.name} with {port.rate:g} Gbit/s" for device, port in working)
    )
    return least, cards[0].latency, title
