"""Checks of Docker: sudo, daemon, GPUs, storage, cgroups and privileged containers."""

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node
from launcher.hosts.check import (
    NOT_SURVEYED,
    Check,
    Host,
    per_host,
    per_survey,
    skip_unless_nvidia,
    ssh_command,
    uniform_value,
)
from launcher.tools.host import DEADLINE
from launcher.tools.host.survey import Survey
from launcher.upstream.entries import is_version, version_range

# SELinux types that containers may access, by current and former name (container-selinux).
_CONTAINER_LABELS = ("container_file_t", "svirt_sandbox_file_t", "nfs_t", "cifs_t", "fusefs_t")
_COPY_ON_WRITE = ("overlay2", "overlayfs", "btrfs", "zfs", "fuse-overlayfs")
# Messages of sudo 1.8 to 1.9.
_PASSWORD_MESSAGES = (
    "a password is required",
    "a terminal is required",
    "is not in the sudoers file",
    "is not allowed to execute",
    "may not run sudo",
)
_TERMINAL_MESSAGE = "you must have a tty"


def _judge_sudo(host: Host) -> Finding:
    if host.facts.docker_version is None:
        if (refusal := _sudo_refusal(host)) is not None:
            return refusal
        if "docker" in host.facts.timed_out_parts:
            return skipped(host, "sudo timed out: see `docker`")
    if host.node.docker[:1] != ("sudo",):
        return passed(host, "sudo is not used")
    return passed(host, f"`{' '.join(host.node.docker)}` needs no password")


def _sudo_refusal(host: Host) -> Finding | None:
    """Return the finding if sudo refused to run Docker, else None."""
    node, (output, user) = host.node, _docker_output(host)
    output_lower, command = output.lower(), " ".join(node.docker)
    if _TERMINAL_MESSAGE in output_lower:
        text = f"sudo runs `{command}` only from a terminal (`requiretty` in sudoers)"
        rule = f"Defaults:{user} !requiretty"
    elif any(message in output_lower for message in _PASSWORD_MESSAGES):
        text = f"`{user}` needs a password to run `{command}`"
        rule = f"{user} ALL=(root) NOPASSWD: /usr/bin/docker"
    else:
        return None
    fix = f"run on {node.name}: `echo '{rule}' | sudo tee -a /etc/sudoers.d/vlaunch`"
    return failed(node, text, evidence=output, fix=fix)


def _docker_output(host: Host) -> tuple[str, str]:
    """Return the output of Docker (or of sudo) and the SSH user."""
    messages = host.facts.part_errors
    user = host.facts.user or host.node.ssh.user or "USER"
    return messages.get("docker", "") or messages.get("info", ""), user


def _skip_without_sudo(inventory: Inventory) -> str:
    used = any(node.docker[:1] == ("sudo",) for node in inventory.nodes)
    return "" if used else "docker: does not use sudo"


