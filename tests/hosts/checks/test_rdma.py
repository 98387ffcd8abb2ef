"""RDMA devices, their names, links and GIDs, and GPUDirect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hosts.checks.spoiled import (
    GIDS,
    GPU,
    HCA,
    NODES,
    PORT,
    Case,
    findings,
    named,
    stays_unknown,
    turns_red,
)

GB10 = replace(GPU, name="NVIDIA GB10", memory_total=0)

CASES = (
    Case(
        id="rdma-unused",
        red=dict.fromkeys(NODES, "warn"),
        text="has active RDMA ports that the cluster will not use: mlx5_0:1",
        fix="set `network: {fabric: roce}`",
        extra="",
    ),
    Case(
        id="rdma-unused",
        red=dict.fromkeys(NODES, "fail"),
        text="mlx5_0:1",
        fix="set `network: {fabric: infiniband}`",
        extra="",
        survey={"*": {"rdma": (replace(HCA, ports=(replace(PORT, link_layer="InfiniBand"),)),)}},
        evidence={"required": "rdma"},
    ),
    Case(
        id="rdma-unused",
        red=dict.fromkeys(NODES, "warn"),
        text="rdmap16s27:1",
        fix="with an image that has NCCL's plugin for it (aws-ofi-nccl for EFA)",
        extra="",
        survey={
            "*": {
                "rdma": (
                    replace(HCA, name="rdmap16s27", ports=(replace(PORT, link_layer="Unknown"),)),
                )
            }
        },
    ),
    Case(
        id="rdma-devices",
        red={"gpu02": "fail"},
        text="no /dev/infiniband",
        fix="modprobe mlx5_ib",
        facts={"gpu02": {"infiniband": ()}},
    ),
    Case(
        id="hca-names",
        red={"gpu02": "fail"},
        text="has no RDMA device `mlx5_0`",
        fix="set `network: {hca: [mlx5_4]}` for gpu02",
        survey={"gpu02": {"rdma": (replace(HCA, name="mlx5_4"),)}},
    ),
    Case(
        id="hca-names",
        red={"gpu03": "fail"},
        text="has no RDMA device `rocep1`",
        fix="set `network: {hca: [mlx5_0]}` for gpu03",
        extra="network: {fabric: roce}",
        own={"gpu03": ", env: {NCCL_IB_HCA: rocep1}"},
    ),
    Case(
        id="hca-names",
        red={"gpu03": "fail"},
        text="`mlx5_0:2`",
        fix="for gpu03",
        own={"gpu03": ", network: {hca: ['mlx5_0:2']}"},
    ),
    Case(
        id="rdma-link",
        red={"gpu01": "fail"},
        text="no RDMA link: mlx5_0:1 is DOWN (Polling)",
        fix="`ibstat` on gpu01",
        survey={
            "gpu01": {
                "rdma": (replace(HCA, ports=(replace(PORT, state="DOWN", physical="Polling"),)),)
            }
        },
    ),
    Case(
        id="rdma-link",
        red={"gpu02": "warn"},
        text="1 × 100 Gbit/s Ethernet, while gpu[01,03] has 1 × 400 Gbit/s Ethernet",
        fix="`rdma link` and `ibstat` on gpu02",
        survey={"gpu02": {"rdma": (replace(HCA, ports=(replace(PORT, rate=100),)),)}},
    ),
    Case(
        id="rdma-link",
        red=dict.fromkeys(NODES, "warn"),
        text="mlx5_0 is a ConnectX-7, which can do 400 Gbit/s",
        fix="cable",
        survey={"*": {"rdma": (replace(HCA, ports=(replace(PORT, rate=200),)),)}},
    ),
    Case(
        id="gid-index",
        red={"gpu02": "fail"},
        text="NCCL_IB_GID_INDEX=2, but GID 2 of mlx5_0:1 is IB/RoCE v1",
        fix="set it to 3 for gpu02",
        own={"gpu02": ", env: {NCCL_IB_GID_INDEX: 2}"},
    ),
    Case(
        id="gid-index",
        red={"gpu02": "fail"},
        text="GID 5 of mlx5_0:1 is empty",
        fix="set it to 3 for gpu02",
        own={"gpu02": ", env: {NCCL_IB_GID_INDEX: 5}"},
    ),
    Case(
        id="gid-index",
        red={"gpu03": "fail"},
        text="mlx5_0:1 has no RoCE v2 GID",
        fix="`sudo ip addr add ADDRESS/PREFIX dev ens1`",
        survey={"gpu03": {"rdma": (replace(HCA, ports=(replace(PORT, gids=GIDS[1:2]),)),)}},
    ),
    Case(
        id="gid-index",
        red={"gpu03": "warn"},
        text="has index 5, while gpu[01-02] has 3",
        fix="remove NCCL_IB_GID_INDEX",
        survey={
            "gpu03": {
                "rdma": (
                    replace(HCA, ports=(replace(PORT, gids=(GIDS[0], replace(GIDS[2], index=5))),)),
                )
            }
        },
    ),
    Case(
        id="gpudirect",
        red={"gpu02": "warn"},
        text="`nvidia_peermem` is not loaded; the kernel may use DMA-BUF",
        fix="`sudo modprobe nvidia_peermem` on gpu02",
        survey={"gpu02": {"modules": ("nvidia",)}},
    ),
    Case(
        id="gpudirect",
        red={"gpu02": "fail"},
        text="`nvidia_peermem` is not loaded",
        fix="modprobe nvidia_peermem",
        survey={"gpu02": {"modules": ("nvidia",), "kernel": "5.4.0-200-generic"}},
        evidence={"required": "gdrdma"},
    ),
)

UNKNOWN = (
    (
        Case(id="gid-index", red={}, text="", fix="", extra="network: {fabric: infiniband}"),
        "GID indexes are for RoCE",
    ),
    (
        Case(id="gpudirect", red={}, text="", fix="", facts={"*": {"gpus": (GB10, GB10)}}),
        "GB10 has no GPUDirect RDMA",
    ),
    (Case(id="gpudirect", red={}, text="", fix="", survey={"*": {"modules": ()}}), "is unknown"),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_a_lost_port_is_reported_with_its_effect_on_the_others() -> None:
    """It reduces all nodes to TCP, so the others are named, too."""
    down = replace(HCA, ports=(replace(PORT, state="DOWN", physical="Polling"),))
    judged = findings(
        Case(
            id="rdma-unused", red={}, text="", fix="", extra="", survey={"gpu02": {"rdma": (down,)}}
        )
    )

    assert [(finding.status, finding.text) for finding in judged[:2]] == [
        ("warn", "has active RDMA ports, unused because gpu02 has none: mlx5_0:1"),
        ("warn", "no active RDMA port, while gpu[01,03] has some: all nodes use TCP"),
    ]
    assert judged[0].fix == "repair gpu02, then set `network: {fabric: roce}` in the inventory"
    assert judged[1].evidence == "mlx5_0:1 is DOWN (Polling)"


@pytest.mark.parametrize("extra", ["accelerator: cpu", ""])
def test_unusable_devices_are_not_reported_as_unused(extra: str) -> None:
    """CPUs use TCP, and Soft RoCE uses sockets."""
    devices = (HCA,) if extra else (replace(HCA, name="rxe0"), replace(HCA, name="siw0"))
    judged = findings(
        Case(
            id="rdma-unused", red={}, text="", fix="", extra=extra, survey={"*": {"rdma": devices}}
        )
    )

    assert {finding.status for finding in judged} == {"pass"}


@pytest.mark.parametrize(
    ("value", "status"),
    [("mlx5", "pass"), ("=mlx5", "fail"), ("=mlx5_0", "pass"), ("^mlx4", "skip")],
)
def test_nccl_takes_prefixes_of_device_names_by_default(value: str, status: str) -> None:
    """Exclusions need not exist."""
    case = Case(
        id="hca-names",
        red={},
        text="",
        fix="",
        extra=f"network: {{fabric: roce}}\nenv: {{NCCL_IB_HCA: {value}}}",
    )

    assert {finding.status for finding in findings(case)} == {status}


def test_an_unconfigured_port_may_be_down() -> None:
    """NCCL skips it; the finding mentions it."""
    second = replace(HCA, name="mlx5_1", ports=(replace(PORT, state="DOWN"),))
    case = Case(
        id="rdma-link",
        red={},
        text="",
        fix="",
        extra="network: {fabric: roce}",
        survey={"gpu01": {"rdma": (HCA, second)}},
    )

    assert {(finding.status, finding.text) for finding in findings(case)} == {
        ("pass", "1 × 400 Gbit/s Ethernet; mlx5_1:1 is DOWN"),
        ("pass", "1 × 400 Gbit/s Ethernet"),
    }


def test_an_unreachable_node_may_have_no_rdma() -> None:
    """No claim about all nodes before all are surveyed."""
    case = Case(id="rdma-unused", red={}, text="", fix="", extra="")
    evidence = case.build_evidence()
    two = {name: evidence.facts[name] for name in ("gpu01", "gpu02")}

    assert [finding.status for finding in findings(replace(case, evidence={"facts": two}))] == [
        "skip",
        "skip",
        "skip",
    ]


def test_the_index_of_the_ipv4_gid_is_reported() -> None:
    """Not the first RoCE v2 GID, which is link-local."""
    assert {
        finding.text for finding in findings(Case(id="gid-index", red={}, text="", fix=""))
    } == {"GID index 3, RoCE v2"}


def test_the_gid_table_is_the_evidence() -> None:
    """To choose a right index."""
    case = next(case for case in CASES if "IB/RoCE v1" in case.text)
    finding = findings(case)[1]

    assert (
        finding.evidence.splitlines()[1]
        == "2: 0000:0000:0000:0000:0000:ffff:0a01:0001 IB/RoCE v1 ens1"
    )


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)
