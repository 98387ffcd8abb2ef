"""Judgment of a run: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

# Seconds that a dead server may be called healthy: 15 after a process died, and one between two
# readings. When packets vanish: 5 until the next canary starts, 30 until its silence makes the
# server quiet, and three until its report is in the record and the record is read.
GREEN, GREEN_SILENT = 16.0, 38.0
# Verdicts that make `status` red, and those that are wrong for a dead server.
RED_VERDICTS = ("suspect", "recovering", "failed", "gave-up", "unknown")
HEALTHY_VERDICTS = ("answering", "busy", "resting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of the steady traffic; times are seconds since 1970. A stream that was `cut` had
    begun.
    """

    began: float
    ended: float
    ok: bool
    error: str = ""
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Requests during a change: those that failed before an answer or were cut in it, the longest
    time without an answer to any client, and the longest request, in seconds.
    """

    requests: int
    failed: int
    cut: int
    longest_gap: float
    longest_request: float
    errors: Mapping[str, int]


def count_losses(samples: Sequence[Sample]) -> Losses:
    """Count the losses among some requests."""
    ends = sorted(sample.ended for sample in samples if sample.ok)
    lost = [sample for sample in samples if not sample.ok]
    return Losses(
        requests=len(samples),
        failed=sum(not sample.cut for sample in lost),
        cut=sum(sample.cut for sample in lost),
        longest_gap=round(max((b - a for a, b in pairwise(ends)), default=0.0), 2),
        longest_request=round(max((s.ended - s.began for s in samples), default=0.0), 2),
        errors=Counter(sample.error for sample in lost),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A fault as clients see it: the number of failed requests, the first failure, and the return
    of answers.
    """

    failed: int = 0
    first: float | None = None
    again: float | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """One run. Times are seconds after the fault, None without an event."""

    fault: str
    verb: str
    seed: int
    engine: str
    host: str
    moment: float
    at: str = ""
    said: str = ""
    code: int | None = None
    detected: float | None = None
    red: float | None = None  # seconds until the record had a verdict of BAD
    ready: float | None = None
    alone: bool | None = None  # a server came back by itself
    requests: int = 0
    failed: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    hung: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    hurt: list[str] = field(default_factory=list)  # healthy servers that were stopped
    broken: list[str] = field(default_factory=list)  # failures afterwards
    notes: list[str] = field(default_factory=list)
    void: str = ""  # reason for an invalid run

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The key of the results."""
        return (self.fault, self.verb, self.seed, self.engine)

    @property
    def defects(self) -> list[str]:
        """The defects of the run; empty for a good one."""
        counted = ((self.lost, "rows lost"), (self.doubled, "rows doubled"))
        return [
            *(f"hung: {item}" for item in self.hung),
            *(f"crashed: {item}" for item in self.crashed),
            *(f"green while dead: {item}" for item in self.lies),
            *(f"{count} {title}" for count, title in counted if count),
            *(f"left over: {item}" for item in self.leftovers),
            *(f"a healthy server was ended: {item}" for item in self.hurt),
            *(f"afterwards: {item}" for item in self.broken),
        ]

    @property
    def ok(self) -> bool:
        """True when nothing hung, crashed, reported a false state, was lost, doubled, left over or
        stopped without need, and everything worked again.
        """
        return not self.void and not self.defects

    def as_json(self) -> dict[str, Any]:
        """Return the line of the results file as an object."""
        return {**asdict(self), "ok": self.ok}


def parse_run(document: Mapping[str, Any]) -> Run:
    """Parse an object of `as_json`."""
    names = {entry.name for entry in fields(Run)}
    return Run(**{name: value for name, value in document.items() if name in names})


def find_outage(samples: Sequence[Sample], fault: float) -> Outage:
    """Return the outage that clients saw since a fault.

    Counts requests that were in flight at the fault, but none that ended before.
    """
    finished = sorted(
        (sample for sample in samples if sample.ended >= fault), key=lambda sample: sample.ended
    )
    failures = [sample for sample in finished if not sample.ok]
    if not failures:
        return Outage()
    last = max(sample.ended for sample in failures)
    again = next(
        (
            sample.ended
            for sample in finished
            if sample.ok and sample.ended > last and sample.began >= fault
        ),
        None,
    )
    return Outage(failed=len(failures), first=failures[0].ended, again=again)


def is_settled(
    samples: Sequence[Sample], fault: float, now: float, *, quiet: float, calm: float
) -> bool:
    """Return whether observation may end: answers came for `calm` seconds after failures, or no
    request failed for `quiet`.
    """
    current = find_outage(samples, fault)
    if current.first is None:
        return now - fault >= quiet
    return current.again is not None and now - current.again >= calm and now - fault >= calm


def green_while_dead(
    states: Sequence[tuple[float, str]],
    samples: Sequence[Sample],
    fault: float,
    limit: float = GREEN,
) -> list[str]:
    """Report how long the record called the server healthy while no request was answered, if that
    exceeds the limit.

    `states` are the verdicts of the record, with their times. The longest stretch counts; one of
    them lies between the return of a server and its first answer to a client.
    """
    answered = [sample.ended for sample in samples if sample.ok and sample.ended > fault]
    failed = [sample.ended for sample in samples if not sample.ok and sample.ended > fault]
    if not failed:
        return []
    dark = (fault, min((when for when in answered if when > min(failed)), default=max(failed)))
    longest, since = 0.0, dark[0]
    for when, state in states:
        if dark[0] <= when <= dark[1]:
            since = since if state in HEALTHY_VERDICTS else when
            longest = max(longest, when - since)
    return (
        [f"the record called the server healthy for {longest:.0f} s while nothing was answered"]
        if longest > limit
        else []
    )


def seconds_to_red(states: Sequence[tuple[float, str]], fault: float) -> float | None:
    """Return the seconds from the fault to the first verdict that makes `status` red, if any."""
    first = next((at for at, state in states if at >= fault and state in RED_VERDICTS), None)
    return None if first is None else round(first - fault, 1)


def find_false_status(
    status: Mapping[str, Any], began: float, ended: float, samples: Sequence[Sample]
) -> list[str]:
    """Compare the server's state in `vlaunch status` with the answers that clients got at the same
    time.
    """
    state = (status.get("server") or {}).get("state")
    within = [sample for sample in samples if sample.ended >= began and sample.began <= ended]
    if state == "answering" and within and not any(sample.ok for sample in within):
        return [f"`status` said answering while all of {len(within)} requests failed"]
    return []


def find_restart(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Compare the supervisor's records before and after a harmless fault: the engine must be the
    same.
    """
    if after.get("generation") == before.get("generation") and after.get(
        "fault_count"
    ) == before.get("fault_count"):
        return []
    reason = (after.get("faults") or [{}])[-1].get("what") or "no fault written down"
    return [f"generation {before.get('generation')} → {after.get('generation')}: {reason}"]


def count_row_errors(rows: Iterable[int], expected: int) -> tuple[int, int]:
    """Return the number of lost rows and of duplicates."""
    counted = Counter(rows)
    lost = sum(1 for row in range(expected) if row not in counted)
    return lost, sum(count - 1 for count in counted.values() if count > 1)


def find_leftovers(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return the items that are new."""
    return sorted(set(after) - set(before))


def find_traceback(text: str) -> str:
    """Return the last line of an unexpected traceback; empty without one."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    own = "Traceback (most recent call last):" in lines and not any(
        line.startswith("error: ") for line in lines
    )
    return lines[-1] if own else ""


def last_message(text: str) -> str:
    """Return the message that a user sees: the error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
