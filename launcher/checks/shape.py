"""The shape of a check: a literal with an identity, a reason and a fix, and a judge that only looks at what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.model import Inventory, fold
from launcher.tools.host import HostFacts

Status = Literal["pass", "warn", "fail", "skip", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a judge saw on one node (or on the cluster, when `node` is empty). `wait` means: not yet, ask again."""

    node: str
    status: Status
    text: str
    evidence: str = ""
    fix: str = ""


Judge = Callable[[Inventory, Mapping[str, HostFacts]], Sequence[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold. `what` is a sentence that is true when the check is green.

    A check that does not apply to a cluster is not asked and not shown: nothing is green that was not looked at.
    """

    id: str
    what: str
    why: str
    judge: Judge
    applies: Callable[[Inventory], bool] = lambda _: True


def worst(findings: Sequence[Finding]) -> Status:
    """Return the most serious status among findings; `pass` when there are none."""
    order: tuple[Status, ...] = ("fail", "wait", "warn", "skip", "pass")
    return next((status for status in order if any(f.status == status for f in findings)), "pass")


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that say the same thing on several nodes: `gpu[02-04]: …`."""
    groups: dict[tuple[Status, str, str, str], list[str]] = {}
    for each in findings:
        groups.setdefault((each.status, each.text, each.evidence, each.fix), []).append(each.node)
    return [
        Finding(node=fold([n for n in names if n]), status=status, text=text, evidence=evidence, fix=fix)
        for (status, text, evidence, fix), names in groups.items()
    ]
