"""Measured bandwidth and latency against the expectations for the network cards: a link of the
right kind may still be slow.
"""

from functools import cache

from launcher.core.check import Finding
from launcher.core.expectations import ExpectedNic
from launcher.hosts.check import Evidence, Host
from launcher.hosts.checks.rdma import ports_in_use
from launcher.network.network_shape import Cell, Verdict, format_rate
from launcher.tools.host.survey import Survey

_ANY = ExpectedNic(model="a network card", match=".", source="defaults")


def judge(verdict: Verdict, evidence: Evidence, *, ranks_per_node: int) -> list[Finding]:
    """Warn about directions with less bandwidth or more latency than their cards should give;
    unknown cards give no warning.

    Args:
        verdict: the measurements.
        evidence: each node with its survey (cards and rates), and the expectations for cards.
        ranks_per_node: as many cards work at once at most.
    """

    @cache  # a node is an end of many cells
    def end_of(name: str, tcp: bool) -> tuple[float, float, str] | None:
        host = evidence.host(name)
        return None if host is None else _card_limits(host, ranks_per_node, tcp)

    findings = []
    for cell in verdict.cells:
        if cell.bandwidth is None or cell.status == "fail" or cell.transport.endswith("MNNVL"):
            continue
        tcp = cell.level == "any"
        ends = [end_of(name, tcp) for name in (cell.source, cell.target)]
        limits = [end for end in ends if end is not None]
        if len(limits) == len(ends):
            findings += _compare_cell(cell, *min(limits))
    return findings


def _compare_cell(cell: Cell, least: float, bound: float, card: str) -> list[Finding]:
    direction, problems = f"{cell.source} → {cell.target}", []
    if cell.bandwidth is not None and cell.bandwidth < least:
        problems.append(
            f"{format_rate(cell.bandwidth)}; {card} should give {format_rate(least)} or more"
        )
    if cell.latency is not None and cell.latency * 1e6 > bound:
        problems.append(f"{cell.latency * 1e6:.0f} µs; {card} should take {bound:.0f} µs or less")
    fix = (
        "check for errors and a slow port: `vlaunch check --group rdma --group network`, `ibstat`,"
        " `ethtool -S`"
    )
    return [Finding(node=direction, status="warn", text=text, fix=fix) for text in problems]


def _card_limits(host: Host, ranks: int, tcp: bool) -> tuple[float, float, str] | None:
    """Return least bandwidth (bytes/s), most latency (µs) and card of one end, if known."""
    if host.survey is None:
        return None
    return _tcp_limits(host, host.survey) if tcp else _rdma_limits(host, host.survey, ranks)


def _tcp_limits(host: Host, survey: Survey) -> tuple[float, float, str] | None:
    name = host.node.interface or host.facts.interface_of(host.node.ip)
    nic = next((item for item in survey.nics or () if item.name == name and item.physical), None)
    if nic is None or not nic.speed:
        return None
    card = host.evidence.expectations.nic(nic.driver) or _ANY
    return (
        nic.speed * 1e6 / 8 * card.share_tcp,
        card.latency_tcp,
        f"{nic.name} with {nic.speed / 1000:g} Gbit/s",
    )


def _rdma_limits(host: Host, survey: Survey, ranks: int) -> tuple[float, float, str] | None:
    ports = [
        (device, port)
        for device, port in ports_in_use(host.node, survey)
        if port.state == "ACTIVE" and port.rate
    ]
    if not ports:
        return None
    expected = host.evidence.expectations
    working = sorted(ports, key=lambda device_port: -device_port[1].rate)[: max(1, ranks)]
    cards = [expected.nic(device.model) or _ANY for device, _ in working]
    least = sum(
        port.rate * 1e9 / 8 * card.share for (_, port), card in zip(working, cards, strict=True)
    )
    title = ", ".join(
        dict.fromkeys(f"{device.name} with {port.rate:g} Gbit/s" for device, port in working)
    )
    return least, cards[0].latency, title
