"""Short descriptions of hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.host_descriptions import describe_hosts, health_warnings
from launcher.hosts.discovery.local_assets import LocalAssets
from launcher.hosts.discovery.shape import InitOptions
from tests.hosts.discovery.hosts import h100_pair, unequal


def test_a_lost_gpu_is_a_warning() -> None:
    """With its PCI address: no container starts beside it, whichever GPUs it uses."""
    message = "Unable to determine the device handle for GPU7: 0000:DF:00.0: Unknown Error"
    first, second = h100_pair()
    broken = replace(second, facts=replace(second.facts, lost_gpus=(message,)))

    discovery = discover([first, broken], InitOptions())
    assert [warning for warning in discovery.warnings if "lost" in warning] == [
        f"gpu02: the driver has lost a GPU ({message}): reboot"
    ]


def test_differences_are_folded() -> None:
    """Common parts once, deviations on their own lines."""
    discovery = discover(unequal(), InitOptions())

    assert discovery.summary[0].startswith(
        "gpu[01-02]: 8 × NVIDIA H100 80GB HBM3, 80 GiB, driver 580.95.05"
    )
    assert discovery.summary[1] == "gpu03: differs: 7 × NVIDIA H100 80GB HBM3, 80 GiB"
    assert discovery.summary[2] == "gpu04: differs: no Docker"
    assert any(
        "gpu04: Docker does not answer: sh: docker: not found" in warning
        for warning in discovery.warnings
    )
    assert any(
        "different numbers of GPUs (gpu01 8, gpu02 8, gpu03 7, gpu04 8)" in warning
        for warning in discovery.warnings
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"podman": True}, "`docker` is Podman, not Docker"),
        ({"timed_out_parts": frozenset({"docker"})}, "`docker version` did not answer within"),
        ({"part_errors": {"docker": "first line\npermission denied"}}, "answer: permission denied"),
        ({}, "Docker does not answer: no message"),
    ],
)
def test_causes_of_an_unresponsive_docker(facts: dict[str, Any], text: str) -> None:
    """With their own messages and fixes."""
    first, second = h100_pair()
    silent = replace(second, facts=replace(second.facts, docker_version=None, **facts))
    (warning,) = health_warnings([first, silent])

    assert warning.startswith("gpu02: ")
    assert text in warning


def test_amd_gpus_are_counted_without_nvidia_s_driver() -> None:
    """The kernel's driver has no version of its own."""
    hosts = [replace(host, assets=LocalAssets(amd_gpus=8)) for host in h100_pair()]
    (line,) = describe_hosts(hosts, "amd")

    assert line.startswith("gpu[01-02]: 8 × AMD GPU, 192 CPUs in 2 NUMA nodes, 2.0 TiB memory, ")


def test_a_cpu_cluster_s_line_has_no_gpus() -> None:
    """Missing parts are omitted."""
    (line,) = describe_hosts(h100_pair()[:1], "cpu")

    assert line.startswith("gpu01: 192 CPUs in 2 NUMA nodes, 2.0 TiB memory, ")
