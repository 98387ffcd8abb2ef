"""The faults in a server's record: what happened, which rank died first, and how far its recovery
is.

Standard library only. Times are seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cause import LONGEST
from .observed import EVIDENCE, FAULTS, STACKS, Fault, Observed
from .ray_view import Culprit


@dataclass(frozen=True)
class Trouble:
    """A sign of an engine's death; `weight` is how near it is to the cause: what a death brings
    about comes a moment later. It is `certain` where a process or a node is known to be gone.
    """

    weight: int
    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""
    cause: str = ""
    certain: bool = False


def add(seen: Observed, trouble: Trouble, *, at: float, pause: float, lost: int | None) -> Fault:
    """Write down why an engine ends, and return it; the oldest fault beyond FAULTS is dropped."""
    fault = Fault(
        at=at,
        what=trouble.what,
        cause=trouble.cause,
        node=trouble.node,
        rank=trouble.rank,
        evidence=trouble.evidence[: EVIDENCE + STACKS],
        pause=pause,
        lost=lost,
    )
    seen.faults = [*seen.faults, fault][-FAULTS:]
    seen.fault_count += 1
    return fault


def blame(fault: Fault, culprit: Culprit) -> None:
    """Add which rank on which node died first."""
    fault.node, fault.rank = culprit.node, culprit.rank
    if not fault.cause:
        died = f"a rank died: {culprit.evidence}" if culprit.evidence else "a rank died"
        fault.cause = died[:LONGEST]
    both = (culprit.evidence, fault.evidence)
    fault.evidence = "\n".join(each for each in both if each)[:EVIDENCE]


def reached(seen: Observed, phase: str, now: float) -> None:
    """Write down how many seconds after the last fault a part of the recovery was over: stopped,
    whole, or started.
    """
    last = seen.last_fault
    if last is not None and last.ready_again_after is None and phase not in last.phases:
        last.phases[phase] = round(now - last.at, 3)


def over(seen: Observed, now: float) -> None:
    """Write down that the server is ready again after all of its faults."""
    for each in seen.faults:
        if each.ready_again_after is None:
            each.ready_again_after = round(now - each.at, 3)
