"""Report of the batch benchmark, as Markdown, with its goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# shares of the rows per second of `LLM.generate`, of one replica, and rows per second
ANSWERING, WHOLE, TWO, IDLE = 0.95, 0.85, 1.0, 17_000
GROWTH = 1.5  # of the driver's memory, from the fewest rows to the most
NOTHING = 2.0  # seconds
MANY = 20_000  # rows from which the goal for a whole job holds
TOKENS = 16
DIRECT, PROCESSOR, ONE_REPLICA, BEFORE, TWO_NODES = (
    "`LLM.generate`",
    "Ray Data's processor",
    "one replica",
    "one replica, before",
    "two replicas",
)
MOMENTS = {
    "submitted": "Ray has the job",
    "driver": "its driver runs",
    "asked": "the driver asks for replicas",
    "process": "the first replica's process runs",
    "processes": "the last one's",
    "engines": "all engines are loaded",
    "given": "rows are handed to a replica",
    "first": "the first answers are at the driver",
    "last": "the last ones are",
    "done": "every file is committed",
    "end": "the command ends",
}
Key = tuple[str, int]  # a candidate, and its number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One candidate's answers to all rows, in seconds: from the engine's first row to the last
    answer, and of the whole command.

    `moments` count from the call. `stolen` is the share of the CPU time that the hypervisor took.
    """

    answering: float
    whole: float
    tokens: int = 0
    stolen: float = 0.0
    moments: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A job whose class does nothing: the driver's peak memory in MB, rows per second, seconds."""

    memory: float
    rate: float
    whole: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All measurements, by round."""

    runs: dict[Key, list[Run]] = field(default_factory=dict)
    nothing: list[float] = field(default_factory=list)
    idle: dict[int, list[Idle]] = field(default_factory=dict)


class Report:
    """The results as Markdown; `missed` are the goals that were not met."""

    def __init__(self, results: Results) -> None:
        self.results, self.missed = results, list[str]()

    def goal(self, what: str, met: bool) -> str:
        """Return the cell of a goal."""
        if not met:
            self.missed.append(what)
        return f"{what} {'met' if met else 'missed'}"

    def lines(self) -> Iterable[str]:
        """Yield all tables."""
        for key in self.results.runs:
            if key[0] == DIRECT:
                yield from self.engine(key[1])
        yield from self.replicas()
        yield from self.start()
        yield from self.idle()
        if seconds := self.results.nothing:
            goal = self.goal(f"≤ {NOTHING:g} s", statistics.median(seconds) <= NOTHING)
            yield f"\nA run with nothing to do: {format_range(seconds, 1)} s (goal {goal})."

    def engine(self, rows: int) -> Iterable[str]:
        """Yield the table of one number of rows."""
        theirs = self.results.runs[DIRECT, rows]
        yield f"\n{rows:,} rows of {TOKENS} tokens each, {len(theirs)} rounds:\n"
        yield (
            "| | rows/s while answering | against `LLM.generate` | goal | whole, s | against"
            " `LLM.generate` | goal | stolen by the host, % |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        for (name, count), ours in self.results.runs.items():
            if count != rows or name == TWO_NODES:
                continue
            rates = [rows / run.answering for run in ours]
            answering, whole = (
                median_speedup(ours, theirs, field) for field in ("answering", "whole")
            )
            goals = ["", ""]
            if name == ONE_REPLICA:
                goals[0] = self.goal(f"≥ {ANSWERING}×", answering >= ANSWERING)
            if name == ONE_REPLICA and rows >= MANY:
                goals[1] = self.goal(f"≥ {WHOLE}×", whole >= WHOLE)
            seconds = format_range([run.whole for run in ours], 1)
            stolen = format_range([100 * run.stolen for run in ours], 0)
            yield (
                f"| {name} | {format_range(rates, 0)} | {answering:.2f}× | {goals[0]} | {seconds} |"
                f" {whole:.2f}× | {goals[1]} | {stolen} |"
            )

    def replicas(self) -> Iterable[str]:
        """Yield the comparison of two replicas with one."""
        for (name, rows), two in self.results.runs.items():
            if name != TWO_NODES:
                continue
            answering, whole = (
                median_speedup(two, self.results.runs[ONE_REPLICA, rows], field)
                for field in ("answering", "whole")
            )
            goal = self.goal(f"≥ {TWO:g}×", answering >= TWO)
            rates = format_range([rows / run.answering for run in two], 0)
            yield (
                f"\nTwo replicas on two nodes, {rows:,} rows: {rates} rows/s while answering,"
                f" {answering:.2f}× one replica (goal {goal}); whole"
                f" {format_range([run.whole for run in two], 1)} s, {whole:.2f}×."
            )

    def start(self) -> Iterable[str]:
        """Yield the timeline of a job, from the command to its end."""
        shown = {key: runs for key, runs in self.results.runs.items() if runs[0].moments}
        if not shown:
            return
        yield "\nSeconds since the command was called:\n"
        yield "| | " + " | ".join(f"{name}, {rows:,} rows" for name, rows in shown) + " |"
        yield "|---|" + "---|" * len(shown)
        for moment, what in MOMENTS.items():
            cells = (
                format_range([run.moments[moment] for run in runs], 1) for runs in shown.values()
            )
            yield f"| {what} | " + " | ".join(cells) + " |"

    def idle(self) -> Iterable[str]:
        """Yield the table of the class that does nothing."""
        if not self.results.idle:
            return
        yield "\n| a class that does nothing | most memory of the driver, MB | rows/s | whole, s |"
        yield "|---|---|---|---|"
        for rows, runs in self.results.idle.items():
            cells = [
                format_range([run.memory for run in runs], 0),
                format_range([run.rate for run in runs], 0),
                format_range([run.whole for run in runs], 1),
            ]
            yield f"| {rows:,} rows | " + " | ".join(cells) + " |"
        least, most = min(self.results.idle), max(self.results.idle)
        few, many = (self.results.idle[rows] for rows in (least, most))
        growth = statistics.median(run.memory for run in many) / statistics.median(
            run.memory for run in few
        )
        rate = statistics.median(run.rate for run in many)
        yield (
            f"\n{most:,} rows take {growth:.2f}× the memory of {least:,} (goal"
            f" {self.goal(f'≤ {GROWTH}×', growth <= GROWTH)}), and {rate:,.0f} rows/s pass (goal"
            f" {self.goal(f'≥ {IDLE:,}', rate >= IDLE)})."
        )


def median_speedup(ours: Sequence[Run], theirs: Sequence[Run], field: str) -> float:
    """Return the median speedup over the rounds."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(getattr(them, field) / getattr(us, field) for us, them in pairs)


def format_range(values: Sequence[float], digits: int) -> str:
    """Return the median, with the lowest and the highest value."""
    least, middle, most = min(values), statistics.median(values), max(values)
    text = f"{middle:,.{digits}f}"
    return f"{text} ({least:,.{digits}f}–{most:,.{digits}f})" if len(values) > 1 else text
