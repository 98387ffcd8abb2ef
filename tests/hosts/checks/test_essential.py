"""Checks that `up` repeats before any change."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.hosts.check import Evidence
from launcher.hosts.checks.catalogue import ESSENTIAL
from launcher.hosts.checks.gpu import ACCELERATOR
from launcher.tools.docker import GpuAllocation
from launcher.tools.host import Address
from tests.hosts.checks.conftest import Good, Load, first, judge


@pytest.mark.parametrize("check", ESSENTIAL, ids=lambda check: check.id)
@pytest.mark.parametrize(
    "extra", ["", "accelerator: cpu", "accelerator: amd", "network: {fabric: roce}"]
)
def test_a_good_node_passes_every_check(check: Any, extra: str, load: Load, good: Good) -> None:
    """For all accelerators and fabrics."""
    facts = {"gpu01": good(), "gpu02": good("10.0.0.12")}
    findings = check.judge(Evidence(inventory=load(extra), facts=facts))

    assert [finding.status for finding in findings] == ["pass", "pass"]


def test_checks_have_unique_ids_and_full_descriptions() -> None:
    """The ID is an anchor of the documentation; `what` is a fact that holds if the check passes."""
    ids = [check.id for check in ESSENTIAL]

    assert len(set(ids)) == len(ids)
    assert all(check.what and check.why and not check.what.endswith(".") for check in ESSENTIAL)


@pytest.mark.parametrize(
    ("message", "text", "fix"),
    [
        (
            "permission denied while trying to connect",
            "`ops` may not use Docker",
            "docker: [sudo, -n, docker]",
        ),
        (
            "sudo: a password is required",
            "`ops` needs a password to run `docker`",
            "/etc/sudoers.d/vlaunch",
        ),
        (
            "sudo: a terminal is required to read the password",
            "`ops` needs a password to run `docker`",
            "NOPASSWD",
        ),
        (
            "sudo: sorry, you must have a tty to run sudo",
            "sudo runs `docker` only from a terminal (`requiretty` in sudoers)",
            "Defaults:ops !requiretty",
        ),
        (
            "sh: 1: docker: not found",
            "`docker` is not installed",
            "https://docs.docker.com/engine/install/",
        ),
        ("timeout: 'docker': No such file or directory", "`docker` is not installed", "install"),
        ("Cannot connect to the Docker daemon", "Docker does not answer", "systemctl start docker"),
        (
            "dial unix /run/docker.sock: no such file or directory",
            "Docker does not answer",
            "systemctl start docker",
        ),
        ("", "Docker does not answer", "systemctl start docker"),
    ],
)
def test_a_failing_docker_has_a_cause(
    message: str, text: str, fix: str, load: Load, good: Good
) -> None:
    """Causes have their own fixes, with Docker's message as evidence."""
    finding = first("docker", load, good(docker_version=None, part_errors={"docker": message}))

    assert (finding.status, finding.text, finding.evidence) == ("fail", text, message)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("docker", "message", "text", "fix"),
    [
        ("[docker]", "", "`docker version` did not answer within 15 s", "`ssh gpu01 time docker"),
        (
            "[sudo, -n, docker]",
            "",
            "`sudo -n docker version` did not answer within 15 s",
            "`ssh gpu01 time sudo -n docker version`",
        ),
        (
            "[sudo, -n, docker]",
            "sudo: unable to resolve host n1: Temporary failure in name resolution",
            "`sudo -n docker version` did not answer within 15 s: sudo cannot resolve the node's"
            " own name, `n1`",
            "`echo '10.0.0.11 n1' | sudo tee -a /etc/hosts` on gpu01",
        ),
    ],
)
def test_a_slow_docker_is_not_reported_as_down(
    docker: str, message: str, text: str, fix: str, load: Load, good: Good
) -> None:
    """The command, its deadline, and a fix."""
    facts = good(
        docker_version=None,
        hostname="n1",
        part_errors={"docker": message},
        timed_out_parts=frozenset({"docker"}),
    )
    finding = first("docker", load, facts, f"docker: {docker}")

    assert (finding.status, finding.text, finding.evidence) == ("fail", text, message)
    assert fix in finding.fix
    assert "systemctl start" not in finding.fix


