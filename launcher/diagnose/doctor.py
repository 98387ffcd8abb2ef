"""What went wrong, from what nodes told: the known failures that logs show, the most likely first.

It looks at nothing else.
"""

from __future__ import annotations

import contextlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from launcher.agent import observed
from launcher.agent.cause import find
from launcher.agent.observed import Fault, Observed
from launcher.core import untrusted
from launcher.network.nccl_log import VERSION
from launcher.tools import diagnosis, known_hangs, symptoms
from launcher.tools.diagnosis import DRIVER, Log, State, Told, server_log, words
from launcher.tools.symptom import Symptom

# now: it stands in the way; perhaps: it may be harmless; after: it follows from something else;
# over: a server has been ready since, or it happened long before the last failure.
Kind = Literal["now", "perhaps", "after", "over"]
KINDS: tuple[Kind, ...] = ("now", "perhaps", "after", "over")

_INCIDENT = 1800.0  # seconds: what happened longer before the last failure belongs to another one
_SHOWN = 3  # lines of evidence of one finding
_EACH = 200  # lines of one log that count for one finding
_WIDTH = 300  # characters of evidence
# Such as `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build`.
_NVIDIA_DRIVER = re.compile(r"^NVRM version: .* (\d{3}\.[\d.]+) ")
_READY = re.compile(r"Application startup complete")
# What dies after it was told to is no symptom, until the next one starts in the same log.
_TURNS = re.compile(
    r"(\*\*\* SIGTERM received)|Initializing a V1 LLM engine|vlaunch agent: starting the engine"
)
# These say what is the case, whatever happened when: they come before what only logs tell.
_UNREACHABLE = "node-unreachable"
RANK_HANGS = "rank-hangs"
_STATES = (RANK_HANGS, "server-died", "server-gave-up", _UNREACHABLE)
_FIRST = ("request-refused", *_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A line, where it stands, and when it was written (seconds since 1970, by that node's
    clock).
    """

    node: str
    what: str
    line: str
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """One known failure that was seen: on which nodes, how often, and its first lines, one a node
    where there are several.
    """

    id: str
    kind: Kind
    cause: str
    fix: str
    source: str
    nodes: tuple[str, ...]
    count: int
    evidence: tuple[Trace, ...]

    @property
    def docs(self) -> str:
        """Where the documentation tells more."""
        return f"docs/reference/failures.md#{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found, the most likely first, and what was looked at; `gaps` are (node, what
    could not be seen, why).

    `ready` is when a server was last ready.
    """

    findings: tuple[Diagnosed, ...]
    nodes: tuple[str, ...]
    logs: int
    lines: int
    gaps: tuple[tuple[str, str, str], ...] = ()
    ready: float | None = None

    @property
    def found(self) -> bool:
        """True when something stands in the way, or has failed for a reason that is not known."""
        return any(each.kind in ("now", "after") for each in self.findings)


def diagnose(
    reports: Mapping[str, Told],
    missing: Mapping[str, str],
    *,
    rdma: bool,
    now: float,
    since: float | None = None,
    refused: Log | None = None,
) -> Diagnosis:
    """Judge what nodes told.

    Args:
        reports: by node, in the order in which they are shown.
        missing: nodes that could not be asked, with the reason.
        rdma: whether the inventory promises RDMA between the nodes.
        now: seconds since 1970.
        since: how many seconds back lines count; a line without a time always does.
        refused: the last request that was refused, as the operator's machine keeps it.
    """
    oldest = -math.inf if since is None else now - since
    traces: dict[str, list[Trace]] = {}
    for name, log in _logs(reports, refused, traces, now):
        known = list(_known_lines(log, rdma=rdma))
        times = diagnosis.line_times(log, now) if known else []
        for symptom, number in known:
            at = times[number]
            if at is None or at >= oldest:
                line = log.lines[number].strip()[:_WIDTH]
                trace = Trace(node=name, what=log.what, line=line, at=at)
                traces.setdefault(symptom.id, []).append(trace)
    for name, reason in missing.items():
        line = f"node cannot be reached: {reason}"[:_WIDTH]
        trace = Trace(node=name, what="login", line=line, at=now)
        traces.setdefault(_UNREACHABLE, []).append(trace)
    ready = _ready(reports, now)
    return Diagnosis(
        findings=tuple(_ranked(traces, ready)),
        nodes=tuple(reports),
        logs=sum(len(node.logs) for node in reports.values()),
        lines=sum(node.lines for node in reports.values()),
        gaps=tuple(
            (name, what, why) for name, node in reports.items() for what, why in node.gaps.items()
        ),
        ready=_latest(ready.values()),
    )


def _logs(
    reports: Mapping[str, Told], refused: Log | None, traces: Mapping[str, object], now: float
) -> Iterator[tuple[str, Log]]:
    """Yield the logs with their nodes; where the `traces` of those so far show that a rank hangs,
    also the versions that are known to hang.
    """
    for name, node in reports.items():
        for log in (*node.logs, *_state_logs(node), *_record_logs(node)):
            yield name, log
    if RANK_HANGS in traces:
        for name, node in reports.items():
            yield name, _known_hangs(node, now)
    if refused is not None:
        yield "operator", refused


def _known_lines(log: Log, *, rdma: bool) -> Iterator[tuple[Symptom, int]]:
    """Yield every line of a log that is in the table, by its number, for the first entry only:
    causes stand before what they bring about.
    """
    text = "\n".join(log.lines)
    starts = [0, *accumulate(len(line) + 1 for line in log.lines)]
    told_to_end = _told_to_end(text, starts)
    taken = set[int]()
    for symptom in symptoms.TABLE:
        if symptom.rdma and not rdma:
            continue
        for number in _lines(symptom, text, starts):
            if number in taken or (symptom.after and any(number in each for each in told_to_end)):
                continue
            taken.add(number)
            yield symptom, number


def _told_to_end(text: str, starts: Sequence[int]) -> list[range]:
    """Return the lines between the word to end and the next start."""
    found, since = list[range](), -1
    for match in _TURNS.finditer(text):
        number = bisect_right(starts, match.start()) - 1
        if match[1]:
            since = number if since < 0 else since
        elif since >= 0:
            found.append(range(since, number))
            since = -1
    return found if since < 0 else [*found, range(since, len(starts))]


def _lines(symptom: Symptom, text: str, starts: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of the lines that match, each once; the text is searched as a whole, which
    makes it quick.
    """
    place, pattern = 0, re.compile(symptom.pattern, re.MULTILINE)
    for _ in range(_EACH):
        match = pattern.search(text, place)
        if match is None:
            return
        number = bisect_right(starts, match.start()) - 1
        yield number
        place = starts[number + 1]


def _state_logs(node: Told) -> Iterator[Log]:
    """Yield in lines what Docker knows of containers, so that the same table judges them."""
    if refused := node.gaps.get("containers"):
        yield Log(part="ids", what="Docker", lines=(refused,))
    for state in node.states:
        ended = state.status in ("exited", "dead", "restarting")
        stamp = state.finished if ended else state.started
        yield _log("state", "Docker", _state_lines(state), stamp)


def _state_lines(state: State) -> list[str]:
    lines = [f"{state.name}: {state.error}"] if state.error else []
    if state.oom:
        lines.append(f"container {state.name} was killed for lack of memory (OOMKilled)")
    if state.status == "restarting":
        lines.append(
            f"container {state.name} keeps ending: {state.restarts} restarts, the last exit code"
            f" {state.exit_code}"
        )
    elif state.status in ("exited", "dead") and state.role != "probe":
        killed = state.exit_code == 137 and not state.oom
        how = " (it was killed: by hand, or for lack of memory)" if killed else ""
        lines.append(f"container {state.name} ended with exit code {state.exit_code}{how}")
    return lines


def _record_logs(node: Told) -> Iterator[Log]:
    """Yield in lines what the keeper wrote down of servers: their faults, with the lines it kept of
    each, which rank hangs, else what all ranks do, and that it gave up.
    """
    for name, record in _records(node).items():
        lines = [(_fault_lines(name, fault), fault.at) for fault in record.faults]
        wedge, reason = record.wedge, record.reason
        if record.verdict == "suspect":
            if wedge is not None and not wedge.rank:
                reason = "; ".join((reason, *wedge.observations))
            lines.append(([f"keeper: server {name} hangs: {words(reason)}"], record.written))
        elif record.verdict == "quiet":
            lines.append(([f"keeper: server {name} is quiet: {words(reason)}"], record.written))
        if record.state == "gave-up":
            why = words(record.doing) or "no restarts are left"
            lines.append(([f"keeper: gave up server {name}: {why}"], record.since))
        for texts, at in lines:
            yield _log("record", server_log(name), texts, diagnosis.format_time(at))


def _known_hangs(node: Told, now: float) -> Log:
    """Return a log with the NCCL and driver versions in a node's logs that are known to hang."""
    lines = [line for log in node.logs for line in log.lines]
    nccl = [match[1] for line in lines if (match := VERSION.search(line))]
    drivers = [match[1] for line in lines if (match := _NVIDIA_DRIVER.search(line))]
    gpus = [line for line in lines if line.startswith("Model:")]
    ib = any("NET/IB : Using" in line or "NET/IB: Using" in line for line in lines)
    hangs = known_hangs.describe_hangs(nccl, drivers, gpus, ib=ib)
    return _log("versions", "versions", tuple(hangs), diagnosis.format_time(now))


def _records(node: Told) -> dict[str, Observed]:
    """Return what the keeper wrote down of each server, where that can be read."""
    records = {}
    for name, files in node.kept.items():
        with contextlib.suppress(ValueError):
            records[name] = observed.read(files.get("observed"))
    return records


def _fault_lines(server: str, fault: Fault) -> list[str]:
    """Say a fault in a line, then the lines that the keeper kept of it."""
    raised = find(fault.evidence.splitlines()) if fault.cause and not fault.rank else None
    rank = f"rank {fault.rank}" if fault.rank else raised.process if raised else ""
    node = fault.node or (raised.address if raised else "")
    where = " on ".join(words(word) for word in (rank, node) if word)
    line = f"keeper: fault of server {server}: {words(fault.what)}"
    if where and where not in line:
        line += f" ({where})"
    # A line is one entry's only: a cause that the table knows is a line of its own.
    cause = words(fault.cause)
    known = [cause] if symptoms.first(cause) is not None else []
    if cause and not known:
        line += f": {cause}"
    if fault.ready_again_after is not None:
        line += f"; ready again after {fault.ready_again_after:.0f} s"
    kept = [untrusted.plain(each)[:1000] for each in fault.evidence.splitlines()[-40:]]
    return [line, *known, *kept]


def _log(part: str, what: str, lines: Sequence[str], stamp: str) -> Log:
    """Return a log whose lines were all written at one time."""
    stamps = dict.fromkeys(range(len(lines)), stamp)
    return Log(part=part, what=what, lines=tuple(lines), stamps=stamps)


def _ready(reports: Mapping[str, Told], now: float) -> dict[str, float | None]:
    """Return when each server was last ready, by its record or its engine's log, whichever is
    later, under its log's name; None for one that never was.

    Earlier lines of a server have been overcome. A line that is no server's own is overcome when
    all that are not stopped have been ready since: that time has the empty name.
    """
    records = {name: record for node in reports.values() for name, record in _records(node).items()}
    ready = {
        server_log(name): record.ready_at if record.state == "ready" else None
        for name, record in records.items()
    }
    for log in (log for node in reports.values() for log in node.logs):
        if log.part.startswith("engine-"):
            numbers = [number for number, line in enumerate(log.lines) if _READY.search(line)]
            at = diagnosis.line_times(log, now)[numbers[-1]] if numbers else None
            ready[log.what] = _latest((ready.get(log.what), at))
    stopped = {server_log(name) for name, record in records.items() if record.state == "stopped"}
    times = [at for what, at in ready.items() if what not in stopped]
    known = [at for at in times if at is not None]
    return {**ready, "": min(known) if known and len(known) == len(times) else None}


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)


def _ranked(
    traces: Mapping[str, Sequence[Trace]], ready: Mapping[str, float | None]
) -> list[Diagnosed]:
    """Put the most likely first: what stands in the way before what may and what follows, the
    earlier before the later, more nodes before fewer; the table's order decides the rest. What is
    over comes last.
    """
    present_symptoms = [symptom for symptom in symptoms.TABLE if symptom.id in traces]
    failed = [
        trace.at
        for symptom in present_symptoms
        if _kind(symptom) != "perhaps" and symptom.id != _UNREACHABLE
        for trace in traces[symptom.id]
    ]
    start = (_latest(failed) or 0.0) - _INCIDENT
    findings = (_finding(symptom, traces[symptom.id], start, ready) for symptom in present_symptoms)
    return sorted(findings, key=_rank)


def _kind(symptom: Symptom) -> Kind:
    return "after" if symptom.after else "now" if symptom.fatal else "perhaps"


def _finding(
    symptom: Symptom, traces: Sequence[Trace], start: float, ready: Mapping[str, float | None]
) -> Diagnosed:
    """Make one finding of all lines of an entry that count now, and choose those to show; where
    none counts, it is over.
    """

    def over(trace: Trace) -> bool:
        if trace.at is None or symptom.id == _UNREACHABLE:
            return False
        since = ready.get(trace.what, ready[""])
        return trace.at < start or (since is not None and trace.at <= since)

    logs = {trace.what for trace in traces}
    of_job = DRIVER in logs and not any(what.startswith(server_log("")) for what in logs)
    present = [trace for trace in traces if not over(trace)]
    lines = present or traces
    ordered = sorted(lines, key=lambda trace: (trace.at is None, trace.at or 0.0))
    return Diagnosed(
        id=symptom.id,
        kind=_kind(symptom) if present else "over",
        cause=symptom.cause,
        fix=symptom.batch or symptom.fix if of_job else symptom.fix,
        source=symptom.source,
        nodes=tuple(dict.fromkeys(trace.node for trace in lines)),
        count=len(lines),
        evidence=tuple(_shown(ordered, latest=symptom.id in _STATES)),
    )


def _rank(finding: Diagnosed) -> tuple[int, int, float, int]:
    order = (*_FIRST, finding.id).index(finding.id)
    # The first line shown is the earliest, but for what is in `_FIRST`, which ranks by that alone.
    at = finding.evidence[0].at
    earliest = math.inf if at is None else at
    return KINDS.index(finding.kind), order, earliest, -len(finding.nodes)


def _shown(lines: Sequence[Trace], *, latest: bool) -> list[Trace]:
    """Choose the lines to show: the first of each node, then other ones; of what repeats itself as
    a state, the last.
    """
    ordered = list(reversed(lines)) if latest else list(lines)
    firsts = list({trace.node: trace for trace in reversed(ordered)}.values())
    texts = {trace.line for trace in firsts}
    chosen = [trace for trace in ordered if trace in firsts]
    chosen += [trace for trace in ordered if trace.line not in texts]
    return list(dict.fromkeys(chosen))[:_SHOWN]
