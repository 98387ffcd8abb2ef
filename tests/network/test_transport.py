"""Network verdicts: the pair, node or rank to blame, and the reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.core import expectations_file
from launcher.core.domain import Level
from launcher.core.expectations import required_level
from launcher.network import transport
from launcher.network.network_shape import Cell, Measurement, Verdict
from launcher.network.probe_command import Collective, RankReport, Report
from tests.network.reports import GDR, NAMES, between, healthy, linked, three

ANY: tuple[Level, str] = ("any", "as requested")
EXPECTATIONS = expectations_file.load_expectations()
RDMA = "network: {fabric: infiniband}"


def verdict(
    reports: dict[str, Report],
    extra: str = "accelerator: cpu",
    level: tuple[Level, str] = ANY,
    *,
    collective: bool = True,
    **missing: str,
) -> Verdict:
    """Judge reports of three nodes."""
    remaining = {k: r for k, r in reports.items() if k not in missing}
    return transport.judge(
        Measurement(inventory=three(extra), reports=remaining, missing=missing),
        level,
        collective=collective,
    )


def blamed(observed: Verdict) -> list[str]:
    """Return the subjects of failures."""
    return [finding.node for finding in observed.findings if finding.status == "fail"]


def test_a_healthy_network_passes_in_every_direction() -> None:
    """Six directions of three nodes, with figures."""
    observed = verdict(healthy())

    assert observed.passed
    assert [(cell.source, cell.target) for cell in observed.cells] == [
        ("n1", "n2"),
        ("n1", "n3"),
        ("n2", "n1"),
        ("n2", "n3"),
        ("n3", "n1"),
        ("n3", "n2"),
    ]
    assert {
        (cell.transport, cell.bandwidth, cell.latency, cell.status) for cell in observed.cells
    } == {("Gloo/TCP", 1e9, 1e-4, "pass")}
    assert observed.findings == ()


def test_bandwidth_is_the_sum_over_local_ranks() -> None:
    """Eight rails carry eight times as much."""
    reports = healthy()
    twice = {
        k: replace(r, transfers=(*r.transfers, *(replace(t, local_rank=1) for t in r.transfers)))
        for k, r in reports.items()
    }

    assert {cell.bandwidth for cell in verdict(twice).cells} == {2e9}


def test_a_slow_pair_is_named_alone() -> None:
    """A tenth of the others' bandwidth."""
    observed = verdict(between(healthy(), "n2", "n3", bandwidth=1e8))

    assert not observed.passed
    assert blamed(observed) == ["n2 ↔ n3"]
    assert {(c.source, c.target) for c in observed.cells if c.status == "fail"} == {
        ("n2", "n3"),
        ("n3", "n2"),
    }
    assert transport.is_only_slow(observed)


def test_half_the_bandwidth_is_a_warning() -> None:
    """It may be noise."""
    observed = verdict(between(healthy(), "n2", "n3", bandwidth=4e8))

    assert observed.passed
    assert [f.status for f in observed.findings] == ["warn"]


def test_one_slow_direction_is_named() -> None:
    """The other direction is fine."""
    reports = healthy()
    slow = tuple(
        replace(t, bandwidth=1e7) if t.source == "n2" else t for t in reports["n3"].transfers
    )
    observed = verdict({**reports, "n3": replace(reports["n3"], transfers=slow)})

    assert blamed(observed) == ["n2 → n3"]


def test_a_node_with_only_slow_pairs_is_named() -> None:
    """Its own cable is the likely culprit."""
    observed = verdict(
        between(between(healthy(), "n1", "n3", bandwidth=1e7), "n2", "n3", bandwidth=1e7)
    )

    assert blamed(observed) == ["n3"]
    assert "every pair with this node" in observed.findings[0].text


def test_a_cut_pair_is_named_with_the_addresses_to_open() -> None:
    """Both reach the third node."""
    error = "connecting, rank 2 (n3) on the other side: timed out"
    broken = between(healthy(), "n2", "n3", error=error, bandwidth=None, latency=None)
    no_reduce = Collective(ranks=3, error="not tried: 1 pair failed")
    observed = verdict({k: replace(r, collective=no_reduce) for k, r in broken.items()})

    assert blamed(observed) == ["n2 ↔ n3"]
    assert "10.0.0.2" in observed.findings[0].fix
    assert "10.0.0.3" in observed.findings[0].fix
    assert not transport.is_only_slow(observed)


