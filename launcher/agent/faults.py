"""Faults in a server's record: the reason for an engine's end, the first dead rank, and the
progress of the recovery.

Times are seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cause import LONGEST
from .observed import EVIDENCE, FAULTS, STACKS, Fault, Observed
from .ray_view import Culprit


@dataclass(frozen=True)
class DeathSign:
    """A sign of an engine's death; `weight` tells how near it is to the cause, since consequences
    follow a moment later. It is `certain` if a process or a node is known to be gone.
    """

    weight: int
    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""
    cause: str = ""
    certain: bool = False


def add_fault(
    status: Observed, trouble: DeathSign, *, at: float, pause: float, lost: int | None
) -> Fault:
    """Record and return the fault; the oldest one beyond FAULTS is dropped."""
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


def add_culprit(fault: Fault, culprit: Culprit) -> None:
    """Add the rank that died first, and its node."""
    fault.node, fault.rank = culprit.node, culprit.rank
    if not fault.cause:
        fault.cause = ": ".join(filter(None, ("a rank died", culprit.evidence)))[:LONGEST]
    fault.evidence = "\n".join(filter(None, (culprit.evidence, fault.evidence)))[:EVIDENCE]


def record_phase(status: Observed, phase: str, now: float) -> None:
    """Record when a phase of the last fault's recovery was complete: stopped, whole, started."""
    last = status.last_fault
    if last is not None and last.ready_again_after is None:
        last.phases.setdefault(phase, round(now - last.at, 3))


def record_recovery(status: Observed, now: float) -> None:
    """Record that the server is ready again after all of its faults."""
    for fault in status.faults:
        if fault.ready_again_after is None:
            fault.ready_again_after = round(now - fault.at, 3)
