"""Docker's version, storage and cgroups."""

from __future__ import annotations

import pytest

from tests.hosts.checks.spoiled import NODES, ROCE, Case, findings, named, stays_unknown, turns_red

CASES = (
    Case(
        id="docker-version",
        red={"gpu02": "fail"},
        text="Docker 19.03.15 is older than 20.10",
        fix="install a current Docker",
        facts={"gpu02": {"docker_version": "19.03.15"}},
    ),
    Case(
        id="docker-storage",
        red={"gpu03": "warn"},
        text="with `vfs`",
        fix="overlay2",
        survey={"gpu03": {"docker_storage": "vfs"}},
    ),
    Case(
        id="cgroup-driver",
        red={"gpu01": "warn"},
        text="cgroups: systemd v2, while gpu[02-03] has cgroupfs v1",
        fix="native.cgroupdriver=cgroupfs",
        survey={"gpu01": {"docker_cgroup": "systemd v2"}},
    ),
    Case(
        id="cgroup-driver",
        red=dict.fromkeys(NODES, "warn"),
        text="`systemctl daemon-reload` can take GPUs",
        fix="cgroupfs",
        survey={"*": {"docker_cgroup": "systemd v2"}},
    ),
    Case(
        id="cgroup-driver",
        red={"gpu03": "warn"},
        text="cgroups: cgroupfs v2, while gpu[01-02] has cgroupfs v1",
        fix="systemd.unified_cgroup_hierarchy=",
        survey={"gpu03": {"docker_cgroup": "cgroupfs v2"}},
    ),
    Case(
        id="privileged",
        red=dict.fromkeys(NODES, "warn"),
        text="`privileged: true` gives the containers every device",
        fix="`cap_add:`",
        extra=f"{ROCE}\nprivileged: true",
    ),
)


UNKNOWN = (
    (
        Case(
            id="docker-version", red={}, text="", fix="", facts={"gpu01": {"docker_version": "dev"}}
        ),
        "cannot be read: dev",
    ),
    (
        Case(
            id="docker-storage", red={}, text="", fix="", survey={"gpu01": {"docker_storage": ""}}
        ),
        "reported no storage driver",
    ),
    (
        Case(id="cgroup-driver", red={}, text="", fix="", survey={"gpu01": {"docker_cgroup": ""}}),
        "reported no cgroup driver",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_the_systemd_driver_is_fine_without_gpus() -> None:
    """Only devices added by NVIDIA's hook get lost."""
    case = Case(
        id="cgroup-driver",
        red={},
        text="",
        fix="",
        extra="accelerator: cpu",
        survey={"*": {"docker_cgroup": "systemd v2"}},
    )

    assert {(finding.status, finding.text) for finding in findings(case)} == {
        ("pass", "systemd v2")
    }


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)
