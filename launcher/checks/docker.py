"""Docker itself: new enough, on a storage driver that copies on write, with one cgroup driver
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.checks.consistency import alike
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    surveyed,
    surveys,
    warned,
)
from launcher.model import Inventory, Node
from launcher.tools.survey import Survey

_OLDEST = (19, 3)  # the first with `--gpus`
_GOOD = ("overlay2", "overlayfs", "btrfs", "zfs", "fuse-overlayfs")


def _version(host: Host) -> Finding:
    version = host.facts.docker_version
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None:
        return skipped(host, f"Docker's version cannot be read: {version or 'it did not answer'}")
    if (int(found[1]), int(found[2])) < _OLDEST:
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


def _cgroup(evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(evidence)
    drivers = {name: survey.docker_cgroup for name, survey in found.items() if survey.docker_cgroup}
    findings += [
        skipped(name, "Docker did not name its cgroup driver")
        for name in found
        if name not in drivers
    ]

    def differs(name: str, driver: str, common: str, others: str) -> Finding:
        same = _word(driver) == _word(common)
        fix = (
            f"boot {name} with the others' cgroup version: `systemd.unified_cgroup_hierarchy=` of"
            " its kernel's command line"
        )
        return warned(
            name,
            f"cgroups: {driver}, while {others} has {common}",
            fix=fix if same else _fix(name, common),
        )

    nvidia = evidence.inventory.accelerator == "nvidia"
    systemd = {name for name, driver in drivers.items() if nvidia and _word(driver) == "systemd"}
    judged = alike(drivers, differs)
    return [*findings, *(_reloads(each) if each.node in systemd else each for each in judged)]


def _reloads(finding: Finding) -> Finding:
    """Warn of the driver `systemd` where nothing else is wrong: which toolkits are free of its
    fault cannot be told from outside.
    """
    if finding.status != "pass":
        return finding
    return warned(
        finding.node,
        "with cgroup driver `systemd`, `systemctl daemon-reload` can take GPUs from running"
        " containers",
        fix=_fix(finding.node, "cgroupfs"),
    )


def _word(driver: str) -> str:
    """Return the driver without the version of cgroups that the survey tells besides: `systemd
    v2`.
    """
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
            " (docs/security.md)"
        ),
    )


CHECKS = (
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
        judge=_cgroup,
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
