"""Level of NCCL's links in a log, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.check import Finding
from launcher.network import levels, nccl_log
from launcher.network.nccl_log import Reading

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nccl"


def read(name: str) -> Reading:
    """Read a fixture."""
    return nccl_log.parse_log([(FIXTURES / f"{name}.log").read_bytes()])


def log(*via: str, extra: str = "") -> Reading:
    """Return a log with one link per path, from gpu01 to gpu02."""
    line = "gpu01:1:2 [0] NCCL INFO Channel 0{0}/0 : 0[0] -> 1[0] [send] via {1}\n"
    return nccl_log.parse_log(
        [("".join(line.format(at, path) for at, path in enumerate(via)) + extra).encode()]
    )


@pytest.mark.parametrize(
    ("via", "network", "gpudirect", "count", "mnnvl"),
    [
        ((), None, None, 0, False),
        (("P2P/CUMEM",), None, None, 0, False),
        (("NET/IB/0/GDRDMA", "NET/IB/1/GDRDMA"), "IB", True, 2, False),
        (("NET/IB/0/GDRDMA", "NET/IB/1"), "IB", False, 2, False),
        (("NET/UCX/0/GDRDMA", "NET/AWS Libfabric/1"), "AWS Libfabric", False, 2, False),
        (("NET/AWS Libfabric/1", "NET/Socket/0", "NET/IB/0/GDRDMA"), "Socket", False, 3, False),
        (("P2P/MNNVL",), "MNNVL", None, 0, True),
        (("P2P/MNNVL", "NET/IB/0/GDRDMA"), "IB", True, 1, True),
        (("P2P/MNNVL", "NET/Socket/0"), "Socket", False, 1, True),
    ],
)
def test_the_worst_decides(
    via: tuple[str, ...], network: str | None, gpudirect: bool | None, count: int, mnnvl: bool
) -> None:
    """TCP is worse than RDMA, that than GPUDirect, and that than NVLink between nodes; GPUDirect is
    all or nothing.
    """
    payload = levels.as_json(log(*via))

    assert (
        payload["network"],
        payload["gpudirect"],
        payload["network_links"],
        payload["mnnvl"],
    ) == (
        network,
        gpudirect,
        count,
        mnnvl,
    )


def test_json_of_a_link() -> None:
    """Ends, channel, direction, network, device, GPUDirect and host, as plain data."""
    payload = levels.as_json(read("2.18-efa-torchrun"))

    assert payload["links"][0] == {
        "source": 14,
        "target": 2,
        "channel": "05/1",
        "direction": "receive",
        "network": "AWS Libfabric",
        "device": 1,
        "gpudirect": True,
        "host": "ip-10-4-0-12",
        "inside": False,
    }
    assert json.loads(json.dumps(payload)) == payload


TCP, RDMA, DIRECT, NVLINK = "NET/Socket/0", "NET/IB/0", "NET/IB/0/GDRDMA", "P2P/MNNVL"


@pytest.mark.parametrize(
    ("via", "verdicts"),
    [
        (TCP, {"any": "pass", "auto": "fail", "rdma": "fail", "gdrdma": "fail"}),
        (RDMA, {"any": "pass", "auto": "warn", "rdma": "pass", "gdrdma": "fail"}),
        (DIRECT, {"any": "pass", "auto": "pass", "rdma": "pass", "gdrdma": "pass"}),
        (NVLINK, {"any": "pass", "auto": "pass", "rdma": "pass", "gdrdma": "pass"}),
        ("P2P/CUMEM", {"any": "fail", "auto": "fail", "rdma": "fail", "gdrdma": "fail"}),
    ],
)
def test_levels(via: str, verdicts: dict[str, str]) -> None:
    """Each level against each network."""
    findings = {level: levels.judge(log(via), level)[0].status for level in verdicts}  # type: ignore[arg-type]

    assert findings == verdicts


def test_gb10_is_not_expected_to_use_gpudirect() -> None:
    """On GB10, RDMA is as good as it gets; TCP is not."""
    statuses = [levels.judge(log(via), "auto", "NVIDIA GB10")[0].status for via in (RDMA, TCP)]

    assert statuses == ["pass", "fail"]


@pytest.mark.parametrize("name", ["using-only", "2.14-pxn-roce"])
@pytest.mark.parametrize("level", ["any", "auto", "gdrdma"])
def test_using_network_proves_nothing(name: str, level: str) -> None:
    """An announcement does not pass at any level; links do."""
    findings = levels.judge(read(name), level)  # type: ignore[arg-type]

    assert findings[0].status == ("fail" if name == "using-only" else "pass")
    assert ("does not show" in findings[0].text and "NCCL_DEBUG=INFO" in findings[0].fix) == (
        name == "using-only"
    )


@pytest.mark.parametrize("raw", [b"", b"\x00\xff" * 999, b"hello\n"])
def test_no_log_of_nccl_does_not_pass(raw: bytes) -> None:
    """Empty, binary and foreign files prove nothing."""
    (finding,) = levels.judge(nccl_log.parse_log([raw]), "any")

    assert finding.status == "fail"


def test_many_communicators_of_one_job() -> None:
    """With TP inside nodes and PP between them, the links inside nodes are counted only."""
    assert [finding.status for finding in levels.judge(read("vllm-tp2-pp2"), "gdrdma")] == ["pass"]


def test_a_log_that_is_cut_off_warns() -> None:
    """A truncated end is reported."""
    findings = levels.judge(
        log(DIRECT, extra="gpu01:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/I"),
        "gdrdma",
    )

    assert [item.status for item in findings] == ["pass", "warn"]


def test_the_node_with_the_cause_is_named() -> None:
    """The host, the ranks, the cause, its evidence and the fix are in the finding."""
    extra = (
        "gpu02:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Socket/0\n"
        + "gpu02:1:2 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
    )
    (finding,) = levels.judge(log(TCP, extra=extra), "rdma")

    assert finding == Finding(
        node="gpu02",
        status="fail",
        text=(
            "NET/Socket (TCP) on all 2 links between nodes, but RDMA is required (ranks 0→1): "
            "RDMA is disabled by `NCCL_IB_DISABLE=1` on gpu02"
        ),
        evidence="NCCL_IB_DISABLE set by environment to 1.",
        fix=(
            "remove `NCCL_IB_DISABLE` from `env:` in the inventory and from the image, then run"
            " `vlaunch up`"
        ),
    )


def test_nodes_without_rdma() -> None:
    """With `auto`, TCP fails, with a hint to allow it."""
    (finding,) = levels.judge(read("2.21-ib-none-tcp"), "auto")

    assert (finding.node, finding.fix.endswith("pass `--require any`")) == ("gpu[01-02]", True)


def test_only_what_explains_the_lack_of_gpudirect_is_its_cause() -> None:
    """A problem that would have prevented RDMA does not explain missing GPUDirect."""
    finding, _ = levels.judge(read("2.27-ray-gb10"), "auto")

    assert "GPUDirect RDMA is off for HCA 0 'rocep1s0f1' on spark2" in finding.text
    assert "nvidia_peermem" in finding.fix


def test_providers_are_per_host() -> None:
    """Another host's proves nothing about this link."""
    extra = (
        "gpu02:1:2 [0] NCCL INFO NET/OFI Selected Provider is tcp\ngpu01:1:2 [0] NCCL INFO NET/OFI"
        " Selected Provider is efa\n"
    )

    assert (
        levels.judge(log("NET/AWS Libfabric/0/GDRDMA", extra=extra), "gdrdma")[0].status == "pass"
    )


