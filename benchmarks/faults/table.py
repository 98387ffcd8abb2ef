"""The campaign's table for people: one line per fault and command, from the lines of the results;
pure.
"""

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
_SAID = 110


def report(runs: Sequence[Run]) -> str:
    """Return the part of the page that is made from the results."""
    parts = []
    for verb in VERBS:
        for engine in (STAND_IN, REAL):
            found = [run for run in runs if (run.verb, run.engine) == (verb, engine)]
            if found:
                parts.append(f"### `{verb}`{_with(verb, engine)}\n\n{table(found, verb)}")
    wrong = [
        f"- `{run.verb}`, {run.fault}, seed {run.seed}, {run.host}: {'; '.join(run.why)}"
        for run in runs
        if run.why
    ]
    parts.append("### Runs that are not good\n\n" + ("\n".join(map(_plain, wrong)) or "None."))
    parts.append("### Not run\n\n" + ("\n".join(missing(runs)) or "Nothing is missing."))
    return "\n\n".join(parts)


def _with(verb: str, engine: str) -> str:
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
        found = [run for run in runs if run.fault == fault.id and not run.void]
        if found:
            lines.append("| " + " | ".join(_row(fault.what, found, verb)) + " |")
    return "\n".join(lines)


def _row(what: str, runs: Sequence[Run], verb: str) -> list[str]:
    said = next((run.said for run in runs if run.said), "")
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
        _times([run.detected for run in runs]),
        _times([run.red for run in runs]),
        _times([run.ready for run in runs]) + after_up,
    )
    return [
        what,
        str(len(runs)),
        good,
        _plain(said[:_SAID]),
        ", ".join(codes) or "–",
        *times,
        requests,
        rows,
    ]


def _times(found: Sequence[float | None]) -> str:
    """Return the median, and the range when there are several."""
    seconds = [each for each in found if each is not None]
    if not seconds:
        return "–"
    middle = f"{statistics.median(seconds):.1f} s"
    return middle if len(seconds) == 1 else f"{middle} ({min(seconds):.0f}–{max(seconds):.0f})"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def missing(runs: Sequence[Run]) -> list[str]:
    """Say which runs the campaign lacks."""
    done = {run.key for run in runs if not run.void}
    lines = []
    for verb in VERBS:
        for engine in (STAND_IN, REAL):
            seeds = SEEDS[verb] if engine == STAND_IN else 1
            wanted = [
                (fault.id, seed)
                for fault in FAULTS
                if applies(fault, verb, engine)
                for seed in range(1, seeds + 1)
            ]
            lack = [
                (fault, seed) for fault, seed in wanted if (fault, verb, seed, engine) not in done
            ]
            if lack:
                names = ", ".join(dict.fromkeys(fault for fault, _ in lack))
                lines.append(
                    f"- `{verb}`{_with(verb, engine)}: {len(lack)} of {len(wanted)} runs ({names})"
                )
    voids = [
        f"- `{run.verb}`, {run.fault}, seed {run.seed}: {run.void}" for run in runs if run.void
    ]
    return [*lines, *map(_plain, voids)]


def written(page: str, text: str) -> str:
    """Return a page with the text between its marks; raises ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no `{BEGIN}` … `{END}`")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
