"""Log lines that have a known cause: what they mean and what to do.

One table for containers, jobs and failed commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.redaction import redact
from launcher.tools import untrusted
from launcher.tools.symptom import Symptom
from launcher.tools.symptom_table import TABLE

_MOST = 2 * 2**20  # characters of a log
_BRIEF = 2000
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Control characters, but not tabs and line breaks; what turns the direction of the text around it
# (Unicode, UAX 9) or is not seen; halves of UTF-16 pairs, which cannot be printed.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)

__all__ = ["TABLE", "Match", "Symptom", "brief", "first", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A symptom that was seen, with its line; `batch` is the fix for a batch job."""

    line: str
    cause: str
    fix: str
    fatal: bool
    batch: str = ""
    id: str = ""


def first(text: str) -> Match | None:
    """Return the first entry of the table that matches any line of a log, with that line; causes
    before consequences.
    """
    # Of a log without end the end is looked at, and of endless lines their beginning: a node must
    # not keep us busy for hours.
    lines = [
        line
        for each in untrusted.cut(text[-_MOST:], last=True).splitlines()
        if (line := plain(each))
    ]
    text = "\n".join(lines)
    for symptom in TABLE:
        if symptom.rdma:
            continue  # Nothing is known here of what the inventory promises.
        if not re.search(symptom.pattern, text, re.MULTILINE):
            continue  # Quicker than line by line, which only the few have to be that may match.
        for line in lines:
            if re.search(symptom.pattern, line):
                return Match(
                    line=line.strip()[:400],
                    cause=symptom.cause,
                    fix=symptom.fix,
                    fatal=symptom.fatal,
                    batch=symptom.batch or symptom.fix,
                    id=symptom.id,
                )
    return None


def plain(line: str) -> str:
    """Return a log line without terminal codes, which are not to draw on anybody's terminal, and
    without known secrets.
    """
    return redact(_UNPRINTABLE.sub("", _CODES.sub("", line)))


def brief(text: str) -> str:
    """Return text as one line of bounded length, and plain: what a node says must not pass for
    another line of ours.
    """
    line = " ".join(plain(text[: 4 * _BRIEF]).splitlines())
    return line if len(line) <= _BRIEF else line[:_BRIEF] + "…"
