"""Whether the nodes' clocks agree, with each other and with this machine's, and something keeps
them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    failed,
    passed,
    skipped,
    surveyed,
    surveys,
    warned,
)
from launcher.model import Node
from launcher.tools.survey import Survey

# Seconds. The probe itself blurs a clock by its round trip; above the second bound logs and token
# expiry tell nonsense.
_WARN, _FAIL = 2.0, 30.0


def _skew(evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(evidence)
    skews = {name: survey.skew for name, survey in found.items() if survey.skew is not None}
    findings += [skipped(name, "its clock was not read") for name in found if name not in skews]
    if not skews:
        return findings
    right = _right(list(skews.values()))
    if len(skews) == 1:
        findings += [passed(name, "its clock was read") for name in skews]
    else:
        findings += [_apart(name, skew - right) for name, skew in skews.items()]
    return [*findings, *_this_machine(right)]


def _right(skews: Sequence[float]) -> float:
    """Return the clock to compare the others with: of two that disagree, the one nearer to this
    machine's is taken to be right.
    """
    return median_low(skews) if len(skews) > 2 else min(skews, key=abs)


def _apart(name: str, apart: float) -> Finding:
    if abs(apart) <= _WARN:
        return passed(name, "its clock agrees with the others")
    judge = warned if abs(apart) <= _FAIL else failed
    direction = "ahead of" if apart > 0 else "behind"
    return judge(
        name, f"its clock is {abs(apart):.0f} s {direction} the other nodes'", fix=_fix(name)
    )


def _this_machine(right: float) -> list[Finding]:
    """Warn of this machine's clock where the nodes' one differs from it by so many seconds."""
    if abs(right) <= _WARN:
        return []
    direction = "behind" if right > 0 else "ahead of"
    text = f"this machine's clock is {abs(right):.0f} s {direction} the nodes'"
    return [warned("", text, fix="set this machine's clock: `sudo timedatectl set-ntp true`")]


def _fix(name: str) -> str:
    return (
        f"run `sudo timedatectl set-ntp true` on {name}, or `sudo chronyc makestep` where chrony"
        " runs"
    )


def _synced(node: Node, survey: Survey) -> Finding:
    if survey.synced is None:
        return skipped(node, "no time daemon was found that could say so")
    if survey.synced:
        return passed(node, "its clock is kept by a time daemon")
    return warned(
        node, "nothing keeps its clock", fix=f"run `sudo timedatectl set-ntp true` on {node.name}"
    )


CHECKS = (
    Check(
        id="time-skew",
        what="the clocks agree within two seconds",
        why=(
            "logs of several nodes cannot be put in order otherwise, and tokens and certificates"
            " expire at the wrong time"
        ),
        judge=_skew,
        group="host",
    ),
    Check(
        id="time-sync",
        what="a time daemon keeps the clock",
        why="clocks that agree today drift apart",
        judge=surveyed(_synced),
        group="host",
    ),
)
