"""When a line of a log was written: what Docker, vLLM, Ray, Python and the kernel put into their
lines.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from launcher.tools.diagnosis_read import Log

# `2026-11-21 20:14:02,123`, `2026-11-21T20:14:02.123456Z`, `2026-11-21T20:14:02,123456+00:00`,
# `…+0000`
_FULL = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
# `INFO 11-21 20:14:02 [core.py:12]`, as vLLM writes it: without a year.
_SHORT = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_DAY = 86400.0


def times(log: Log, now: float) -> list[float | None]:
    """Return when each line was written, in seconds since 1970; one that does not say so has the
    time of the line above it.
    """
    found: list[float | None] = []
    last: float | None = None
    for place, line in enumerate(log.lines):
        stamp = log.stamps.get(place)
        said = parse(line, log.zone, now) if stamp is None else parse(stamp, 0.0, now)
        last = last if said is None else said
        found.append(last)
    return found


def parse(text: str, zone: float, now: float) -> float | None:
    """Read the first time in a text; `zone` is how far one without a zone is ahead of UTC, `now`
    says which year it is.
    """
    try:
        if match := _FULL.search(text):
            when = (
                datetime.fromisoformat(f"{match[1]}T{match[2]}")
                .replace(tzinfo=timezone.utc)
                .timestamp()
            )
            when -= _offset(match[3]) if match[3] else zone
            # Docker's word for never is the year 1; nobody writes tomorrow.
            return when if 0 < when <= now + _DAY else None
        if match := _SHORT.search(text):
            year = datetime.fromtimestamp(now, timezone.utc).year
            when = _short(match, year) - zone
            return when if when <= now + _DAY else _short(match, year - 1) - zone
    except (ValueError, OverflowError, OSError):
        return None
    return None


def _short(match: re.Match[str], year: int) -> float:
    month, day, hour, minute, second = (int(each) for each in match.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()


def _offset(text: str) -> float:
    if text == "Z":
        return 0.0
    digits = text[1:].replace(":", "")
    span = timedelta(hours=int(digits[:2]), minutes=int(digits[2:])).total_seconds()
    return span if text[0] == "+" else -span


def write(at: float) -> str:
    """Return a time as a log would have it."""
    try:
        return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
