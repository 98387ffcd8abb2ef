"""Runs of `vlaunch check`, and what is expected of them, for the tests of its checks on real
parts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.faults import host_faults
from tests.integration.conftest import Practice

Document = dict[str, Any]


class CheckReport:
    """What one run of `vlaunch check` said."""

    def __init__(self, said: str) -> None:
        self.checks: dict[str, Document] = {each["id"]: each for each in json.loads(said)["checks"]}

    def of(self, status: str) -> set[str]:
        """Return the checks with a status."""
        return {name for name, each in self.checks.items() if each["status"] == status}

    def findings(self, name: str, status: str) -> list[dict[str, str]]:
        """Return the findings of a check with a status."""
        return [each for each in self.checks[name]["findings"] if each["status"] == status]

    def one(self, name: str, status: str = "fail") -> dict[str, str]:
        """Return the only finding of a check with a status."""
        found = self.findings(name, status)
        assert len(found) == 1, found
        return found[0]


def check(practice: Practice, *words: str, code: int) -> CheckReport:
    """Run the whole catalogue and look at the exit code."""
    ran = practice.vlaunch("check", "--json", *words)
    assert ran.code == code, ran.said
    return CheckReport(ran.out)


def broken(practice: Practice, *names: str, group: str | None = None) -> CheckReport:
    """Run the catalogue, or a group of it; exactly these checks fail, and nothing warns."""
    seen = check(practice, *(("--group", group) if group else ()), code=1)
    assert (seen.of("fail"), seen.of("warn")) == (set(names), set()), seen.checks
    return seen


def healthy(practice: Practice, name: str) -> None:
    """Run the catalogue again: the check that was red is green, and no other took its place."""
    seen = check(practice, code=0)
    assert seen.checks[name]["status"] == "pass", seen.checks[name]
    assert seen.of("warn") == set()


def do(practice: Practice, host: str, fix: str, number: int = 0) -> str:
    """Run a command of a fix, as it is written, on a practice host, and return what it printed."""
    command = re.findall(r"`([^`]+)`", fix)[number]
    done = host_faults.enter(practice.lab.host(host), "sh", "-c", command)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