def _judge_docker(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    if facts.podman:
        return skipped(node, "Podman is installed instead: see `docker-engine`")
    if facts.docker_version is not None:
        return None
    output, user = _docker_output(host)
    output_lower = output.lower()
    if "docker" in facts.timed_out_parts:
        return _docker_timeout(host, output)
    if "permission denied" in output_lower:
        return failed(
            node,
            f"`{user}` may not use Docker",
            evidence=output,
            fix=(
                "add `docker: [sudo, -n, docker]` to the inventory, or run `sudo usermod -aG"
                f" docker {user}` on {node.name}"
            ),
        )
    if (refusal := _sudo_refusal(host)) is not None:
        return refusal
    # A missing socket is a different fault.
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


def _docker_timeout(host: Host, output: str) -> Finding:
    """Judge a Docker that timed out, maybe because sudo resolves the node's own name."""
    node, command = host.node, " ".join(host.node.docker)
    text = f"`{command} version` did not answer within {DEADLINE} s"
    fix = f"find out what is slow: `{ssh_command(node)} time {command} version`"
    if node.docker[:1] != ("sudo",):
        return failed(
            node, text, evidence=output, fix=f"{fix}; then `sudo systemctl status docker`"
        )
    name = host.facts.hostname or node.name
    if "unable to resolve host" in output:
        text = f"{text}: sudo cannot resolve the node's own name, `{name}`"
    fix = (
        f"run `echo '{node.ip} {name}' | sudo tee -a /etc/hosts` on {node.name}, because sudo looks"
        f" up the node's own name; {fix}"
    )
    return failed(node, text, evidence=output, fix=fix)


def _judge_engine(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    setting = "`docker: [sudo, -n, /usr/bin/docker, --host, unix:///var/run/docker.sock]`"
    if facts.podman:
        return failed(
            node,
            f"`{' '.join(node.docker)}` is Podman, not Docker",
            fix=(
                "install Docker Engine: https://docs.docker.com/engine/install/; if it is"
                f" installed too, name it in the inventory: {setting}"
            ),
        )
    if facts.docker_version is None:
        return skipped(node, "Docker did not answer: see `docker`")
    if "rootless" in facts.security:
        return failed(
            node,
            "Docker runs rootless: its containers cannot use the host network",
            fix=f"use root's daemon: {setting}",
        )
    return None


def _judge_selinux(host: Host) -> Finding | None:
    labels = host.facts.selinux
    if not labels or "selinux" not in host.facts.security:
        return passed(host, "SELinux is not enforced for containers")
    denied = sorted(path for path, label in labels.items() if label not in _CONTAINER_LABELS)
    if not denied:
        return None
    return failed(
        host,
        f"SELinux blocks containers from {' and '.join(denied)}",
        evidence="\n".join(f"{path}: {labels[path]}" for path in denied),
        fix=(
            f"label them on {host.name}: `sudo chcon -Rt container_file_t {' '.join(denied)}`; to"
            " keep the labels, use `sudo semanage fcontext`"
        ),
    )


def _judge_gpu_runtime(host: Host) -> Finding | None:
    facts = host.facts
    if host.inventory.accelerator != "nvidia" or facts.docker_version is None:
        return None
    if any("nvidia" in runtime or "cdi" in runtime for runtime in facts.runtimes) or facts.toolkit:
        return None
    return failed(
        host,
        "Docker cannot expose GPUs: neither the NVIDIA runtime nor its hook is installed",
        evidence="runtimes: " + (", ".join(facts.runtimes) or "none"),
        fix=(
            "install nvidia-container-toolkit, then run "
            "`sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker`"
        ),
    )


def _judge_version(host: Host) -> Finding:
    version, supported = host.facts.docker_version or "", version_range("docker")
    if not is_version(version):
        return skipped(host, f"Docker's version cannot be read: {version or 'it did not answer'}")
    if reasons := supported.reasons(version):
        return failed(
            host,
            f"Docker {version} is older than {supported.broken_below}",
            evidence="; ".join(reasons),
            fix="install a current Docker Engine: https://docs.docker.com/engine/install/",
        )
    return passed(host, f"Docker {version}")


def _judge_storage(node: Node, survey: Survey) -> Finding:
    driver = survey.docker_storage
    if not driver:
        return skipped(node, "Docker reported no storage driver")
    if driver in _COPY_ON_WRITE:
        return passed(node, driver)
    return warned(
        node,
        f"Docker stores images with `{driver}`, which copies complete layers or is no longer"
        " maintained",
        evidence=f"Docker's directory: {survey.docker_root}" if survey.docker_root else "",
        fix=(
            f'on {node.name}, put `"storage-driver": "overlay2"` into /etc/docker/daemon.json and'
            " run `sudo systemctl restart docker`; images must be pulled again"
        ),
    )


def _cgroup(host: Host) -> str | Finding:
    if host.survey is None:
        return skipped(host, NOT_SURVEYED)
    return host.survey.docker_cgroup or skipped(host, "Docker reported no cgroup driver")


def _other_cgroup(host: Host, driver: str, common: str, others: str) -> Finding:
    fix = _cgroup_fix(host.name, common)
    if _driver_name(driver) == _driver_name(common):
        fix = (
            f"boot {host.name} with the cgroup version of the other nodes: set"
            " `systemd.unified_cgroup_hierarchy=` on its kernel command line"
        )
    return warned(host, f"cgroups: {driver}, while {others} has {common}", fix=fix)


def _usual_cgroup(host: Host, driver: str) -> Finding:
    """Warn about the `systemd` driver: it is unknown which toolkit versions have the fault."""
    if _driver_name(driver) != "systemd" or host.inventory.accelerator != "nvidia":
        return passed(host, driver)
    return warned(
        host,
        "with cgroup driver `systemd`, `systemctl daemon-reload` can take GPUs from running"
        " containers",
        fix=_cgroup_fix(host.name, "cgroupfs"),
    )


def _driver_name(driver: str) -> str:
    """Return the cgroup driver without its version: `systemd v2` → `systemd`."""
    return driver.partition(" ")[0]


def _cgroup_fix(name: str, driver: str) -> str:
    return (
        f'on {name}, put `"exec-opts": ["native.cgroupdriver={_driver_name(driver)}"]` into'
        " /etc/docker/daemon.json and run `sudo systemctl restart docker`"
    )


def _skip_unprivileged(inventory: Inventory) -> str:
    return "" if inventory.privileged else "privileged: false"


def _warn_privileged(host: Host) -> Finding:
    return warned(
        host,
        "`privileged: true` gives the containers every device and full root rights",
        fix=(
            "remove it, and list what is needed under `devices:`, `cap_add:` and `ulimits:`"
            " (docs/reference/containers.md#more-permissions)"
        ),
    )


CHECKS = (
    Check(
        id="sudo",
        what="sudo runs docker without a password",
        why="commands run without a terminal, so sudo cannot prompt",
        judge=per_host(_judge_sudo),
        skip_reason=_skip_without_sudo,
        group="reach",
    ),
    Check(
        id="docker",
        what="Docker answers",
        why="every part of the cluster runs in a container",
        judge=per_host(_judge_docker),
        group="docker",
        needs=("sudo",),
    ),
    Check(
        id="docker-engine",
        what="the daemon is Docker and runs as root",
        why="rootless daemons and Podman differ in networking and output",
        judge=per_host(_judge_engine),
        group="docker",
    ),
    Check(
        id="selinux",
        what="SELinux lets containers use the mounted directories",
        why="containers that cannot read their files exit at once, without mentioning SELinux",
        judge=per_host(_judge_selinux),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="gpu-runtime",
        what="Docker can expose GPUs to containers",
        why="otherwise containers do not start: could not select device driver",
        judge=per_host(_judge_gpu_runtime),
        skip_reason=skip_unless_nvidia,
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="docker-version",
        what="the Docker version is supported",
        why="containers are started with `docker run --gpus` and `--pull`",
        judge=per_host(_judge_version),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="docker-storage",
        what="Docker stores images on a copy-on-write driver",
        why="otherwise a 20 GiB image is copied for each layer and each container",
        judge=per_survey(_judge_storage),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="cgroup-driver",
        what="the cgroup driver is uniform and keeps GPUs attached",
        why=(
            "nodes with different drivers fail differently, and with systemd a reload can detach"
            " GPUs from containers"
        ),
        judge=uniform_value(_cgroup, _other_cgroup, _usual_cgroup),
        group="docker",
        needs=("docker",),
    ),
    Check(
        id="privileged",
        what="the containers are not privileged",
        why=(
            "a privileged container gives root on its node, and Ray runs any code that a job"
            " contains"
        ),
        judge=per_host(_warn_privileged),
        group="docker",
        skip_reason=_skip_unprivileged,
    ),
)
