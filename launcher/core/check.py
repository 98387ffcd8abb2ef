"""Findings of checks, and of gates (conditions that a plan waits for), on a node or the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from launcher.core.domain import fold

Status = Literal["pass", "warn", "fail", "skip", "wait"]


class HasName(Protocol):
    """Anything with a node's name."""

    @property
    def name(self) -> str:
        """The node's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a check on one node, or on the cluster when `node` is empty.

    `wait` means "not yet": the gate queries again.
    """

    node: str
    status: Status
    text: str
    evidence: str = ""
    fix: str = ""


def passed(node: HasName | str, text: str = "") -> Finding:
    """Return a PASS; `text` reports the observed value."""
    return Finding(node=_node_name(node), status="pass", text=text)


def skipped(node: HasName | str, reason: str, *, fix: str = "") -> Finding:
    """Return a SKIP: the check could not run."""
    return Finding(node=_node_name(node), status="skip", text=reason, fix=fix)


def warned(node: HasName | str, text: str, *, evidence: str = "", fix: str) -> Finding:
    """Return a WARN: a deviation that may still work."""
    return Finding(node=_node_name(node), status="warn", text=text, evidence=evidence, fix=fix)


def failed(node: HasName | str, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    """Return a FAIL."""
    return Finding(node=_node_name(node), status="fail", text=text, evidence=evidence, fix=fix)


def waiting(node: HasName | str, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    """Return a WAIT: the gate queries again until its deadline."""
    return Finding(node=_node_name(node), status="wait", text=text, evidence=evidence, fix=fix)


def judge_removal(remaining: Sequence[str], text: str) -> Finding:
    """Return a gate's finding on a removal: wait while items remain, else pass with `text`."""
    if remaining:
        fix = "run the same command again, or remove the cluster with `vlaunch down`"
        return waiting("", "; ".join(remaining), fix=fix)
    return passed("", text)


def worst_status(findings: Sequence[Finding]) -> Status:
    """Return the most serious status; `pass` without findings."""
    order: tuple[Status, ...] = ("fail", "wait", "warn", "skip", "pass")
    return next((status for status in order if any(f.status == status for f in findings)), "pass")


def fold_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes: `gpu[02-04]: …`."""
    groups: dict[tuple[Status, str, str, str], dict[str, None]] = {}
    for finding in findings:
        content = (finding.status, finding.text, finding.evidence, finding.fix)
        groups.setdefault(content, {})[finding.node] = None
    return [
        Finding(
            node=fold([n for n in names if n]), status=status, text=text, evidence=evidence, fix=fix
        )
        for (status, text, evidence, fix), names in groups.items()
    ]


def _node_name(node: HasName | str) -> str:
    return node if isinstance(node, str) else node.name
