"""Essential checks on a node before anything is written: without these, `up` would fail later and
less clearly.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.checks import sudo
from launcher.checks.disk import DISK, STATE
from launcher.checks.ports import PORTS
from launcher.checks.shape import (
    Check,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    ssh_command,
)
from launcher.model import Inventory, Node
from launcher.tools.docker import Given
from launcher.tools.host import DEADLINE, Address

# What containers may read and write, under its present and its former name (container-selinux).
_CONTAINER_LABELS = ("container_file_t", "svirt_sandbox_file_t", "nfs_t", "cifs_t", "fusefs_t")


def _docker(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    if facts.podman:
        return skipped(node, "Podman answers in its place: see `docker-engine`")
    if facts.docker_version is not None:
        return None
    said = facts.said.get("docker", "") or facts.said.get("info", "")
    user = facts.user or node.ssh.user or "USER"
    lowered = said.lower()
    if "docker" in facts.late:
        return _late(host, said)
    if "permission denied" in lowered:
        return failed(
            node,
            f"`{user}` may not talk to Docker",
            evidence=said,
            fix=(
                "add `docker: [sudo, -n, docker]` to the inventory, or run `sudo usermod -aG"
                f" docker {user}` on {node.name}"
            ),
        )
    if (refused := sudo.refused(node, user, said)) is not None:
        return refused
    if _no_program(lowered):
        return failed(
            node,
            f"`{node.docker[-1]}` is not installed",
            evidence=said,
            fix="install Docker Engine: https://docs.docker.com/engine/install/",
        )
    return failed(
        node,
        "Docker does not answer",
        evidence=said,
        fix=f"run `sudo systemctl start docker` on {node.name}",
    )


def _late(host: Host, said: str) -> Finding:
    """Say of a Docker that was not ready in time what was asked, and how to see what takes so long;
    sudo looks the node's own name up before it runs anything.
    """
    node, command = host.node, " ".join(host.node.docker)
    text = f"`{command} version` did not answer within {DEADLINE} s"
    fix = f"see what takes so long: `{ssh_command(node)} time {command} version`"
    if node.docker[:1] != ("sudo",):
        return failed(node, text, evidence=said, fix=f"{fix}; then `sudo systemctl status docker`")
    name = host.facts.hostname or node.name
    if "unable to resolve host" in said:
        text = f"{text}: sudo cannot resolve the node's own name, `{name}`"
    fix = (
        f"run `echo '{node.ip} {name}' | sudo tee -a /etc/hosts` on {node.name}, for sudo looks up"
        f" the node's own name; {fix}"
    )
    return failed(node, text, evidence=said, fix=fix)


def _no_program(said: str) -> bool:
    """True when the shell found no program of that name; it is another matter when the program
    finds no socket.
    """
    return "not found" in said or ("no such file" in said and "docker.sock" not in said)


def _engine(host: Host) -> Finding | None:
    """Refuse what answers as Docker and is not the daemon that containers of a cluster need."""
    node, facts = host.node, host.facts
    own = "`docker: [sudo, -n, /usr/bin/docker, --host, unix:///var/run/docker.sock]`"
    if facts.podman:
        return failed(
            node,
            f"`{' '.join(node.docker)}` is Podman here, not Docker",
            fix=(
                "install Docker Engine: https://docs.docker.com/engine/install/; where it is there"
                f" besides, name it in the inventory: {own}"
            ),
        )
    if facts.docker_version is None:
        return skipped(node, "Docker did not answer: see `docker`")
    if "rootless" in facts.security:
        return failed(
            node,
            "Docker runs rootless here: its containers do not get the node's own network",
            fix=f"use root's daemon: {own}",
        )
    return None


def _selinux(host: Host) -> Finding | None:
    labels = host.facts.selinux
    if not labels or "selinux" not in host.facts.security:
        return passed(host, "SELinux is not enforced for containers")
    closed = sorted(path for path, label in labels.items() if label not in _CONTAINER_LABELS)
    if not closed:
        return None
    return failed(
        host,
        f"SELinux keeps containers from {' and '.join(closed)}",
        evidence="\n".join(f"{path}: {labels[path]}" for path in closed),
        fix=(
            f"label them for containers on {host.name}: `sudo chcon -Rt container_file_t"
            f" {' '.join(closed)}`, and for good with `sudo semanage fcontext`"
        ),
    )


def _accelerator(host: Host) -> Finding | None:
    node, facts, accelerator = host.node, host.facts, host.inventory.accelerator
    if accelerator == "cpu":
        return None
    if accelerator == "amd":
        there = len(facts.amd_renders or ())
        needed = max((int(each) + 1 for each in node.gpu_ids), default=node.gpus)
        if there < needed:
            return failed(
                node,
                f"{there} AMD GPUs visible, {_declared(node)}",
                evidence=facts.said.get("gpus", ""),
                fix="correct `gpus:` in the inventory, or load the driver: `sudo modprobe amdgpu`",
            )
        return _privileged(host, there)
    if facts.lost_gpus:
        return failed(
            node,
            f"the driver has lost {_count(len(facts.lost_gpus))}",
            evidence="\n".join(facts.lost_gpus),
            fix=(
                f"reboot {node.name}, for no container with GPUs starts there before; `sudo dmesg |"
                " grep Xid` tells why, and one that gets lost again is to be replaced"
            ),
        )
    if facts.gpus is None:
        return failed(
            node,
            "no NVIDIA GPU visible",
            evidence=facts.said.get("gpus", "`nvidia-smi` gave no GPU"),
            fix=(
                "install the driver (`nvidia-smi` must list the GPUs), or set `accelerator:` in the"
                " inventory"
            ),
        )
    if len(facts.used(node)) < node.gpus:
        fewer = f"`gpus: {len(facts.gpus)}`" if not node.gpu_ids else "others under `gpus:`"
        return failed(
            node,
            f"{len(facts.gpus)} GPUs visible, {_declared(node)}",
            evidence=", ".join(gpu.name for gpu in facts.gpus),
            fix=f"set {fewer} for {node.name}, or find the missing GPU: `nvidia-smi -L`",
        )
    return _privileged(host, len(facts.gpus))


def _privileged(host: Host, there: int) -> Finding | None:
    """Refuse a privileged container for some of a node's GPUs: no option of Docker's limits which
    ones it sees, and Ray and vLLM count from the first one.
    """
    node = host.node
    if not host.inventory.privileged or node.gpus == there:
        return None
    return failed(
        node,
        f"a container with `privileged: true` sees all {there} GPUs, {node.gpus} declared",
        fix=(
            f"set `gpus: {there}` for {node.name}, or replace `privileged: true` by `devices:` and"
            " `cap_add:` (docs/security.md)"
        ),
    )


def _declared(node: Node) -> str:
    return f"{', '.join(node.gpu_ids) or node.gpus} declared"


def _gpu_shared(host: Host) -> Finding | None:
    """Judge that no other cluster's container has a GPU of this node's: Docker gives one to as many
    containers as ask for it.
    """
    ours = host.facts.used(host.node)
    others = [each for each in host.facts.given if each.cluster != host.inventory.cluster]
    for given in others:
        if both := [gpu.index for gpu in ours if given.has(gpu.index, gpu.uuid)]:
            names = ", ".join(map(str, both))
            return failed(
                host,
                f"GPU{'s' if len(both) > 1 else ''} {names} {'are' if len(both) > 1 else 'is'}"
                f" given to cluster {given.cluster}, too",
                evidence=f"container {given.container}",
                fix=_other_gpus(host, others),
            )
    return None


def _other_gpus(host: Host, others: Sequence[Given]) -> str:
    free = [
        gpu.index
        for gpu in host.facts.gpus or ()
        if not any(each.has(gpu.index, gpu.uuid) for each in others)
    ]
    if len(free) < host.node.gpus:
        return f"end the other one, or use fewer: {len(free)} of {host.name} are free"
    return f"name others for {host.name}: `gpus: {free[: host.node.gpus]}`"


def _count(gpus: int) -> str:
    return "a GPU" if gpus == 1 else f"{gpus} GPUs"


def _gpu_runtime(host: Host) -> Finding | None:
    facts = host.facts
    if host.inventory.accelerator != "nvidia" or facts.docker_version is None:
        return None
    if any("nvidia" in runtime or "cdi" in runtime for runtime in facts.runtimes) or facts.toolkit:
        return None
    return failed(
        host,
        "Docker cannot hand out GPUs: neither the NVIDIA runtime nor its hook is there",
        evidence="runtimes: " + (", ".join(facts.runtimes) or "none"),
        fix=(
            "install nvidia-container-toolkit, then run "
            "`sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker`"
        ),
    )


def _address(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    if facts.addresses is None:
        return skipped(node, "`ip` is not installed; addresses were not compared")
    wanted = ipaddress.ip_address(node.ip)
    has = next(
        (each for each in facts.addresses if ipaddress.ip_address(each.ip.split("%")[0]) == wanted),
        None,
    )
    if has is None:
        return failed(
            node,
            f"no interface carries {node.ip}",
            evidence=_known(facts.addresses),
            fix=f"set `ip:` of {node.name} to one of its addresses (the network between the nodes)",
        )
    if node.interface and has.interface != node.interface:
        return _elsewhere(node, has, facts.addresses)
    if not has.up:
        return failed(
            node,
            f"`{has.interface}` is down",
            fix=f"run `sudo ip link set {has.interface} up` on {node.name}",
        )
    return None


def _elsewhere(node: Node, has: Address, addresses: Sequence[Address]) -> Finding:
    """Say of a node whose address is not on the declared interface whether that one is there."""
    fix = f"set `network: {{interface: {has.interface}}}` for {node.name}"
    if node.interface not in {each.interface for each in addresses}:
        text = f"there is no interface `{node.interface}` with an address"
        return failed(node, text, evidence=_known(addresses), fix=fix)
    return failed(
        node,
        f"{node.ip} is on `{has.interface}`, not on `{node.interface}`",
        evidence=_known(addresses),
        fix=f"{fix}, or correct its `ip:`",
    )


def _known(addresses: Sequence[Address]) -> str:
    return "\n".join(f"{each.interface} {each.ip}" for each in addresses if each.interface != "lo")


def _rdma(host: Host) -> Finding | None:
    fabric = host.inventory.fabric
    if fabric == "ethernet" or host.facts.infiniband:
        return None
    return failed(
        host,
        f"no /dev/infiniband, though the inventory says {fabric}",
        evidence=host.facts.said.get("infiniband", ""),
        fix=(
            "load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric:"
            " ethernet}`"
        ),
    )


def cpu_has_none(inventory: Inventory) -> str:
    """Say why nothing about accelerators is asked of a cluster of CPUs."""
    return "accelerator: cpu has no device and no driver" if inventory.accelerator == "cpu" else ""


def not_nvidia(inventory: Inventory) -> str:
    """Say why nothing about NVIDIA GPUs is asked."""
    return (
        ""
        if inventory.accelerator == "nvidia"
        else f"accelerator: {inventory.accelerator} has no NVIDIA driver"
    )


def no_rdma(inventory: Inventory) -> str:
    """Say why nothing about RDMA is asked."""
    return (
        "network: fabric is ethernet, which promises no RDMA"
        if inventory.fabric == "ethernet"
        else ""
    )


ACCELERATOR = Check(
    id="accelerator",
    what="the declared accelerators are there",
    why=(
        "Ray and vLLM place one rank per accelerator; a missing one makes them wait half an"
        " hour and then fail"
    ),
    judge=each(_accelerator),
    skip_reason=cpu_has_none,
    group="accelerator",
)

CHECKS = (
    Check(
        id="docker",
        what="Docker answers",
        why="every part of the cluster is a container",
        judge=each(_docker),
        group="docker",
        needs=("sudo",),
    ),
    Check(
        id="docker-engine",
        what="the daemon is Docker, run by root",
        why="rootless daemons and Podman give containers another network and other answers",
        judge=each(_engine),
        group="docker",
    ),
    Check(
        id="selinux",
        what="SELinux lets containers use the mounted folders",
        why="containers that may not read their files end at once, without a word of SELinux",
        judge=each(_selinux),
        group="docker",
        needs=("docker",),
    ),
    ACCELERATOR,
    Check(
        id="gpu-shared",
        what="no other cluster has these GPUs",
        why="two servers on one GPU take each other's memory, and the second one does not start",
        judge=each(_gpu_shared),
        skip_reason=not_nvidia,
        group="accelerator",
        needs=("docker", "accelerator"),
    ),
    Check(
        id="gpu-runtime",
        what="Docker can hand out GPUs",
        why="without it containers do not start: could not select device driver",
        judge=each(_gpu_runtime),
        skip_reason=not_nvidia,
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="address",
        what="the declared address is on the declared interface",
        why="Ray, NCCL and Gloo bind to it; a wrong one hangs the start without a message",
        judge=each(_address),
        group="network",
    ),
    Check(
        id="rdma-devices",
        what="RDMA devices are there",
        why="without them NCCL silently falls back to TCP",
        judge=each(_rdma),
        skip_reason=no_rdma,
        group="rdma",
    ),
    PORTS,
    DISK,
    STATE,
)
