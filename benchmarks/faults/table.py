"""The campaign's table, one line per fault and command: pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.faults.cases import FAULTS, REAL, SEEDS, SERVES, STAND_IN, VERBS, applies
from benchmarks.faults.judge import Run

BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
_HEAD = (
    "fault",
    "runs",
    "good",
    "seen by the user, last",
    "exit",
    "detected",
    "red",
    "ready again",
    "requests lost",
    "rows amiss",
)
_MESSAGE_WIDTH = 110


def report(runs: Sequence[Run]) -> str:
    """Return the generated part of the page."""
    parts = []
    for verb in VERBS:
        for engine in (STAND_IN, REAL):
            group = [run for run in runs if (run.verb, run.engine) == (verb, engine)]
            if group:
                parts.append(f"### `{verb}`{_engine_suffix(verb, engine)}\n\n{table(group, verb)}")
    wrong = [
        f"- `{run.verb}`, {run.fault}, seed {run.seed}, {run.host}: {'; '.join(run.defects)}"
        for run in runs
        if run.defects
    ]
    parts.append("### Runs that are not good\n\n" + ("\n".join(map(_escape, wrong)) or "None."))
    parts.append("### Not run\n\n" + ("\n".join(list_missing(runs)) or "Nothing is missing."))
    return "\n\n".join(parts)


def _engine_suffix(verb: str, engine: str) -> str:
    if verb == "up":
        return ""
    return {
        STAND_IN: ", a class without a model" if verb == "batch" else ", stand-in engine",
        REAL: ", vLLM",
    }[engine]


def table(runs: Sequence[Run], verb: str) -> str:
    """Return one table: a line per fault."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for fault in FAULTS:
        group = [run for run in runs if run.fault == fault.id and not run.void]
        if group:
            lines.append("| " + " | ".join(_row(fault.what, group, verb)) + " |")
    return "\n".join(lines)


def _row(title: str, runs: Sequence[Run], verb: str) -> list[str]:
    message = next((run.said for run in runs if run.said), "")
    codes = sorted(
        {"killed" if run.code < 0 else str(run.code) for run in runs if run.code is not None}
    )
    requests = (
        f"{sum(run.failed for run in runs)} of {sum(run.requests for run in runs)}"
        if verb in SERVES
        else "–"
    )
    rows = (
        f"{sum(run.lost for run in runs)}, {sum(run.doubled for run in runs)}"
        if verb == "batch"
        else "–"
    )
    after_up = " (after `up`)" if any(run.alone is False for run in runs) else ""
    good = f"{sum(run.ok for run in runs)}"
    times = (
        _format_times([run.detected for run in runs]),
        _format_times([run.red for run in runs]),
        _format_times([run.ready for run in runs]) + after_up,
    )
    return [
        title,
        str(len(runs)),
        good,
        _escape(message[:_MESSAGE_WIDTH]),
        ", ".join(codes) or "–",
        *times,
        requests,
        rows,
    ]


def _format_times(times: Sequence[float | None]) -> str:
    """Return the median, and the range of several."""
    seconds = [value for value in times if value is not None]
    if not seconds:
        return "–"
    middle = f"{statistics.median(seconds):.1f} s"
    return middle if len(seconds) == 1 else f"{middle} ({min(seconds):.0f}–{max(seconds):.0f})"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def list_missing(runs: Sequence[Run]) -> list[str]:
    """Return lines about the campaign's missing runs."""
    done = {run.key for run in runs if not run.void}
    lines = []
    for verb in VERBS:
        for engine in (STAND_IN, REAL):
            seeds = SEEDS[verb] if engine == STAND_IN else 1
            required = [
                (fault.id, seed)
                for fault in FAULTS
                if applies(fault, verb, engine)
                for seed in range(1, seeds + 1)
            ]
            pending = [
                (fault, seed) for fault, seed in required if (fault, verb, seed, engine) not in done
            ]
            if pending:
                names = ", ".join(dict.fromkeys(fault for fault, _ in pending))
                lines.append(
                    f"- `{verb}`{_engine_suffix(verb, engine)}: {len(pending)} of {len(required)}"
                    f" runs ({names})"
                )
    voids = [
        f"- `{run.verb}`, {run.fault}, seed {run.seed}: {run.void}" for run in runs if run.void
    ]
    return [*lines, *map(_escape, voids)]


def replace_part(page: str, text: str) -> str:
    """Return a page with the text between its marks; raises ValueError without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no `{BEGIN}` … `{END}`")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
