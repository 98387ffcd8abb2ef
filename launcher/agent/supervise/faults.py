"""Faults in a server's record: an engine's end, the rank that died first, and the recovery.

Times are seconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cause import MAX_CAUSE_CHARS
from ..observed import MAX_EVIDENCE, MAX_FAULTS, MAX_STACKS, Fault, Observed
from ..processes.ray_view import Culprit


@dataclass(frozen=True)
class DeathSign:
    """A sign of an engine's death. Of several signs of one death, the one with the largest `weight`
    becomes the fault. It is `certain` if a process or a node is known to be gone.
    """

    weight: int
    what: str
    node: str = ""
    rank: str = ""
    evidence: str = ""
    cause: str = ""
    certain: bool = False


def add_fault(
    status: Observed, sign: DeathSign, *, at: float, pause: float, lost: int | None
) -> Fault:
    """Add and return the fault; `lost` is its number of lost requests, None if unknown."""
    fault = Fault(
        at=at,
        what=sign.what,
        cause=sign.cause,
        node=sign.node,
        rank=sign.rank,
        evidence=sign.evidence[: MAX_EVIDENCE + MAX_STACKS],
        pause=pause,
        lost=lost,
    )
    status.faults = [*status.faults, fault][-MAX_FAULTS:]
    status.fault_count += 1
    return fault


def add_culprit(fault: Fault, culprit: Culprit) -> None:
    """Add the rank that died first, and its node."""
    fault.node, fault.rank = culprit.node, culprit.rank
    if not fault.cause:
        fault.cause = ": ".join(filter(None, ("a rank died", culprit.evidence)))[:MAX_CAUSE_CHARS]
    # no MAX_STACKS: only hangs have stacks, and Ray is queried only about deaths
    fault.evidence = "\n".join(filter(None, (culprit.evidence, fault.evidence)))[:MAX_EVIDENCE]


def record_phase(status: Observed, phase: str, now: float) -> None:
    """Record the end of a phase of the last fault's recovery (`Fault.phases`)."""
    last = status.last_fault
    if last is not None and last.ready_again_after is None:
        last.phases.setdefault(phase, round(now - last.at, 3))


def record_recovery(status: Observed, now: float) -> None:
    """Record that the server is ready again after all of its faults."""
    for fault in status.faults:
        if fault.ready_again_after is None:
            fault.ready_again_after = round(now - fault.at, 3)
