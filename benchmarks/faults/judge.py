"""What a run has shown, and whether it is good enough: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Seconds that a dead server may be called healthy: 15 where something died, and one between two
# readings. Where packets vanish, 30 until a canary that waits makes it quiet, 5 until that canary
# begins, and three until its report is in the record and the record is read.
GREEN, GREEN_SILENT = 16.0, 38.0
# Verdicts that make `status` red, and those that are wrong for a dead server.
BAD = ("suspect", "recovering", "failed", "gave-up", "unknown")
HEALTHY = ("answering", "busy", "resting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of the steady stream; times are seconds since 1970."""

    began: float
    ended: float
    ok: bool
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What clients saw of a fault: when the first request failed, how many did, and when answers
    came again for good.
    """

    failed: int = 0
    first: float | None = None
    again: float | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """One run. Times are seconds after the fault, None where there is nothing to time."""

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
    alone: bool | None = None  # a server came back without anybody's help
    requests: int = 0
    failed: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    hung: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    hurt: list[str] = field(default_factory=list)  # healthy servers that were ended
    broken: list[str] = field(default_factory=list)  # what did not work afterwards
    notes: list[str] = field(default_factory=list)
    void: str = ""  # why nothing was tried

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What tells it from every other one."""
        return (self.fault, self.verb, self.seed, self.engine)

    @property
    def why(self) -> list[str]:
        """Everything that is wrong with it; nothing is when it is good."""
        counted = ((self.lost, "rows lost"), (self.doubled, "rows doubled"))
        return [
            *(f"hung: {each}" for each in self.hung),
            *(f"crashed: {each}" for each in self.crashed),
            *(f"green while dead: {each}" for each in self.lies),
            *(f"{count} {what}" for count, what in counted if count),
            *(f"left over: {each}" for each in self.leftovers),
            *(f"a healthy server was ended: {each}" for each in self.hurt),
            *(f"afterwards: {each}" for each in self.broken),
        ]

    @property
    def ok(self) -> bool:
        """True when nothing hung, crashed, lied, was lost, doubled, left over or ended in vain, and
        everything worked again.
        """
        return not self.void and not self.why

    def as_json(self) -> dict[str, Any]:
        """Return what is written down."""
        return {**asdict(self), "ok": self.ok}


def read(document: Mapping[str, Any]) -> Run:
    """Read what `as_json` wrote."""
    names = {each.name for each in fields(Run)}
    return Run(**{name: value for name, value in document.items() if name in names})


def outage(samples: Sequence[Sample], fault: float) -> Outage:
    """Say what clients saw since a fault.

    A request that was under way then counts; one that ended before does not.
    """
    seen = sorted((each for each in samples if each.ended >= fault), key=lambda each: each.ended)
    failures = [each for each in seen if not each.ok]
    if not failures:
        return Outage()
    last = max(each.ended for each in failures)
    again = next(
        (each.ended for each in seen if each.ok and each.ended > last and each.began >= fault), None
    )
    return Outage(failed=len(failures), first=failures[0].ended, again=again)


def settled(
    samples: Sequence[Sample], fault: float, now: float, *, quiet: float, calm: float
) -> bool:
    """Tell whether watching may end: answers have come for `calm` seconds after failures, or none
    failed for `quiet`.
    """
    seen = outage(samples, fault)
    if seen.first is None:
        return now - fault >= quiet
    return seen.again is not None and now - seen.again >= calm and now - fault >= calm


def green_while_dead(
    states: Sequence[tuple[float, str]],
    samples: Sequence[Sample],
    fault: float,
    limit: float = GREEN,
) -> list[str]:
    """Report how long the record called the server healthy while no request was answered, if that
    exceeds the limit.

    `states` are the verdicts read from the record, with their times. The longest stretch counts;
    one of them lies between the return of a server and its first answer to a client.
    """
    answered = [each.ended for each in samples if each.ok and each.ended > fault]
    failed = [each.ended for each in samples if not each.ok and each.ended > fault]
    if not failed:
        return []
    dark = (fault, min((when for when in answered if when > min(failed)), default=max(failed)))
    longest, since = 0.0, dark[0]
    for when, state in states:
        if dark[0] <= when <= dark[1]:
            since = since if state in HEALTHY else when
            longest = max(longest, when - since)
    return (
        [f"the record called the server healthy for {longest:.0f} s while nothing was answered"]
        if longest > limit
        else []
    )


def red(states: Sequence[tuple[float, str]], fault: float) -> float | None:
    """Return the seconds from the fault to the first verdict that makes `status` red, if any."""
    first = next((at for at, state in states if at >= fault and state in BAD), None)
    return None if first is None else round(first - fault, 1)


def lying(
    status: Mapping[str, Any], began: float, ended: float, samples: Sequence[Sample]
) -> list[str]:
    """Compare what `vlaunch status` said of the server with what clients got in the same
    seconds.
    """
    state = (status.get("server") or {}).get("state")
    within = [each for each in samples if each.ended >= began and each.began <= ended]
    if state == "answering" and within and not any(each.ok for each in within):
        return [f"`status` said answering while all of {len(within)} requests failed"]
    return []


def hurt(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Compare what the keeper said of a server before and after a fault that does no harm: its
    engine must be the same one.
    """
    if after.get("generation") == before.get("generation") and after.get(
        "fault_count"
    ) == before.get("fault_count"):
        return []
    why = (after.get("faults") or [{}])[-1].get("what") or "no fault written down"
    return [f"generation {before.get('generation')} → {after.get('generation')}: {why}"]


def rows_amiss(found: Iterable[int], expected: int) -> tuple[int, int]:
    """Return how many rows are lost, and how many are there more than once."""
    counted = Counter(found)
    lost = sum(1 for row in range(expected) if row not in counted)
    return lost, sum(count - 1 for count in counted.values() if count > 1)


def left_over(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return what is there now and was not before."""
    return sorted(set(after) - set(before))


def crash(text: str) -> str:
    """Return the last line of a command that ended with a traceback of its own; nothing when it
    ended as it should.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    own = "Traceback (most recent call last):" in lines and not any(
        line.startswith("error: ") for line in lines
    )
    return lines[-1] if own else ""


def last_words(text: str) -> str:
    """Return what a user keeps of what a command said: its error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
