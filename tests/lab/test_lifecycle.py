"""Life cycle of real lab hosts: start, damage, repair, removal.

Without the image, so it takes seconds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts, layout, network, processes, removal, startup, status
from launcher.lab.layout import Host, Lab

pytestmark = pytest.mark.lab
NAME = "vlaunch-lab-test"
DIRECTORY = Path("/var/lib") / NAME


def quiet(_: str) -> None:
    return


def start(lab: Lab) -> None:
    startup.start_lab(lab, cache=Path("/nonexistent"), with_image=False, say=quiet)


def ssh(lab: Lab, user: str, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = (
        *(
            "-F",
            "none",
            "-i",
            str(lab.identity),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=yes",
        ),
        *("-o", f"UserKnownHostsFile={lab.known_hosts}", "-o", "ConnectTimeout=5"),
    )
    return subprocess.run(
        ["ssh", *options, f"{user}@{lab.host(host).ip}", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def all_up(lab: Lab) -> bool:
    return all(state.up for state in status.observe(lab))


def reaches(lab: Lab, source: str, target: str, port: int = 22) -> bool:
    """Return whether a TCP connection from one host to another opens, to its SSH server or another
    port.
    """
    script = f"exec 3<>/dev/tcp/{lab.host(target).ip}/{port}"
    return host_faults.enter(lab.host(source), "timeout", "1", "bash", "-c", script).returncode == 0


def start_container(host: Host) -> None:
    """Start a container that sleeps, from an image with only `sleep`."""
    libraries = subprocess.run(
        ["ldd", "/usr/bin/sleep"], capture_output=True, text=True, check=True
    ).stdout
    files = ["/usr/bin/sleep", *re.findall(r"(/lib\S+)", libraries)]
    tar = subprocess.run(
        ["tar", "--create", "--dereference", *files], capture_output=True, check=True
    ).stdout
    subprocess.run(
        hosts.docker_argv(host, "import", "-", "sleep"), input=tar, capture_output=True, check=True
    )
    arguments = ("run", "--detach", "--network", "host", "sleep", "/usr/bin/sleep", "600")
    subprocess.run(hosts.docker_argv(host, *arguments), capture_output=True, check=True)


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = layout.make_lab(name=NAME, directory=DIRECTORY, subnet="10.79.77.0/24", nodes=2, gpus=1)
    removal.remove_lab(NAME, DIRECTORY, quiet)
    start(lab)
    yield lab
    removal.remove_lab(NAME, DIRECTORY, quiet)
    assert removal.leftovers(NAME, DIRECTORY) == []


def test_hosts_are_like_servers(lab: Lab) -> None:
    """Each has its own name, Docker and files; users with and without Docker permissions; no login
    without the key.
    """
    assert ssh(lab, "root", "node1", "hostname").stdout == "node1\n"
    ids = {
        ssh(lab, "root", host.name, "docker", "info", "--format", "{{.ID}}").stdout
        for host in lab.hosts
    }
    assert len(ids) == 2 and "" not in ids
    assert ssh(lab, "ops", "node1", "docker", "ps").returncode != 0
    assert ssh(lab, "ops", "node1", "sudo", "-n", "docker", "ps").returncode == 0
    assert ssh(lab, "nobody", "node1", "true").returncode == 255
    assert (
        ssh(
            lab, "root", "node1", "touch /root/mine /data/huggingface/mine; ls /var/lib/docker"
        ).returncode
        == 0
    )
    assert ssh(lab, "root", "node2", "ls /root/mine").returncode != 0
    assert not Path("/root/mine").exists()


def test_up_again_changes_nothing(lab: Lab) -> None:
    """The same processes keep running."""
    before = {p.pid for p in processes.lab_processes(NAME)}
    start(lab)

    assert {p.pid for p in processes.lab_processes(NAME)} == before


def test_up_repairs_dead_and_missing_parts(lab: Lab) -> None:
    """Dead services, a host that is off, a deleted namespace and bridge: another `up` repairs
    everything.
    """
    first, second = lab.hosts
    host_faults.kill_sshd(first)
    host_faults.kill_dockerd(first)
    host_faults.power_off(second)
    subprocess.run(["ip", "netns", "delete", second.netns], check=True)
    subprocess.run(["ip", "link", "delete", lab.bridge], check=True)
    assert not all_up(lab)

    start(lab)

    assert all_up(lab)
    assert reaches(lab, "node1", "node2")


def test_up_restores_a_deleted_namespace(lab: Lab) -> None:
    """Without the name its processes are in a network that nothing reaches."""
    subprocess.run(["ip", "netns", "delete", lab.hosts[0].netns], check=True)
    start(lab)

    assert all_up(lab)
    assert reaches(lab, "node2", "node1")


def test_down_removes_a_damaged_lab(lab: Lab) -> None:
    """After a crash: a dead host, a truncated record, a container, a stray process and a rule."""
    start_container(lab.hosts[1])
    for process in processes.host_processes(lab.hosts[0]):
        if process.is_init:
            os.kill(process.pid, signal.SIGKILL)
    (DIRECTORY / layout.RECORD).write_text('{"name": "vl')
    subprocess.run(["iptables", "-I", "FORWARD", *network.forwarding_rule(lab)], check=True)
    stray = subprocess.Popen(
        [
            *("ip", "netns", "exec", lab.hosts[1].netns),
            sys.executable,
            "-c",
            "import time; time.sleep(600)",
        ]
    )

    traces = removal.leftovers(NAME, DIRECTORY)
    kinds = {line.split()[0] for line in traces}
    assert kinds >= {"process", "network", "interface", "packet", "control", "directory"}
    assert any("(sleep)" in line for line in traces)
    removal.remove_lab(NAME, DIRECTORY, quiet)
    stray.wait(timeout=60)

    assert removal.leftovers(NAME, DIRECTORY) == []
