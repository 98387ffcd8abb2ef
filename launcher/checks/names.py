"""How long nodes take to look up each other's names and their own."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checks.shape import (
    UNSURVEYED,
    Check,
    Evidence,
    Finding,
    Host,
    passed,
    skipped,
    warned,
)
from launcher.tools.survey import LOOKUP_DEADLINE, Lookup

_SLOW = 1.0  # seconds; a name in /etc/hosts or of a server near by takes milliseconds
_MANY = 8  # nodes whose lines for /etc/hosts a fix still shows


def _names(evidence: Evidence) -> Sequence[Finding]:
    fix = _fix(evidence)
    return [_of(host, fix) for host in evidence.reached]


def _of(host: Host, fix: str) -> Finding:
    survey = host.survey
    if survey is None:
        return skipped(host, UNSURVEYED)
    if survey.lookups is None:
        return skipped(host, "`getent` is not installed; no name was looked up")
    slow = [each for each in survey.lookups if not each.answered or each.seconds >= _SLOW]
    if not slow:
        return passed(host, "names of nodes and its own are found within a second")
    silent = [each for each in slow if not each.answered]
    took = (
        f"got no answer within {LOOKUP_DEADLINE} s"
        if silent
        else f"took {max(each.seconds for each in slow):.0f} s"
    )
    text = f"looking up {_sought(silent or slow)} {took}"
    return warned(host, text, evidence="\n".join(survey.asks), fix=fix)


def _sought(slow: Sequence[Lookup]) -> str:
    """Return in words what was looked up, the same on all nodes with the same trouble."""
    names = [each.what for each in slow if each.kind == "reverse"]
    addresses = [each.what for each in slow if each.kind == "forward"]
    parts = [
        *([f"the name of {_some(names)}"] if names else []),
        *([f"the address of {_some(addresses)}"] if addresses else []),
        *(["its own name"] if any(each.kind == "own" for each in slow) else []),
    ]
    return " and ".join(parts)


def _some(words: Sequence[str]) -> str:
    words = sorted(set(words))
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


def _fix(evidence: Evidence) -> str:
    known = evidence.facts
    lines = [
        f"'{node.ip} {(known[node.name].hostname if node.name in known else '') or node.name}'"
        for node in evidence.inventory.nodes
    ]
    what = (
        f"`printf '%s\\n' {' '.join(lines)} | sudo tee -a /etc/hosts`"
        if len(lines) <= _MANY
        else "a line `ADDRESS NAME` for each node in /etc/hosts"
    )
    return (
        f"on every node: {what}; or correct the name server in /etc/resolv.conf. Then `vlaunch"
        " down` and `vlaunch up`: containers take both files along as they start"
    )


CHECKS = (
    Check(
        id="names-resolve",
        what="names of nodes are found in time",
        why=(
            "a name server that does not answer holds up each connection of torch's store and each"
            " sudo for 10 s, and Ray's start for half a minute"
        ),
        judge=_names,
        group="network",
    ),
)
