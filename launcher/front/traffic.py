"""Requests by user and server, from a front's access log."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.core import untrusted

MAX_LINES = 20_000  # of each front's log
_CUT = ("S", "s", "K")  # HAProxy's first letter for a server that ended or was silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of a user to a server: `errors` are 5xx and cut answers, `rejected` 4xx.

    Seconds are those of answered requests, until their first byte and their end; None without one.
    """

    user: str
    server: str
    requests: int
    errors: int
    rejected: int
    first_byte_p50: float | None = None
    first_byte_p99: float | None = None
    total_p50: float | None = None
    total_p99: float | None = None


def parse_traffic(logs: Iterable[str]) -> tuple[Traffic, ...]:
    """Return the traffic in the logs of all fronts; other lines than requests are ignored."""
    requests: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in (entry for log in logs for entry in _parse_log(log)):
        requests[str(entry["user"]), str(entry["server"])].append(entry)
    return tuple(
        _summarize(user, server, entries) for (user, server), entries in sorted(requests.items())
    )


def _parse_log(log: str) -> Iterator[Mapping[str, Any]]:
    for line in log.splitlines():
        try:
            entry = untrusted.loads(line) if line.startswith("{") else None
        except ValueError:
            continue  # cut, because its path is long
        if isinstance(entry, dict) and {"user", "server", "end"} <= entry.keys():
            numbers = (entry.get(key) for key in ("status", "first_byte_ms", "total_ms"))
            if all(isinstance(number, int) for number in numbers):
                yield entry


def _summarize(user: str, server: str, entries: list[Mapping[str, Any]]) -> Traffic:
    failed = [entry["status"] >= 500 or str(entry["end"]).startswith(_CUT) for entry in entries]
    answered = [
        entry
        for entry, error in zip(entries, failed, strict=True)
        if not error and 200 <= entry["status"] < 300 and entry["first_byte_ms"] >= 0
    ]
    first, total = ([e[key] for e in answered] for key in ("first_byte_ms", "total_ms"))
    return Traffic(
        user=user,
        server=server,
        requests=len(entries),
        errors=sum(failed),
        rejected=sum(400 <= entry["status"] < 500 for entry in entries),
        first_byte_p50=_percentile(first, 0.5),
        first_byte_p99=_percentile(first, 0.99),
        total_p50=_percentile(total, 0.5),
        total_p99=_percentile(total, 0.99),
    )


def _percentile(milliseconds: list[int], share: float) -> float | None:
    """Return a percentile in seconds."""
    if not milliseconds:
        return None
    return sorted(milliseconds)[min(len(milliseconds) - 1, int(share * len(milliseconds)))] / 1000
