"""Logs that somebody else gathered: whose line is whose, by the prefix that a tool put before it.

Pure. Known are `kubectl logs --prefix` (`[pod/NAME/CONTAINER] …`), journalctl's short forms (`…
HOST UNIT[PID]: …`), and lines without a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.core import untrusted
from launcher.tools.diagnosis_read import Log, Told, log_of

_KUBECTL = re.compile(r"\[pod/([a-z0-9.-]{1,253})/([a-z0-9-]{1,63})\] ?(.*)")
# Nov 22 10:00:00 host unit[12]: text; or the first column is 2026-11-22T10:00:00+00:00.
_JOURNAL = re.compile(
    r"((?:[A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:Z|[+-]\d\d:?\d\d)))"
    r" ([\w.-]{1,253}) ([\w@.\\/:-]{1,128}?)(?:\[\d{1,9}\])?: (.*)"
)
_MOST = 400  # logs


def told(text: str, name: str) -> dict[str, Told]:
    """Return what each pod, host or container told, by its name; `name` is of lines without a
    prefix.
    """
    sorted_out: dict[tuple[str, str], list[str]] = {}
    for node, what, line in _lines(text, name):
        key = (node, what) if (node, what) in sorted_out or len(sorted_out) < _MOST else (name, "")
        sorted_out.setdefault(key, []).append(line)
    found: dict[str, list[Log]] = {}
    for number, ((node, what), lines) in enumerate(sorted_out.items()):
        # An engine's log, for all that is known: what it says after it was ready counts.
        log = log_of(f"engine-{number}", what or "log", "\n".join(lines))
        if log.lines:
            found.setdefault(node, []).append(log)
    return {node: Told(logs=tuple(logs)) for node, logs in found.items()}


def _lines(text: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield whose each line is, of which log, and what it says."""
    for line in untrusted.plain(text.replace("\r", "\n")).splitlines():
        if match := _KUBECTL.match(line):
            yield match[1], match[2], match[3]
        elif match := _JOURNAL.match(line):
            yield match[2], match[3], f"{match[1]} {match[4]}"
        else:
            yield name, "", line