@pytest.mark.parametrize("others", [("n1", "n3"), ("n1",)])
def test_an_unknown_interface_in_a_variable_is_one_finding(
    others: tuple[str, ...],
) -> None:
    """Neither its pairs nor a firewall are to blame, although all of its pairs failed."""
    error, broken = (
        "GLOO_SOCKET_IFNAME names ens9, which is not here: there are lo, eth0",
        healthy(),
    )
    for name in others:
        broken = between(broken, "n2", name, error=error, bandwidth=None, latency=None)
        far = [
            replace(transfer, error=transfer.error and f"rank 1 (n2): {error}")
            for transfer in broken[name].transfers
        ]
        broken[name] = replace(broken[name], transfers=tuple(far))
    observed = verdict(broken)

    assert blamed(observed) == ["n2"]
    assert observed.findings[0].text == error
    assert observed.findings[0].fix.startswith("remove GLOO_SOCKET_IFNAME from `env:`")


@pytest.mark.parametrize("via", ["", "NET/Socket/0"])
def test_a_cut_pair_is_no_lack_of_rdma(via: str) -> None:
    """No container of the cluster has /dev/infiniband; that does not explain the cut."""
    reports = healthy(via=via, infiniband=(), memlock=65536)
    broken = between(reports, "n2", "n3", error="timed out", bandwidth=None, latency=None)
    observed = verdict(broken, "" if via else "accelerator: cpu")

    assert "10.0.0.2" in observed.findings[0].fix


def test_wrong_data_fails_whatever_the_bandwidth() -> None:
    """Fast corruption is no transfer."""
    observed = verdict(between(healthy(), "n1", "n2", correct=False))

    assert blamed(observed) == ["n1 ↔ n2"]
    assert "differs from the data that was sent" in observed.findings[0].text


def test_a_repetition_keeps_the_better_figures() -> None:
    """Interference never makes a transfer faster."""
    first, second = (
        between(healthy(), "n1", "n2", bandwidth=1e8),
        between(healthy(), "n2", "n3", bandwidth=1e8),
    )

    assert verdict(transport.merge_best(first, second)).passed
    assert not verdict(transport.merge_best(second, second)).passed


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (
            RankReport(rank=1, local_rank=0, phase="pair n1 ↔ n2", ended=False, exit=-9),
            "rank 1 was killed (signal 9)",
        ),
        (
            RankReport(rank=1, local_rank=0, phase="all_reduce", ended=False),
            "rank 1 did not finish before the deadline",
        ),
        (
            RankReport(rank=1, local_rank=0, phase="importing torch", ended=False, exit=1),
            "rank 1 ended with exit code 1",
        ),
        (
            RankReport(
                rank=1, local_rank=0, phase="rendezvous at 10.0.0.1:29500", ended=False, exit=1
            ),
            "arrived: n1, n3",
        ),
    ],
)
def test_an_unfinished_rank_is_named_with_its_phase(rank: RankReport, text: str) -> None:
    """With the arrived nodes, before the rendezvous."""
    reports = healthy()
    observed = verdict({**reports, "n2": replace(reports["n2"], ranks=(rank,), transfers=())})

    assert "n2" in blamed(observed)
    assert any(text in f.text and rank.phase in f.text for f in observed.findings)


def test_a_probe_without_a_report_is_named() -> None:
    """An unreadable answer is a failure."""
    observed = verdict(healthy(), n2="the network probe exited with code 1: No such container")

    assert blamed(observed)[0] == "n2"
    assert not observed.passed


def test_a_used_port_is_named_with_a_command() -> None:
    """A command that finds its process on the head."""
    reports = {k: Report(node=k, backend="gloo") for k in NAMES}
    observed = verdict(
        {**reports, "n1": replace(reports["n1"], error="port 29500 is taken on the head")}
    )

    assert blamed(observed)[0] == "n1"
    assert "ss -ltnp 'sport = :29500'" in observed.findings[0].fix
    assert "ports: {probe:" in observed.findings[0].fix


@pytest.mark.parametrize(
    ("via", "level", "passes"),
    [
        ("NET/Socket/0", "any", True),
        ("NET/Socket/0", "rdma", False),
        ("NET/IB/0", "rdma", True),
        ("NET/IB/0", "gdrdma", False),
        (GDR, "gdrdma", True),
        ("P2P/MNNVL", "gdrdma", True),
        ("NET/AWS Libfabric/1/GDRDMA", "gdrdma", True),
    ],
)
def test_the_level_of_every_pair_comes_from_nccl(via: str, level: Level, passes: bool) -> None:
    """MNNVL is better than any NIC."""
    observed = verdict(healthy(via=via), RDMA, (level, "as requested"))

    assert observed.passed is passes
    assert blamed(observed) == ([] if passes else [""])  # all pairs alike: one finding for all


