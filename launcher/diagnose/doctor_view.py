"""A diagnosis for people and machines: what stands in the way first, then what may, what follows,
and what is over.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from launcher.app import terminal
from launcher.app.terminal import Line, dump_json, line, log
from launcher.app.terminal import plain as _text
from launcher.core.domain import fold
from launcher.diagnose.doctor import KINDS, RANK_HANGS, Diagnosed, Diagnosis, Kind, Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

_TITLES: dict[Kind, tuple[str, str]] = {
    "now": ("most likely first", "red"),
    "perhaps": ("may have to do with it", "yellow"),
    "after": ("follows from something else", "yellow"),
    "over": (
        "is over: from before the server was last ready, or long before the last failure",
        "dim",
    ),
}
_WORDS: dict[Kind, str] = {"now": "FOUND", "perhaps": "MAYBE", "after": "THEN", "over": "OVER"}
_MARGIN = 9  # spaces before what belongs to a finding


def show(found: Diagnosis, *, as_json: bool) -> None:
    """Print a diagnosis on standard output."""
    if as_json:
        click.echo(dump_json(plain(found)))
        return
    terminal.show(render(found))


def plain(found: Diagnosis) -> dict[str, object]:
    """Return a diagnosis ready for JSON."""
    return {
        "found": found.found,
        "findings": [{**asdict(each), "docs": each.docs} for each in found.findings],
        "looked": {
            "nodes": list(found.nodes),
            "logs": found.logs,
            "lines": found.lines,
            "ready": found.ready,
        },
        "gaps": [{"node": node, "what": what, "why": why} for node, what, why in found.gaps],
    }


def render(found: Diagnosis) -> RenderableType:
    """Return the findings in their order, what was looked at, and what to do next."""
    from rich.console import Group

    parts: list[RenderableType] = []
    for kind in KINDS:
        of_kind = [each for each in found.findings if each.kind == kind]
        if of_kind:
            title, colour = _TITLES[kind]
            parts.append(line(title, "bold"))
            for each in of_kind:
                parts += _finding(each, colour)
    if not found.findings:
        parts.append(_text("no known failure was found", "bold"))
    parts.append(line(_looked(found)))
    parts += [line(each, "yellow", lead=_text("not seen: ", "yellow")) for each in _gaps(found)]
    parts += [line(each, lead="next: ") for each in _next(found)]
    return Group(*parts)


def _finding(each: Diagnosed, colour: str) -> list[Line]:
    mark = _text(f"  {_WORDS[each.kind]:<5}", colour)
    mark.append_text(_text(f"  {fold(each.nodes)}: ", "bold"))
    first = line(each.cause, f"{colour} bold", lead=mark)
    docs = log(f"see: {each.docs}", margin=_MARGIN)
    lines = [log(f"{_where(trace)}: {trace.line}", margin=_MARGIN) for trace in each.evidence]
    if each.kind == "over":
        return [first, *(lines[:1] if each.id == RANK_HANGS else ()), docs]
    if each.count > len(each.evidence):
        lines.append(log(f"… {each.count} lines in all", margin=_MARGIN))
    fix = line(each.fix, "cyan", lead=_text(" " * _MARGIN + "fix: ", "cyan"))
    return [first, *lines, fix, docs]


def _where(trace: Trace) -> str:
    if trace.at is None or trace.what == "login":
        return f"{trace.node}, {trace.what}"
    when = datetime.fromtimestamp(trace.at).astimezone()
    return f"{trace.node}, {trace.what}, {when:%Y-%m-%d %H:%M:%S}"


def _looked(found: Diagnosis) -> str:
    nodes = fold(found.nodes) if found.nodes else "no node"
    logs = "1 log" if found.logs == 1 else f"{found.logs} logs"
    return f"looked at {found.lines:,} lines of {logs} on {nodes}"


def _gaps(found: Diagnosis) -> list[str]:
    same: dict[tuple[str, str], list[str]] = {}
    for node, what, why in found.gaps:
        same.setdefault((what, why), []).append(node)
    return [f"{fold(nodes)}: {what}: {why}" for (what, why), nodes in same.items()]


def _next(found: Diagnosis) -> list[str]:
    if found.found:
        return [
            "`vlaunch check` for what logs cannot show; `vlaunch collect` makes a bundle for a bug"
            " report"
        ]
    more = [] if found.findings else ["read the logs yourself: `vlaunch logs --tail 1000`"]
    return ["`vlaunch check` for what logs cannot show, `vlaunch status` for what runs", *more]
