"""The verdict of a soak, from its load and from what the keeper and the nodes said before and
after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.payload.agent.health import quiet_after
from launcher.payload.agent.observed import Observed
from launcher.soak.load import Load, Times
from launcher.soak.retransmits import Retransmits
from launcher.state.progress_text import duration, rate

_WIDTH = 200  # characters of a fault
_WELL = ("answering", "busy", "resting")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a load that has ended, and was to take `asked` seconds.

    `before` and `after` are the keeper's records, None where there is no server any more.
    """

    load: Load
    asked: float
    route: str
    before: Observed
    after: Observed | None
    again: Retransmits

    @property
    def interrupted(self) -> bool:
        """True when it ended before its time."""
        return self.load.seconds < self.asked - 1

    @property
    def allowed(self) -> float:
        """How many seconds a request may wait for a token: until the keeper would call the server
        quiet.
        """
        return quiet_after(self.before.longest_step)

    @property
    def _now(self) -> Observed:
        """The record at the end, if it is of the same server."""
        now, was = self.after, self.before
        return now if now and (now.id, now.asked) == (was.id, was.asked) else was

    @property
    def health(self) -> str:
        """The keeper's verdict on the server at the end."""
        if self.after is None:
            return "gone"
        return self.after.verdict if self._now is self.after else "replaced"

    @property
    def restarts(self) -> int:
        """How often its engine was started meanwhile."""
        return self._now.generation - self.before.generation

    @property
    def faults(self) -> list[str]:
        """What it suffered meanwhile."""
        new = self._now.fault_count - self.before.fault_count
        return [each.summary for each in self._now.faults[-new:]] if new > 0 else []

    @property
    def failures(self) -> list[str]:
        """Why it has failed; empty when it has passed."""
        load, count = self.load, self.load.errors.total()
        found = {
            f"failed requests: {count}": count,
            "no token came": not load.tokens and not self.interrupted,
            f"a request waited {load.wait:.1f} s for a token": load.wait > self.allowed,
            f"restarts: {self.restarts}": self.restarts,
            f"faults: {len(self.faults)}": self.faults,
            f"the server is {self.health}": self.health not in _WELL,
        }
        return [text for text, failed in found.items() if failed]

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON; times are seconds."""
        load = self.load
        return {
            "server": self.before.name,
            "model": load.model,
            "route": self.route,
            "streams": len(load.streams),
            "asked": self.asked,
            "seconds": load.seconds,
            "requests": load.done,
            "open": load.open,
            "errors": dict(load.errors),
            "tokens": load.tokens,
            "first_token": _percentiles(load.first),
            "between_tokens": _percentiles(load.between),
            "longest_gap": {"seconds": load.wait, "until": load.waited_until},
            "allowed_gap": self.allowed,
            "restarts": self.restarts,
            "faults": self.faults,
            "health": self.health,
            "retransmits": {
                node: {"again": again, "sent": sent}
                for node, (again, sent) in self.again.nodes.items()
            },
            "pairs": [
                {"from": source, "to": target, "again": again}
                for (source, target), again in self.again.pairs.items()
            ],
            "interrupted": self.interrupted,
            "failures": self.failures,
            "passed": not self.failures,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield what people read: names and values."""
        load = self.load
        failed = load.errors.total()
        yield "requests", f"{load.done:,} done, {load.open} open at the end, {failed} failed"
        for kind, count in load.errors.items():
            yield "", f"{count} x {kind}"
        speed = f" ({rate(load.tokens / load.seconds)} per second)" if load.seconds else ""
        yield "tokens", f"{load.tokens:,}{speed}"
        yield "first token", _latency(load.first)
        yield "next token", _latency(load.between)
        at = f"until {duration(load.waited_until)} after the start"
        yield "longest gap", f"{_time(load.wait)}, {at} (allowed: {self.allowed:.0f} s)"
        yield "server", f"{self.health}, restarts: {self.restarts}, faults: {len(self.faults)}"
        for fault in self.faults:
            yield "", fault[:_WIDTH]
        for node, (again, sent) in self.again.nodes.items():
            share = f" ({again / sent:.3%})" if sent else ""
            yield "retransmits", f"{node}: {again:,} of {sent:,} segments{share}"
        for (source, target), again in self.again.pairs.items():
            yield "", f"{source} to {target}: {again:,} segments"
        word = "failed" if self.failures else "interrupted" if self.interrupted else "passed"
        yield "verdict", ": ".join([word, *filter(None, ["; ".join(self.failures)])])


def _percentiles(times: Times) -> dict[str, float | None]:
    p50, p99 = times.percentile(0.5), times.percentile(0.99)
    return {"p50": p50, "p99": p99, "longest": times.longest}


def _latency(times: Times) -> str:
    p50, p99 = times.percentile(0.5), times.percentile(0.99)
    if p50 is None or p99 is None:
        return "none"
    return f"p50 {_time(p50)}, p99 {_time(p99)}, longest {_time(times.longest)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
