"""The faults in a server's record: why an engine ended, which rank died first, and how far its
recovery is.

Times are seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cause import LONGEST
from .observed import EVIDENCE, FAULTS, STACKS, Fault, Observed
from .ray_view import Culprit


@dataclass(frozen=True)
class Trouble:
    """A sign of an engine's death; `weight` is how near it is to the cause: a consequence comes a
    moment later. It is `certain` where a process or a node is known to be gone.
    """

    weight: int
    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""
    cause: str = ""
    certain: bool = False


def add(status: Observed, trouble: Trouble, *, at: float, pause: float, lost: int | None) -> Fault:
    """Record why an engine ends, and return it; the oldest fault beyond FAULTS is dropped."""
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
    status.faults = [*status.faults, fault][-FAULTS:]
    status.fault_count += 1
    return fault


def blame(fault: Fault, culprit: Culprit) -> None:
    """Add which rank on which node died first."""
    fault.node, fault.rank = culprit.node, culprit.rank
    if not fault.cause:
        fault.cause = ": ".join(filter(None, ("a rank died", culprit.evidence)))[:LONGEST]
    fault.evidence = "\n".join(filter(None, (culprit.evidence, fault.evidence)))[:EVIDENCE]


def reached(status: Observed, phase: str, now: float) -> None:
    """Record after how many seconds a part of the last fault's recovery was over: stopped, whole,
    or started.
    """
    last = status.last_fault
    if last is not None and last.ready_again_after is None:
        last.phases.setdefault(phase, round(now - last.at, 3))


def over(status: Observed, now: float) -> None:
    """Record that the server is ready again after all of its faults."""
    for fault in status.faults:
        if fault.ready_again_after is None:
            fault.ready_again_after = round(now - fault.at, 3)
