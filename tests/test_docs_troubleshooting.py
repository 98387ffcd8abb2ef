"""The page of known failures against the table of symptoms, and the failures that users report."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.failures.table import load_failures
from launcher.hosts.checks.catalogue import CATALOGUE

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "failures.md"
IDS = list(load_failures())

# Failures that users of multi-node vLLM report, with the entries and checks that detect them.
REPORTED: dict[int, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    1: ("`ray: command not found`", ("ray-missing",), ("ray-version",)),
    2: ("world size larger than this node's GPUs", ("world-size",), ()),
    3: (
        "waiting for a placement group",
        ("placement-group-waits", "placement-group-refused"),
        ("accelerator",),
    ),
    4: ("no node type with `node:IP`", ("node-resource-missing",), ("address",)),
    5: ("nodes without an address of their own", ("host-ip-not-unique",), ("address-unique",)),
    6: ("Gloo on the wrong interface", ("gloo-interface",), ("hostname", "interface")),
    7: (
        "NCCL without an interface or a route",
        ("nccl-interface", "nccl-unreachable"),
        ("interface", "high-port"),
    ),
    8: (
        "TCP although RDMA is there",
        ("rdma-unseen", "rdma-devices-missing"),
        ("rdma-devices", "rdma-container"),
    ),
    9: ("memory cannot be locked", ("memlock", "memlock-refused"), ("memlock",)),
    10: ("`unhandled system error`", ("nccl-system-error",), ("ipc-lock", "shm")),
    11: ("no shared memory segment for NCCL", ("shm-too-small",), ("shm",)),
    12: ("Ray's object store larger than /dev/shm", ("object-store", "shm-too-small"), ("shm",)),
    13: ("Ray or Python differ", ("ray-version",), ("image", "ray-version", "python-version")),
    14: ("`InvalidAuthToken`", ("ray-token",), ()),
    15: ("a worker joins and vanishes", ("node-lost",), ("ports-reachable",)),
    16: ("GCS cannot be reached", ("gcs-unreachable",), ("ports-reachable",)),
    17: ("`RayChannelTimeoutError`", ("compiled-graph-timeout",), ()),
    18: ("no broadcast block, then a timeout", ("rank-silent",), ()),
    19: ("`Address already in use`", ("port-taken",), ("ports",)),
    20: ("GPU memory is held", ("gpu-memory-held",), ("gpu-memory",)),
    21: ("Error 803", ("driver-too-old",), ("driver",)),
    22: ("no GPUs in containers", ("gpu-runtime", "nvml-lost"), ("gpu-runtime", "cgroup-driver")),
    23: (
        "downloads, locks, 401",
        ("hf-refused", "hf-lock", "model-not-cached"),
        ("model", "hf-token"),
    ),
    24: (
        "no config.json; not allowed to write",
        ("model-not-found", "cache-permission"),
        ("model",),
    ),
    25: ("the others go on when a node has died", ("container-ended", "server-died"), ()),
    26: ("offline data parallel on a dense model", ("dense-data-parallel",), ()),
    27: ("out of host memory", ("host-memory", "kernel-oom", "engine-killed"), ()),
    28: ("docker.sock: permission denied", ("docker-permission",), ("docker",)),
    29: ("`undefined symbol: mlx5dv_…`", ("rdma-libraries",), ("libibverbs",)),
    30: ("a driver without a raylet; `ray://`", ("no-local-raylet",), ()),
}


def test_the_page_has_every_entry_in_order() -> None:
    """And no others."""
    headings = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert headings == IDS


def test_all_reported_failures_are_covered() -> None:
    """By an entry, by a check, or by both."""
    checks = {check.id for check in CATALOGUE}

    assert list(REPORTED) == list(range(1, 31))
    for failure, entries, check_ids in REPORTED.values():
        assert entries or check_ids, failure
        assert set(entries) <= set(IDS), failure
        assert set(check_ids) <= checks, failure