BACK = "gpu01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Socket/0\n"


def test_links_inside_a_host_are_no_verdict() -> None:
    """They are listed and counted, and prove nothing about the network between nodes."""
    near = log(TCP, extra=BACK)
    payload = levels.as_json(near)
    (finding,) = levels.judge(near, "any")

    assert (payload["network"], payload["gpudirect"], payload["network_links"]) == (None, None, 2)
    assert [link["inside"] for link in payload["links"]] == [True, True]
    assert (finding.status, "only links within nodes: 2 NET/Socket" in finding.text) == (
        "fail",
        True,
    )


def test_links_between_nodes_are_judged_without_those_inside() -> None:
    """TCP within a host does not matter."""
    far = "gpu0{0}:1:2 [0] NCCL INFO Channel 01/0 : 1[0] -> 2[0] [{1}] via NET/IB/0/GDRDMA\n"
    reading = log(TCP, extra=BACK + far.format(1, "send") + far.format(2, "receive"))

    assert [finding.text for finding in levels.judge(reading, "gdrdma")] == [
        "NET/IB/GDRDMA on all 2 links between nodes"
    ]
    assert levels.as_json(reading)["network"] == "IB"


def test_a_log_of_some_ranks_only_warns() -> None:
    """A communicator of two with the log of one host."""
    extra = (
        "gpu01:1:2 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 commId"
        " 0x11 - Init START\n"
    )
    findings = levels.judge(log(DIRECT, extra=extra), "gdrdma")

    assert [item.status for item in findings] == ["pass", "warn"]
    assert "links of 1 of 2 ranks" in findings[1].text


def test_warnings_after_good_links() -> None:
    """All of them are shown, after a good and after a failed verdict."""
    line = (
        "gpu02:1:2 [0] transport/net_ib.cc:2453 NCCL WARN NET/IB: Got completion from peer"
        " 10.0.0.{0} with status=12\n"
    )
    extra = "".join(line.format(at) for at in range(3))
    findings = levels.judge(log(DIRECT, extra=extra), "gdrdma")

    assert [(item.status, item.node) for item in findings] == [("pass", ""), ("warn", "gpu02")]
    assert (
        findings[1].evidence.count("status=12"),
        "3 different warnings" in findings[1].text,
    ) == (
        3,
        True,
    )
    failed = levels.judge(log(RDMA, extra=extra), "gdrdma")
    assert [finding.status for finding in failed] == ["fail", "warn"]
    assert failed[1].evidence == findings[1].evidence


def test_too_many_links_are_no_truncation() -> None:
    """They have different messages."""
    findings = levels.judge(replace(log(DIRECT), overflow=True), "gdrdma")

    assert (len(findings), "more than 100000 different links" in findings[1].text) == (2, True)


def test_a_log_without_its_first_link() -> None:
    """It is from NCCL, and the finding says so."""
    extra = "gpu01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/I"

    assert "truncated before the first link" in levels.judge(log(extra=extra), "any")[0].text


def test_a_worthless_file_among_good_ones_is_named() -> None:
    """One that proves nothing fails with its name; one with links inside its node alone warns."""
    files = {
        "good": log(DIRECT),
        "empty": log(),
        "near": log("P2P/CUMEM"),
        "using": read("using-only"),
    }
    findings = levels.judge_files(files, "any")

    assert [(item.status, item.text.partition(":")[0]) for item in findings[-3:]] == [
        ("fail", "empty"),
        ("warn", "near"),
        ("fail", "using"),
    ]
    assert [finding.status for finding in levels.judge_files({"good": log(DIRECT)}, "any")] == [
        "pass"
    ]
