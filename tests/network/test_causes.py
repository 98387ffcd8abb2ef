"""Causes of a slow network from NCCL's log, its environment and its container."""

from __future__ import annotations

import pytest

from launcher.core.domain import Level
from launcher.network import causes


@pytest.mark.parametrize(
    ("line", "level", "cause", "fix"),
    [
        (
            "NCCL_IB_DISABLE set by environment to 1.",
            "any",
            "disabled by `NCCL_IB_DISABLE=1`",
            "NCCL_IB_DISABLE",
        ),
        (
            "NCCL_NET set by environment to socket",
            "any",
            "forced to use TCP by `NCCL_NET=socket`",
            "NCCL_NET",
        ),
        (
            "NCCL_NET_GDR_LEVEL set by environment to LOC",
            "rdma",
            "disabled by `NCCL_NET_GDR_LEVEL`",
            "remove `NCCL_NET_GDR_LEVEL`",
        ),
        (
            "NCCL_DMABUF_ENABLE set by environment to 0.",
            "rdma",
            "disabled by `NCCL_DMABUF_ENABLE`",
            "remove `NCCL_DMABUF_ENABLE` from",
        ),
        ("NCCL_NET set by environment to Socket", "any", "forced to use TCP", "NCCL_NET"),
        ("Failed to open libibverbs.so[.1]", "any", "no libibverbs", "libibverbs1"),
        (
            "NET/Plugin: Could not find: libnccl-net-aws.so libnccl-net.so. Using",
            "any",
            "libnccl-net-aws.so",
            "NCCL_NET_PLUGIN",
        ),
        (
            "NET/Plugin: libnccl-net-ofi.so: cannot open shared object file",
            "any",
            "libnccl-net-ofi.so",
            "NCCL_NET_PLUGIN",
        ),
        (
            "NET/Plugin: Failed to initialize NET plugin IBext",
            "any",
            "plugin failed to load",
            "NCCL_NET_PLUGIN",
        ),
        (
            "NET/IB : Unable to open device mlx5_0",
            "any",
            "not allowed to open the RDMA device mlx5_0",
            "fabric: infiniband",
        ),
        ("NET/IB : No device found.", "any", "no RDMA device", "fabric: infiniband"),
        (
            "Call to ibv_reg_mr failed with error Cannot allocate memory",
            None,
            "locked-memory limit",
            "LimitMEMLOCK",
        ),
        ("Call to ibv_modify_qp failed with 22 Invalid argument", None, "GID", "NCCL_IB_GID_INDEX"),
        ("Bootstrap : no socket interface found", None, "interface", "ip -br link"),
        (
            "connect to 10.0.0.2<5> returned No route to host, retrying",
            None,
            "No route to host",
            "ports-reachable",
        ),
        (
            "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
            "rdma",
            "off for HCA 0 'mlx5_0'",
            "modprobe nvidia_peermem",
        ),
    ],
)
def test_causes(line: str, level: Level | None, cause: str, fix: str) -> None:
    """A line has its cause, is its evidence, and its fix can be typed."""
    match = causes.find_cause(warnings=(line,), level=level)

    assert match is not None
    assert (cause in match[0], match[1], fix in match[2]) == (True, line, True)


@pytest.mark.parametrize(
    "line",
    [
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
        "NET/Plugin: Failed to find ncclNetPlugin_v10 symbol.",
        "NCCL_IB_DISABLE set by environment to 0.",
        "NCCL_IB_HCA set to mlx5_0",
        "NET/Plugin: Failed to initialize NET plugin IB",
        "NET/Plugin: Failed to initialize NET plugin Socket",
        "RuntimeError: CUDA out of memory: Cannot allocate memory",
    ],
)
def test_harmless_lines(line: str) -> None:
    """Lines of every healthy log have no cause."""
    assert causes.find_cause(warnings=(line,), level="any") is None


def test_environment_counts_like_its_line() -> None:
    """A variable of the container is evidence even if the log does not have its line."""
    match = causes.find_cause(warnings=(), level="any", env={"NCCL_IB_DISABLE": "1"})

    assert match is not None
    assert match[1] == "NCCL_IB_DISABLE set by environment to 1"


def test_container_without_infiniband() -> None:
    """A missing /dev/infiniband is more precise than the line that NCCL found no device."""
    match = causes.find_cause(
        warnings=("NET/IB : No device found.",),
        level="any",
        env={"NCCL_IB_HCA": "mlx5_0"},
        infiniband=(),
    )

    assert match is not None
    assert match[0] == "the container has no /dev/infiniband"


def test_name_of_another_nodes_device() -> None:
    """With devices in the container and a configured name, a missing device means a wrong name on
    this node.
    """
    match = causes.find_cause(
        warnings=("NET/IB : No device found.",),
        level="any",
        env={"NCCL_IB_HCA": "mlx5_9"},
        infiniband=("uverbs0",),
    )

    assert match is not None
    assert match[0] == "no RDMA device on this node is named `mlx5_9`"
    assert "hca:" in match[2]


@pytest.mark.parametrize(("memlock", "expected"), [(65536, True), (None, False), (1 << 40, False)])
def test_memlock(memlock: int | None, expected: bool) -> None:
    """A low limit is a cause if no line names another; a missing or high one is not."""
    match = causes.find_cause(warnings=(), level=None, infiniband=("uverbs0",), memlock=memlock)

    assert (match is not None and "lock" in match[0]) == expected


def test_causes_depend_on_the_transport() -> None:
    """Causes of TCP do not apply to RDMA, nor causes of missing GPUDirect to TCP."""
    off = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"

    assert causes.find_cause(warnings=("NET/IB : No device found.",), level="rdma") is None
    assert causes.find_cause(warnings=(off,), level="any") is None


@pytest.mark.parametrize(
    "line", ["NCCL_DMABUF_ENABLE set by environment to 1.", "DMA-BUF is available on GPU device 0"]
)
def test_requests_of_dmabuf_are_no_cause(line: str) -> None:
    """A request for DMA-BUF does not prove that it is missing."""
    assert causes.find_cause(warnings=(line,), level="rdma") is None


@pytest.mark.parametrize("plugin", ["IB", "IBext_v8"])
def test_a_plugin_without_a_device_is_not_to_blame(plugin: str) -> None:
    """The missing device is."""
    lines = (f"NET/Plugin: Failed to initialize NET plugin {plugin}", "NET/IB : No device found.")
    match = causes.find_cause(warnings=lines, level="any")

    assert match is not None
    assert match[0].startswith("NCCL found no RDMA device in the container")


def test_a_missing_plugin_explains_missing_devices() -> None:
    """NCCL's own RDMA cannot use the plugin's devices."""
    lines = (
        "NET/IB : No device found.",
        "NET/Plugin: libnccl-net-ofi.so: cannot open shared object file",
    )
    match = causes.find_cause(warnings=lines, level="any")

    assert match is not None
    assert "libnccl-net-ofi.so failed to load" in match[0]


@pytest.mark.parametrize(
    ("hca", "expected"), [("^mlx5_bond_0", "NCCL found no"), ("=mlx5_9", "is named `mlx5_9`")]
)
def test_marks_before_the_names_of_devices(hca: str, expected: str) -> None:
    """An excluded device may be absent; `=` is no part of a name."""
    match = causes.find_cause(
        warnings=("NET/IB : No device found.",), level="any", env={"NCCL_IB_HCA": hca}
    )

    assert match is not None
    assert expected in match[0]
