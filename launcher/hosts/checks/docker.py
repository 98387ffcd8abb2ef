"""Docker: sudo before it, the daemon, GPUs, storage, cgroups, and privileged containers."""

from __future__ import annotations

import re

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node
from launcher.hosts.check import (
    UNSURVEYED,
    Check,
    Host,
    alike,
    each,
    not_nvidia,
    ssh_command,
    surveyed,
)
from launcher.tools.host import DEADLINE
from launcher.tools.survey import Survey

# What containers may read and write, under its present and its former name (container-selinux).
_CONTAINER_LABELS = ("container_file_t", "svirt_sandbox_file_t", "nfs_t", "cifs_t", "fusefs_t")
_OLDEST = (19, 3)  # the first with `--gpus`
_GOOD = ("overlay2", "overlayfs", "btrfs", "zfs", "fuse-overlayfs")
# In sudo's own words, versions 1.8 to 1.9.
_PASSWORD = (
    "a password is required",
    "a terminal is required",
    "is not in the sudoers file",
    "is not allowed to execute",
    "may not run sudo",
)
_TERMINAL = "you must have a tty"


def _sudo(host: Host) -> Finding:
    if host.facts.docker_version is None:
        if (refusal := _refused(host)) is not None:
            return refusal
        if "docker" in host.facts.late:
            return skipped(host, "sudo was not done in time: see `docker`")
    if host.node.docker[:1] != ("sudo",):
        return passed(host, "sudo is not used")
    return passed(host, f"`{' '.join(host.node.docker)}` asks for no password")


def _refused(host: Host) -> Finding | None:
    """Return what is wrong where sudo refused, None where it did not."""
    node, (output, user) = host.node, _docker_said(host)
    output_lower, command = output.lower(), " ".join(node.docker)
    if _TERMINAL in output_lower:
        text = f"sudo runs `{command}` only from a terminal (`requiretty` in sudoers)"
        rule = f"Defaults:{user} !requiretty"
    elif any(message in output_lower for message in _PASSWORD):
        text = f"`{command}` may not be run by `{user}` without a password"
        rule = f"{user} ALL=(root) NOPASSWD: /usr/bin/docker"
    else:
        return None
    fix = f"run on {node.name}: `echo '{rule}' | sudo tee -a /etc/sudoers.d/vlaunch`"
    return failed(node, text, evidence=output, fix=fix)


def _docker_said(host: Host) -> tuple[str, str]:
    """Return what Docker, or sudo in front of it, said on a node, and to whom."""
    messages = host.facts.said
    user = host.facts.user or host.node.ssh.user or "USER"
    return messages.get("docker", "") or messages.get("info", ""), user


def _no_sudo(inventory: Inventory) -> str:
    used = any(node.docker[:1] == ("sudo",) for node in inventory.nodes)
    return "" if used else "docker: is called without sudo"