@pytest.mark.parametrize("status", ["fail", "pass"])
def test_the_declared_nvidia_gpus_must_exist(status: str, load: Load, good: Good) -> None:
    """Fewer are a failure with their number; more are not."""
    finding = first("accelerator", load, good(), gpus="3" if status == "fail" else "1")

    assert finding.status == status
    if status == "fail":
        assert finding.text == "2 GPUs visible, 3 declared"
        assert "set `gpus: 2` for gpu01" in finding.fix


def test_gpu_ids_of_a_node_must_exist(load: Load, good: Good) -> None:
    """By index or UUID."""
    assert first("accelerator", load, good(), gpus="[1]").status == "pass"
    finding = first("accelerator", load, good(), gpus="[1, 5]")

    assert (finding.status, finding.text) == ("fail", "2 GPUs visible, 1, 5 declared")
    assert "set other GPUs under `gpus:` for gpu01" in finding.fix


@pytest.mark.parametrize(
    ("value", "text", "fix"),
    [
        (
            GpuAllocation(container="vlaunch-a-n", cluster="a", count=1),
            "GPU 0 is also assigned to cluster a",
            "[1]",
        ),
        (
            GpuAllocation(container="vlaunch-a-n", cluster="a", count=-1),
            "GPU 0 is also assigned to cluster a",
            "stop the other cluster, or use fewer GPUs: 0 of gpu01 are free",
        ),
        (GpuAllocation(container="vlaunch-a-n", cluster="a", ids=("GPU-1",)), "", ""),
        (GpuAllocation(container="vlaunch-c-n", cluster="c", count=2), "", ""),
    ],
)
def test_gpus_belong_to_a_single_cluster(
    value: GpuAllocation, text: str, fix: str, load: Load, good: Good
) -> None:
    """Docker assigns a GPU to any number of containers; our own do not count."""
    finding = first("gpu-shared", load, good(gpu_allocations=(value,)), gpus="[0]")

    assert (finding.status, finding.text) == ("fail" if text else "pass", text)
    assert fix in finding.fix


def test_a_lost_gpu_is_a_failure(load: Load, good: Good) -> None:
    """No container with GPUs starts on such a host, whichever GPUs it uses."""
    message = "Unable to determine the device handle for GPU7: 0000:DF:00.0: Unknown Error"
    finding = first("accelerator", load, good(lost_gpus=(message,)), gpus="2")

    assert (finding.status, finding.text, finding.evidence) == (
        "fail",
        "the driver has lost a GPU",
        message,
    )
    assert "reboot gpu01" in finding.fix


def test_a_missing_driver_is_reported_with_its_message(load: Load, good: Good) -> None:
    """For a missing `nvidia-smi`."""
    finding = first(
        "accelerator", load, good(gpus=None, part_errors={"gpus": "nvidia-smi: not found"})
    )

    assert (finding.status, finding.text, finding.evidence) == (
        "fail",
        "no NVIDIA GPU visible",
        "nvidia-smi: not found",
    )
    assert "install the driver" in finding.fix


@pytest.mark.parametrize(
    ("present", "status"), [(None, "fail"), (1, "fail"), (2, "pass"), (8, "pass")]
)
def test_the_declared_amd_gpus_must_exist(
    present: int | None, status: str, load: Load, good: Good
) -> None:
    """Counted from the kernel's topology."""
    renders = None if present is None else tuple(range(128, 128 + present))
    finding = first("accelerator", load, good(amd_renders=renders), "accelerator: amd")

    assert finding.status == status
    if status == "fail":
        assert finding.text == f"{present or 0} AMD GPUs visible, 2 declared"
        assert "modprobe amdgpu" in finding.fix


