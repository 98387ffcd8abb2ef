"""Findings of judges: what holds on a node or on the cluster, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from launcher.core.domain import fold

Status = Literal["pass", "warn", "fail", "skip", "wait"]


class Named(Protocol):
    """A node, in any of its forms."""

    @property
    def name(self) -> str:
        """The node's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a judge saw on one node (or on the cluster, when `node` is empty).

    `wait` means: not yet, ask again.
    """

    node: str
    status: Status
    text: str
    evidence: str = ""
    fix: str = ""


def passed(node: Named | str, text: str = "") -> Finding:
    """Return the finding of a node with nothing wrong; `text` tells the value that was seen."""
    return Finding(node=_name(node), status="pass", text=text)


def skipped(node: Named | str, reason: str, *, fix: str = "") -> Finding:
    """Return the finding of a node that could not be judged."""
    return Finding(node=_name(node), status="skip", text=reason, fix=fix)


def warned(node: Named | str, text: str, *, evidence: str = "", fix: str) -> Finding:
    """Return the finding of a node on which something is not as it should be, though it may
    work.
    """
    return Finding(node=_name(node), status="warn", text=text, evidence=evidence, fix=fix)


def failed(node: Named | str, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    """Return the finding of a node on which something is wrong."""
    return Finding(node=_name(node), status="fail", text=text, evidence=evidence, fix=fix)


def waiting(node: Named | str, text: str, *, evidence: str = "", fix: str = "") -> Finding:
    """Return the finding of a node that a gate still waits for."""
    return Finding(node=_name(node), status="wait", text=text, evidence=evidence, fix=fix)


def gone(remaining: Sequence[str], text: str) -> Finding:
    """Judge that nothing is left of what was stopped; `text` says so."""
    if remaining:
        fix = "run the same command again; `vlaunch down` ends everything"
        return waiting("", "; ".join(remaining), fix=fix)
    return passed("", text)


def worst(findings: Sequence[Finding]) -> Status:
    """Return the most serious status among findings; `pass` when there are none."""
    order: tuple[Status, ...] = ("fail", "wait", "warn", "skip", "pass")
    return next((status for status in order if any(f.status == status for f in findings)), "pass")


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that say the same thing on several nodes: `gpu[02-04]: …`."""
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


def _name(node: Named | str) -> str:
    return node if isinstance(node, str) else node.name
