"""Rendering of a diagnosis as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from launcher.app import terminal
from launcher.app.terminal import Line, dump_json, evidence_line, text_line
from launcher.app.terminal import plain_text as _text
from launcher.core.domain import fold
from launcher.core.sizes import format_count
from launcher.diagnose.doctor import (
    KINDS,
    RANK_HANGS,
    Diagnosis,
    DiagnosisFinding,
    EvidenceLine,
    Kind,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_KIND_TEXTS: dict[Kind, tuple[str, str, str]] = {  # label, title, colour
    "now": ("CAUSE", "most likely first", "red"),
    "unknown": ("UNKNOWN", "not a known failure", "red"),
    "perhaps": ("POSSIBLE", "possibly related", "yellow"),
    "after": ("EFFECT", "consequence of another finding", "yellow"),
    "over": (
        "RESOLVED",
        "resolved: from before the last successful start, or long before the last failure",
        "dim",
    ),
}
_MARGIN = 12  # columns before the details of a finding


def print_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print a diagnosis on standard output."""
    if as_json:
        click.echo(dump_json(diagnosis_json(diagnosis)))
        return
    terminal.show(render_diagnosis(diagnosis))


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, object]:
    """Return a diagnosis as JSON data."""
    return {
        "found": diagnosis.has_problem,
        "findings": [
            {
                **asdict(finding),
                "evidence": [
                    {"node": line.node, "what": line.what, "line": line.line, "at": line.at}
                    for line in finding.evidence
                ],
                "docs": finding.docs,
            }
            for finding in diagnosis.findings
        ],
        "looked": {
            "nodes": list(diagnosis.nodes),
            "logs": diagnosis.logs,
            "lines": diagnosis.lines,
            "ready": diagnosis.ready,
        },
        "gaps": [{"node": node, "what": what, "why": why} for node, what, why in diagnosis.gaps],
    }


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """Return the findings by kind, the searched logs, gaps, and next steps."""
    from rich.console import Group

    parts: list[RenderableType] = []
    for kind in KINDS:
        findings = [finding for finding in diagnosis.findings if finding.kind == kind]
        if findings:
            label, title, colour = _KIND_TEXTS[kind]
            if kind == "after" and not any(item.kind == "now" for item in diagnosis.findings):
                title = "consequence of a failure that the logs do not name"
            parts.append(text_line(title, "bold"))
            for finding in findings:
                parts += _render_finding(finding, label, colour)
    if not diagnosis.findings:
        parts.append(_text("no known failure was found", "bold"))
    parts.append(text_line(_format_scope(diagnosis)))
    lead = _text("not checked: ", "yellow")
    parts += [text_line(gap, "yellow", lead=lead) for gap in _format_gaps(diagnosis)]
    parts += [text_line(step, lead="next: ") for step in _next_steps(diagnosis)]
    return Group(*parts)


def _render_finding(finding: DiagnosisFinding, label: str, colour: str) -> list[Line]:
    mark = _text(f"  {label:<8}", colour)
    mark.append_text(_text(f"  {fold(finding.nodes)}: ", "bold"))
    first = text_line(finding.cause, f"{colour} bold", lead=mark)
    docs = [evidence_line(f"see: {finding.docs}", margin=_MARGIN)] if finding.source else []
    texts = [f"{_format_origin(entry)}: {entry.line}" for entry in finding.evidence]
    lines = [evidence_line(text, margin=_MARGIN) for text in texts]
    if finding.kind == "over":
        return [first, *(lines[:1] if finding.id == RANK_HANGS else ()), *docs]
    if finding.count > len(finding.evidence):
        lines.append(evidence_line(f"… {finding.count} lines in all", margin=_MARGIN))
    fix = text_line(finding.fix, "cyan", lead=_text(" " * _MARGIN + "fix: ", "cyan"))
    return [first, *lines, fix, *docs]


def _format_origin(line: EvidenceLine) -> str:
    origin = line.node if line.what == "log" else f"{line.node}, {line.what}"
    if line.at is None or line.what == "login":
        return origin
    when = datetime.fromtimestamp(line.at).astimezone()
    return f"{origin}, {when:%Y-%m-%d %H:%M:%S}"


def _format_scope(diagnosis: Diagnosis) -> str:
    nodes = fold(diagnosis.nodes) if diagnosis.nodes else "no node"
    lines, logs = format_count(diagnosis.lines, "line"), format_count(diagnosis.logs, "log")
    return f"read {lines} of {logs} on {nodes}"


def _format_gaps(diagnosis: Diagnosis) -> list[str]:
    nodes_by_gap: dict[tuple[str, str], list[str]] = {}
    for node, what, why in diagnosis.gaps:
        nodes_by_gap.setdefault((what, why), []).append(node)
    return [f"{fold(nodes)}: {what}: {why}" for (what, why), nodes in nodes_by_gap.items()]


def _next_steps(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.elsewhere:
        more = (
            "pass the complete logs of all nodes; with `NCCL_DEBUG=INFO` they show NCCL's reasons"
        )
        is_named = any(finding.kind == "now" for finding in diagnosis.findings)
        return [] if is_named else [more]
    if diagnosis.has_problem:
        return [
            "`vlaunch check` finds causes that logs do not show; `vlaunch collect` writes a"
            " bundle for a bug report"
        ]
    log_hint = [] if diagnosis.findings else ["read the logs: `vlaunch logs --tail 1000`"]
    return ["`vlaunch check` finds other causes; `vlaunch status` shows what is running", *log_hint]