@pytest.mark.parametrize("accelerator", ["nvidia", "amd"])
@pytest.mark.parametrize(("gpus", "status"), [("1", "fail"), ("2", "pass")])
def test_a_privileged_container_needs_all_gpus_of_its_node(
    accelerator: str, gpus: str, status: str, load: Load, good: Good
) -> None:
    """It has access to all of them, and ranks would use the first ones."""
    extra = f"accelerator: {accelerator}\nprivileged: true"
    finding = first("accelerator", load, good(amd_renders=(128, 129)), extra, gpus=gpus)

    assert finding.status == status
    if status == "fail":
        assert finding.text == "a container with `privileged: true` sees all 2 GPUs, 1 declared"
        assert finding.fix.startswith("set `gpus: 2` for gpu01, or replace `privileged: true`")


def test_cpu_slots_need_no_device(load: Load) -> None:
    """They are only a number for Ray."""
    assert not ACCELERATOR.applies(load("accelerator: cpu"))


@pytest.mark.parametrize(
    ("runtimes", "toolkit", "status"),
    [
        (("runc",), False, "fail"),
        ((), False, "fail"),
        (("nvidia", "runc"), False, "pass"),
        (("runc",), True, "pass"),
    ],
)
def test_docker_needs_nvidias_runtime_or_hook(
    runtimes: tuple[str, ...], toolkit: bool, status: str, load: Load, good: Good
) -> None:
    """Either one can expose GPUs."""
    finding = first("gpu-runtime", load, good(runtimes=runtimes, toolkit=toolkit))

    assert finding.status == status
    if status == "fail":
        assert "nvidia-ctk runtime configure" in finding.fix
        assert finding.evidence == "runtimes: " + (", ".join(runtimes) or "none")


def test_the_runtime_is_skipped_without_docker(load: Load, good: Good) -> None:
    """The check `docker` reports it."""
    assert first("gpu-runtime", load, good(docker_version=None, runtimes=())).status == "pass"


def test_the_declared_address_must_be_on_an_interface(load: Load, good: Good) -> None:
    """The existing addresses are the evidence, without loopback."""
    finding = first("address", load, good("10.9.9.9"))

    assert (finding.status, finding.text, finding.evidence) == (
        "fail",
        "no interface has 10.0.0.11",
        "eth0 10.9.9.9",
    )
    assert "set `ip:` of gpu01" in finding.fix


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        ("eth7", "there is no interface `eth7` with an address"),
        ("eth1", "10.0.0.11 is on `eth0`, not on `eth1`"),
    ],
)
def test_the_declared_interface_must_carry_the_address(
    interface: str, text: str, load: Load, good: Good
) -> None:
    """The fix names the right one."""
    other = Address(interface="eth1", ip="192.168.7.7", prefix=24, up=True)
    facts = good(addresses=(*(good().addresses or ()), other))
    finding = judge(
        "address",
        load(f"network: {{interface: {interface}}}"),
        gpu01=facts,
        gpu02=good("10.0.0.12"),
    )[0]

    assert (finding.status, finding.text) == ("fail", text)
    assert "set `network: {interface: eth0}` for gpu01" in finding.fix


def test_a_link_that_is_down_fails(load: Load, good: Good) -> None:
    """Its address alone proves nothing."""
    down = Address(interface="eth0", ip="10.0.0.11", prefix=24, up=False)
    finding = first("address", load, good(addresses=(down,)))

    assert (finding.status, finding.text) == ("fail", "`eth0` is down")
    assert "ip link set eth0 up" in finding.fix


def test_the_address_of_a_routed_host_is_not_on_lo(load: Load, good: Good) -> None:
    """NCCL would bind to 127.0.0.1."""
    routed = Address(interface="lo", ip="10.0.0.11", prefix=32, up=True)
    facts = good(addresses=(routed,))
    finding = judge("address", load(), gpu01=facts, gpu02=good("10.0.0.12"))[0]

    assert (finding.status, finding.text) == (
        "fail",
        "10.0.0.11 is on `lo`, where NCCL and Gloo take 127.0.0.1",
    )
    assert "ip addr add 10.0.0.11 dev dummy0" in finding.fix


