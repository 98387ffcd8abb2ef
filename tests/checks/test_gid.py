"""RoCE's GID table, and GPUDirect RDMA."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checks.spoiled import (
    GIDS,
    GPU,
    HCA,
    PORT,
    Case,
    findings,
    named,
    stays_unknown,
    turns_red,
)

CASES = (
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
        fix="leave NCCL_IB_GID_INDEX out",
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
        text="`nvidia_peermem` is not loaded; the kernel may do it by DMA-BUF",
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


GB10 = replace(GPU, name="NVIDIA GB10", memory_total=0)
UNKNOWN = (
    (
        Case(id="gid-index", red={}, text="", fix="", more="network: {fabric: infiniband}"),
        "GID indexes are for RoCE",
    ),
    (
        Case(id="gpudirect", red={}, text="", fix="", facts={"*": {"gpus": (GB10, GB10)}}),
        "GB10 has no GPUDirect RDMA",
    ),
    (Case(id="gpudirect", red={}, text="", fix="", survey={"*": {"modules": ()}}), "is not known"),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_the_index_of_the_gid_that_stands_for_an_address_is_told() -> None:
    """Not that of the first RoCE v2 GID, which is link-local."""
    assert {each.text for each in findings(Case(id="gid-index", red={}, text="", fix=""))} == {
        "GID index 3, RoCE v2"
    }


def test_the_gid_table_is_the_evidence() -> None:
    """So that a right index can be chosen."""
    found = findings(CASES[0])[1]

    assert (
        found.evidence.splitlines()[1]
        == "2: 0000:0000:0000:0000:0000:ffff:0a01:0001 IB/RoCE v1 ens1"
    )


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)