def test_a_pair_below_the_level_is_named_alone() -> None:
    """One node's NIC is unused in one of its pairs."""
    observed = verdict(
        linked(healthy(via=GDR), "n1", "n2", "NET/Socket/0"), RDMA, ("gdrdma", "as requested")
    )

    assert blamed(observed) == ["n1 ↔ n2"]
    assert "Socket is below the required level: RDMA with GPUDirect" in observed.findings[0].text


def test_the_cause_comes_from_the_nodes_log() -> None:
    """No RDMA device in the container of n3."""
    reports = linked(
        linked(healthy(via=GDR), "n1", "n3", "NET/Socket/0"), "n2", "n3", "NET/Socket/0"
    )
    text = "n3:7:9 [0] NCCL INFO NET/IB : No device found.\n"
    reports["n3"] = replace(reports["n3"], log=text)
    observed = verdict(reports, RDMA, ("rdma", "as requested"))

    assert blamed(observed) == ["n3"]
    assert "No device found" in observed.findings[0].evidence
    assert "sudo modprobe -a mlx5_ib" in observed.findings[0].fix


def test_a_silent_nccl_proves_nothing() -> None:
    """Figures alone do not prove a transport."""
    reports = {k: replace(r, pair_logs={}) for k, r in healthy(via=GDR).items()}
    observed = verdict(reports, RDMA)

    assert not observed.passed
    assert "transport is not confirmed" in observed.findings[0].text


@pytest.mark.parametrize("silent", ["n1", "n2"])
def test_both_ends_must_have_logged_the_link(silent: str) -> None:
    """One line proves one end only."""
    reports = healthy(via=GDR)
    other = {"n1": "n2", "n2": "n1"}[silent]
    reports[silent] = replace(reports[silent], pair_logs={**reports[silent].pair_logs, other: ""})
    observed = verdict(reports, RDMA)

    assert blamed(observed) == ["n1 ↔ n2"]


def test_every_rank_must_have_logged_its_link() -> None:
    """Two ranks per node, and the log of one: the other may use TCP."""
    reports = healthy(via=GDR)
    two = {
        k: replace(r, ranks=(*r.ranks, replace(r.ranks[0], local_rank=1)))
        for k, r in reports.items()
    }

    assert not verdict(two, RDMA).passed
    logs = {
        k: {peer: text + text.replace(":7:", ":8:") for peer, text in r.pair_logs.items()}
        for k, r in two.items()
    }
    assert verdict({k: replace(r, pair_logs=logs[k]) for k, r in two.items()}, RDMA).passed


@pytest.mark.parametrize(
    "spoilt",
    [
        Collective(ranks=3, correct=False, busbw=1e9),
        Collective(ranks=3, error="not finished after 20 s"),
        None,
    ],
)
def test_the_all_reduce_of_every_node_counts(spoilt: Collective | None) -> None:
    """Not only the first node's."""
    reports = healthy()
    reports["n2"] = replace(reports["n2"], collective=spoilt)

    assert not verdict(reports).passed
    assert verdict(reports, collective=False).passed


def test_one_node_without_rdma_is_named() -> None:
    """It reduces the whole cluster to TCP."""
    reports = {
        k: replace(r, rdma=("mlx5_0:1",) if k != "n3" else ())
        for k, r in healthy(via="NET/Socket/0").items()
    }
    observed = verdict(reports, "")

    assert observed.passed
    assert [(f.node, f.status) for f in observed.findings] == [("n3", "warn")]
    assert verdict(reports, "network: {require: any}").findings == ()


def test_zero_bandwidth() -> None:
    """No division by zero."""
    zero = healthy()
    for a, b in (("n1", "n2"), ("n1", "n3"), ("n2", "n3")):
        zero = between(zero, a, b, bandwidth=0.0)

    assert len(verdict(zero).cells) == 6


def test_different_versions_are_reported() -> None:
    """Ranks with different NCCL versions hang or fail."""
    reports = healthy()
    reports["n2"] = replace(reports["n2"], versions={"torch": "2.12.0"})
    observed = verdict(reports)

    assert not observed.passed
    assert "n2 has 2.12.0" in observed.findings[0].text


