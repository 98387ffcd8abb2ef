"""Log lines that have a known cause: what they mean and what to do.

One table for containers, jobs and failed commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.core import untrusted
from launcher.core.errors import NodeError
from launcher.tools.symptom import Symptom
from launcher.tools.symptom_table import TABLE

__all__ = ["TABLE", "Match", "Symptom", "docker_error", "first"]


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
        for raw in untrusted.cut(text, last=True).splitlines()
        if (line := untrusted.plain(raw))
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


def docker_error(node: str, text: str) -> NodeError | None:
    """Return the error of a node whose Docker client failed for a known reason."""
    known = first(text)
    if known is None or not known.id.startswith("docker-"):
        return None
    return NodeError(node, known.cause, evidence=text, hint=known.fix)