@pytest.mark.parametrize("fabric", ["infiniband", "roce"])
def test_an_rdma_fabric_needs_its_devices(fabric: str, load: Load, good: Good) -> None:
    """NCCL would silently use TCP."""
    finding = first(
        "rdma-devices",
        load,
        good(infiniband=(), part_errors={"infiniband": "ls: cannot access"}),
        f"network: {{fabric: {fabric}}}",
    )

    assert (finding.status, finding.text) == (
        "fail",
        f"no /dev/infiniband, though the inventory says {fabric}",
    )
    assert finding.evidence == "ls: cannot access"
    assert "modprobe" in finding.fix


def test_ethernet_needs_no_rdma_devices(load: Load, good: Good) -> None:
    """Only the configured fabric counts."""
    assert first("rdma-devices", load, good(infiniband=())).status == "pass"


@pytest.mark.parametrize(("id_", "missing"), [("address", "addresses"), ("ports", "listening")])
def test_unknown_values_are_skipped_with_the_reason(
    id_: str, missing: str, load: Load, good: Good
) -> None:
    """They never pass."""
    finding = first(id_, load, good(**{missing: None}))

    assert finding.status == "skip"
    assert finding.text


def test_every_failure_has_a_fix_and_no_full_stop(load: Load, good: Good) -> None:
    """A fix is an instruction."""
    bad = good(
        "10.9.9.9",
        docker_version=None,
        gpus=None,
        infiniband=(),
        disk_free=1,
        listening=frozenset({("::", 6379)}),
        part_errors={"docker": "x"},
    )
    inventory = load("network: {fabric: roce}")
    evidence = Evidence(inventory=inventory, facts={"gpu01": bad, "gpu02": bad})
    failures = [
        finding
        for check in ESSENTIAL
        for finding in check.judge(evidence)
        if finding.status == "fail"
    ]

    assert len({finding.text for finding in failures}) >= 6
    assert all(
        finding.fix and not finding.text.endswith(".") and not finding.fix.endswith(".")
        for finding in failures
    )


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({}, "pass", ""),
        ({"podman": True}, "fail", "`docker` is Podman, not Docker"),
        ({"security": ("seccomp", "rootless")}, "fail", "Docker runs rootless"),
        ({"docker_version": None}, "skip", "Docker did not answer"),
    ],
)
def test_rootless_docker_is_rejected(
    changed: dict[str, Any], status: str, text: str, load: Load, good: Good
) -> None:
    """Once."""
    facts = good(**changed)
    finding = first("docker-engine", load, facts)

    assert finding.status == status
    assert text in finding.text
    assert status != "fail" or "unix:///var/run/docker.sock" in finding.fix
    assert not changed.get("podman") or first("docker", load, facts).status == "skip"


@pytest.mark.parametrize(
    ("security", "labels", "status"),
    [
        (("selinux",), {"/data/hf": "default_t", "/root/.vlaunch": "container_file_t"}, "fail"),
        (("selinux",), {"/data/hf": "container_file_t"}, "pass"),
        (("selinux",), {"/data/hf": "nfs_t"}, "pass"),
        (("selinux",), None, "pass"),
        ((), {"/data/hf": "default_t"}, "pass"),
    ],
)
def test_selinux_labels_of_mounts(
    security: tuple[str, ...], labels: dict[str, str] | None, status: str, load: Load, good: Good
) -> None:
    """Only if it enforces, and Docker uses it; the fix labels just those folders."""
    finding = first("selinux", load, good(security=security, selinux=labels))

    assert finding.status == status
    if status == "fail":
        assert finding.text == "SELinux blocks containers from /data/hf"
        assert finding.evidence == "/data/hf: default_t"
        assert "`sudo chcon -Rt container_file_t /data/hf`" in finding.fix