def _docker(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    if facts.podman:
        return skipped(node, "Podman answers in its place: see `docker-engine`")
    if facts.docker_version is not None:
        return None
    output, user = _docker_said(host)
    output_lower = output.lower()
    if "docker" in facts.late:
        return _late(host, output)
    if "permission denied" in output_lower:
        return failed(
            node,
            f"`{user}` may not talk to Docker",
            evidence=output,
            fix=(
                "add `docker: [sudo, -n, docker]` to the inventory, or run `sudo usermod -aG"
                f" docker {user}` on {node.name}"
            ),
        )
    if (refusal := _refused(host)) is not None:
        return refusal
    # It is another matter when the program finds no socket.
    if "not found" in output_lower or (
        "no such file" in output_lower and "docker.sock" not in output_lower
    ):
        return failed(
            node,
            f"`{node.docker[-1]}` is not installed",
            evidence=output,
            fix="install Docker Engine: https://docs.docker.com/engine/install/",
        )
    return failed(
        node,
        "Docker does not answer",
        evidence=output,
        fix=f"run `sudo systemctl start docker` on {node.name}",
    )


def _late(host: Host, output: str) -> Finding:
    """Say of a Docker that was not ready in time what was asked, and how to see what takes so long;
    sudo looks the node's own name up before it runs anything.
    """
    node, command = host.node, " ".join(host.node.docker)
    text = f"`{command} version` did not answer within {DEADLINE} s"
    fix = f"see what takes so long: `{ssh_command(node)} time {command} version`"
    if node.docker[:1] != ("sudo",):
        return failed(
            node, text, evidence=output, fix=f"{fix}; then `sudo systemctl status docker`"
        )
    name = host.facts.hostname or node.name
    if "unable to resolve host" in output:
        text = f"{text}: sudo cannot resolve the node's own name, `{name}`"
    fix = (
        f"run `echo '{node.ip} {name}' | sudo tee -a /etc/hosts` on {node.name}, for sudo looks up"
        f" the node's own name; {fix}"
    )
    return failed(node, text, evidence=output, fix=fix)


def _engine(host: Host) -> Finding | None:
    """Refuse what answers as Docker and is not the daemon that containers of a cluster need."""
    node, facts = host.node, host.facts
    setting = "`docker: [sudo, -n, /usr/bin/docker, --host, unix:///var/run/docker.sock]`"
    if facts.podman:
        return failed(
            node,
            f"`{' '.join(node.docker)}` is Podman here, not Docker",
            fix=(
                "install Docker Engine: https://docs.docker.com/engine/install/; where it is there"
                f" besides, name it in the inventory: {setting}"
            ),
        )
    if facts.docker_version is None:
        return skipped(node, "Docker did not answer: see `docker`")
    if "rootless" in facts.security:
        return failed(
            node,
            "Docker runs rootless here: its containers do not get the node's own network",
            fix=f"use root's daemon: {setting}",
        )
    return None


def _selinux(host: Host) -> Finding | None:
    labels = host.facts.selinux
    if not labels or "selinux" not in host.facts.security:
        return passed(host, "SELinux is not enforced for containers")
    denied = sorted(path for path, label in labels.items() if label not in _CONTAINER_LABELS)
    if not denied:
        return None
    return failed(
        host,
        f"SELinux keeps containers from {' and '.join(denied)}",
        evidence="\n".join(f"{path}: {labels[path]}" for path in denied),
        fix=(
            f"label them for containers on {host.name}: `sudo chcon -Rt container_file_t"
            f" {' '.join(denied)}`, and for good with `sudo semanage fcontext`"
        ),
    )


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


def _version(host: Host) -> Finding:
    version = host.facts.docker_version
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match is None:
        return skipped(host, f"Docker's version cannot be read: {version or 'it did not answer'}")
    if (int(match[1]), int(match[2])) < _OLDEST:
        return failed(
            host,
            f"Docker {version} is older than 19.03, the first with `--gpus`",
            fix="install a current Docker Engine: https://docs.docker.com/engine/install/",
        )
    return passed(host, f"Docker {version}")


def _storage(node: Node, survey: Survey) -> Finding:
    driver = survey.docker_storage
    if not driver:
        return skipped(node, "Docker did not say how it stores images")
    if driver in _GOOD:
        return passed(node, driver)
    return warned(
        node,
        f"Docker stores images with `{driver}`, which copies whole layers or is no longer"
        " maintained",
        evidence=f"Docker's directory: {survey.docker_root}" if survey.docker_root else "",
        fix=(
            f'on {node.name}, put `"storage-driver": "overlay2"` into /etc/docker/daemon.json and'
            " run `sudo systemctl restart docker`; images must be pulled again"
        ),
    )


def _cgroup(host: Host) -> str | Finding:
    if host.survey is None:
        return skipped(host, UNSURVEYED)
    return host.survey.docker_cgroup or skipped(host, "Docker did not name its cgroup driver")


def _other_cgroup(host: Host, driver: str, common: str, others: str) -> Finding:
    fix = _fix(host.name, common)
    if _word(driver) == _word(common):
        fix = (
            f"boot {host.name} with the others' cgroup version:"
            " `systemd.unified_cgroup_hierarchy=` of its kernel's command line"
        )
    return warned(host, f"cgroups: {driver}, while {others} has {common}", fix=fix)


def _usual_cgroup(host: Host, driver: str) -> Finding:
    """Warn of the driver `systemd`: which toolkits are free of its fault cannot be told from
    outside.
    """
    if _word(driver) != "systemd" or host.inventory.accelerator != "nvidia":
        return passed(host, driver)
    return warned(
        host,
        "with cgroup driver `systemd`, `systemctl daemon-reload` can take GPUs from running"
        " containers",
        fix=_fix(host.name, "cgroupfs"),
    )


def _word(driver: str) -> str:
    """Return the driver without the version of cgroups behind it: `systemd v2`."""
    return driver.partition(" ")[0]


def _fix(name: str, driver: str) -> str:
    return (
        f'on {name}, put `"exec-opts": ["native.cgroupdriver={_word(driver)}"]` into'
        " /etc/docker/daemon.json and run `sudo systemctl restart docker`"
    )


def _unprivileged(inventory: Inventory) -> str:
    """Say why there is nothing to warn of."""
    return "" if inventory.privileged else "privileged: false, as it should be"


def _privileged(host: Host) -> Finding:
    return warned(
        host,
        "`privileged: true` gives its container every device and every right of root's",
        fix=(
            "remove it, and name what is needed: `devices:`, `cap_add:` and `ulimits:`"
            " (docs/reference/containers.md#more-permissions)"
        ),
    )


CHECKS = (
    Check(
        id="sudo",
        what="sudo starts docker without a password",
        why="nobody is there to type one while a cluster comes up",
        judge=each(_sudo),
        skip_reason=_no_sudo,
        group="reach",
    ),
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
        id="docker-version",
        what="Docker is new enough",
        why="GPUs are handed out with `docker run --gpus`",
        judge=each(_version),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="docker-storage",
        what="Docker stores images on a copy-on-write driver",
        why="an image of 20 GiB is copied for each layer and each container otherwise",
        judge=surveyed(_storage),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="cgroup-driver",
        what="Docker's cgroup driver is one and keeps the GPUs",
        why=(
            "nodes that differ in it fail differently, and under systemd a reload can detach GPUs"
            " from containers"
        ),
        judge=alike(_cgroup, _other_cgroup, _usual_cgroup),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="privileged",
        what="the containers have no more rights than they need",
        why=(
            "who gets into a privileged container is root on its node, and Ray runs whatever a job"
            " says"
        ),
        judge=each(_privileged),
        group="docker",
        skip_reason=_unprivileged,
    ),
)
