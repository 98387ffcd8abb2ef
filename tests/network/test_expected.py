"""Measurements against the expectations for cards."""

from __future__ import annotations

from dataclasses import replace

from launcher.core import expectations_file
from launcher.core.check import Finding
from launcher.hosts.check import Evidence
from launcher.network import expected, transport
from launcher.network.network_shape import Measurement
from launcher.network.probe_command import Report
from launcher.tools.host import Address, HostFacts
from launcher.tools.host.survey import Nic, RdmaDevice, RdmaPort, Survey
from tests.network.reports import GDR, NAMES, between, healthy, three

EXPECTATIONS = expectations_file.load_expectations()
RDMA = "network: {fabric: infiniband}"
HDR = RdmaDevice(
    name="mlx5_0", model="MT4123", ports=(RdmaPort(number=1, state="ACTIVE", rate=200.0),)
)
ETH = Nic(name="eth0", up=True, mtu=1500, speed=25_000, physical=True, driver="mlx5_core")


def facts(survey: Survey) -> dict[str, HostFacts]:
    """Return three nodes with the same cards."""
    return {
        name: HostFacts(
            addresses=(Address(interface="eth0", ip=f"10.0.0.{i}", prefix=24, up=True),),
            survey=survey,
        )
        for i, name in enumerate(NAMES, start=1)
    }


def judged(
    reports: dict[str, Report], survey: Survey, extra: str = RDMA, ranks: int = 1
) -> list[Finding]:
    """Judge the figures of three nodes."""
    inventory = three(extra)
    measured = Measurement(inventory=inventory, reports=reports)
    observed = Evidence(inventory=inventory, facts=facts(survey), expectations=EXPECTATIONS)
    verdict = transport.judge(measured, ("any", "as requested"))
    return expected.judge(verdict, observed, ranks_per_node=ranks)


def fast(bandwidth: float, latency: float, via: str = GDR) -> dict[str, Report]:
    """Return equal pairs."""
    reports = healthy(via=via)
    for a, b in (("n1", "n2"), ("n1", "n3"), ("n2", "n3")):
        reports = between(reports, a, b, bandwidth=bandwidth, latency=latency)
    return reports


def test_nine_tenths_of_the_line_rate_over_rdma() -> None:
    """HDR has 25 GB/s: 22.5 are enough, 20 are not."""
    assert judged(fast(23e9, 5e-6), Survey(rdma=(HDR,))) == []
    findings = judged(fast(20e9, 5e-6), Survey(rdma=(HDR,)))

    assert len(findings) == 6
    assert findings[0].status == "warn"
    assert findings[0].node == "n1 → n2"
    assert "20.0 GB/s; mlx5_0 with 200 Gbit/s should give 22.5 GB/s or more" in findings[0].text


def test_cards_per_rank() -> None:
    """Two cards and one rank: the rate of one card."""
    two = Survey(rdma=(HDR, replace(HDR, name="mlx5_1")))

    assert judged(fast(23e9, 5e-6), two, ranks=1) == []
    assert judged(fast(23e9, 5e-6), two, ranks=2) != []


def test_a_fast_link_with_a_slow_latency() -> None:
    """Bandwidth alone would have passed."""
    findings = judged(fast(23e9, 5e-4), Survey(rdma=(HDR,)))

    assert "500 µs; mlx5_0 with 200 Gbit/s should take 100 µs or less" in findings[0].text


def test_tcp_is_judged_by_the_interface() -> None:
    """Half of 25 Gbit/s; a virtual interface promises nothing."""
    slow = fast(1e9, 1e-4, via="NET/Socket/0")

    assert "eth0 with 25 Gbit/s should give 1.6 GB/s" in judged(slow, Survey(nics=(ETH,)))[0].text
    assert judged(slow, Survey(nics=(replace(ETH, physical=False),))) == []


def test_unknown_hardware_is_not_judged() -> None:
    """No survey, no card, or NVLink between nodes."""
    assert judged(fast(1e6, 1e-2), Survey()) == []
    assert judged(fast(1e6, 1e-2, via="P2P/MNNVL"), Survey(rdma=(HDR,))) == []
