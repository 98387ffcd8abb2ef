"""Runs of `vlaunch check`, and assertions about them, for the tests of its checks on real hosts."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.faults import host_faults
from tests.integration.conftest import LabCluster

Document = dict[str, Any]

# Checks that need an accelerator, RDMA, a time daemon or a model of the hub.
SKIPPED = {
    "accelerator",
    "driver",
    "fabric-manager",
    "gid-index",
    "gpu-errors",
    "gpu-memory",
    "gpu-mig",
    "gpu-model",
    "gpu-runtime",
    "gpu-shared",
    "gpudirect",
    "hca-names",
    "hf-token",
    "imex",
    "interface",
    "ipc-lock",
    "libibverbs",
    "memlock",
    "next-boot",
    "peer-access",
    "privileged",
    "rdma-container",
    "rdma-devices",
    "rdma-link",
    "sudo",
    "time-sync",
}


class CheckReport:
    """The report of one `vlaunch check`."""

    def __init__(self, text: str) -> None:
        self.checks: dict[str, Document] = {
            check["id"]: check for check in json.loads(text)["checks"]
        }

    def with_status(self, status: str) -> set[str]:
        """Return the checks with a status."""
        return {name for name, check in self.checks.items() if check["status"] == status}

    def findings(self, name: str, status: str) -> list[dict[str, str]]:
        """Return the findings of a check with a status."""
        return [finding for finding in self.checks[name]["findings"] if finding["status"] == status]

    def only_finding(self, name: str, status: str = "fail") -> dict[str, str]:
        """Return the only finding of a check with a status."""
        findings = self.findings(name, status)
        assert len(findings) == 1, findings
        return findings[0]


def run_checks(lab_cluster: LabCluster, *arguments: str, code: int) -> CheckReport:
    """Run all checks and assert the exit code."""
    result = lab_cluster.vlaunch("check", "--json", *arguments)
    assert result.code == code, result.output
    return CheckReport(result.out)


def assert_fails(lab_cluster: LabCluster, *names: str, group: str | None = None) -> CheckReport:
    """Run all checks, or a group; assert that exactly these fail, and that none warns."""
    report = run_checks(lab_cluster, *(("--group", group) if group else ()), code=1)
    assert (report.with_status("fail"), report.with_status("warn")) == (set(names), set()), (
        report.checks
    )
    return report


def assert_healthy(lab_cluster: LabCluster, name: str) -> None:
    """Run all checks again; assert that the check passes now, and that no other one warns
    or fails.
    """
    report = run_checks(lab_cluster, code=0)
    assert report.checks[name]["status"] == "pass", report.checks[name]
    assert report.with_status("warn") == set()


def run_fix(lab_cluster: LabCluster, host: str, fix: str, number: int = 0) -> str:
    """Run a command of a fix verbatim on a lab host, and return its output."""
    command = re.findall(r"`([^`]+)`", fix)[number]
    completed = host_faults.enter(lab_cluster.lab.host(host), "sh", "-c", command)
    assert completed.returncode == 0, (command, completed.stderr)
    return completed.stdout