def test_a_failing_all_reduce_counts_where_collectives_cross_nodes() -> None:
    """With pipeline stages between nodes only sends do."""
    wrong = {
        k: replace(r, collective=Collective(ranks=3, error="timed out"))
        for k, r in healthy().items()
    }

    assert not verdict(wrong, collective=True).passed
    assert verdict(wrong, collective=False).passed


@pytest.mark.parametrize(
    ("extra", "gpu", "rdma", "level"),
    [
        ("accelerator: cpu", "", False, "any"),
        ("", "NVIDIA H100 80GB HBM3", False, "any"),
        # an inventory that forgot its fabric: the silent case
        ("", "NVIDIA H100 80GB HBM3", True, "rdma"),
        (RDMA, "NVIDIA H100 80GB HBM3", True, "gdrdma"),
        (RDMA, "NVIDIA GB10", True, "rdma"),
        (RDMA, "NVIDIA GeForce RTX 4090", True, "rdma"),
        ("network: {fabric: roce, require: any}", "NVIDIA H100 80GB HBM3", True, "any"),
    ],
)
def test_auto_is_what_the_hardware_can_do(extra: str, gpu: str, rdma: bool, level: str) -> None:
    """GPUDirect is expected of datacenter GPUs on an RDMA fabric, RDMA wherever every node has an
    active port.
    """
    nodes = NAMES if rdma else ()

    assert (
        required_level(three(extra), gpus=[gpu], rdma=nodes, expectations=EXPECTATIONS)[0] == level
    )
    assert required_level(
        three(extra), gpus=[gpu], rdma=nodes, expectations=EXPECTATIONS, requested="any"
    ) == (
        "any",
        "as requested",
    )


def test_auto_does_without_gpudirect_where_nccl_does() -> None:
    """NCCL uses it only below one PCIe switch; the verdict warns, unless GPUDirect was used all the
    same.
    """
    gpus = ["NVIDIA H100 80GB HBM3"]
    level = required_level(
        three(RDMA), gpus=gpus, rdma=NAMES, expectations=EXPECTATIONS, distant_nodes=["n2", "n3"]
    )
    assert level == (
        "rdma",
        "`fabric: infiniband`; n[2-3]: no GPU shares a PCIe switch with an RDMA device, so NCCL"
        " does not use GPUDirect",
    )

    def warned(via: str, level: tuple[Level, str]) -> list[str]:
        reports = {
            name: replace(report, shared_switch=name == "n1")
            for name, report in healthy(via=via).items()
        }
        observed = verdict(reports, RDMA, level)
        assert observed.passed
        return [finding.node for finding in observed.findings if finding.status == "warn"]

    assert warned("NET/IB/0", level) == ["n2", "n3"]
    assert warned(GDR, level) == []
    assert warned("NET/IB/0", ("rdma", "as requested")) == []


def test_auto_overrides_the_inventory() -> None:
    """`--require auto` is not the inventory's `any`."""
    inventory = three("network: {fabric: roce, require: any}")

    assert (
        required_level(
            inventory, gpus=["NVIDIA GB10"], rdma=NAMES, expectations=EXPECTATIONS, requested="auto"
        )[0]
        == "rdma"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda nodes: st.lists(
            st.sampled_from([None, 1e8, 3e8, 6e8, 1e9, 2e9, 1e10]),
            min_size=nodes * (nodes - 1),
            max_size=nodes * (nodes - 1),
        )
    )
)
def test_a_direction_is_compared_with_the_median_of_the_other_pairs(
    rates: list[float | None],
) -> None:
    """The reverse direction does not count as another pair; with it or one other pair, slowness is
    a warning.
    """
    nodes = range(next(n for n in range(2, 6) if n * (n - 1) == len(rates)))
    cells = [
        Cell(source=str(a), target=str(b), status="pass", bandwidth=rate)
        for (a, b), rate in zip(permutations(nodes, 2), rates, strict=True)
    ]
    for cell, compared in zip(cells, transport._mark_outliers(cells), strict=True):
        ends = {cell.source, cell.target}
        others = [c.bandwidth for c in cells if {c.source, c.target} != ends and c.bandwidth]
        back = [c.bandwidth for c in cells if c.target == cell.source and c.source == cell.target]
        usual = median(others) if others else back[0] or 0.0
        expected = "pass"
        if cell.bandwidth is not None and cell.bandwidth < usual / 2:
            expected = "fail" if len(others) > 2 and cell.bandwidth < usual / 4 else "warn"

        assert compared.status == expected
