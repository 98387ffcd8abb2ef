"""Diagnosis of failures from the nodes' reports: known failures in logs, most likely first."""

import contextlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from launcher import upstream
from launcher.agent import observed
from launcher.agent.cause import find_exception
from launcher.agent.observed import Fault, Observed
from launcher.core import untrusted
from launcher.network.nccl_log import VERSION
from launcher.tools import diagnosis, known_hangs, symptoms, vllm
from launcher.tools.diagnosis import (
    DRIVER,
    ContainerState,
    Log,
    NodeReport,
    server_log_title,
    shorten,
)
from launcher.tools.symptom import Symptom

# now: a cause; perhaps: may be harmless; after: an effect of another one; over: a server has been
# ready since, or it happened long before the last failure.
Kind = Literal["now", "perhaps", "after", "over"]
KINDS: tuple[Kind, ...] = ("now", "perhaps", "after", "over")
_Reports = Mapping[str, NodeReport]  # by node
_ReadyTimes = Mapping[str, float | None]  # by a log's title

_INCIDENT = 1800.0  # seconds before the last failure; older lines belong to another failure
_MAX_EVIDENCE = 3  # lines shown per finding
_MAX_MATCHES = 200  # matching lines per log and symptom
_WIDTH = 300  # characters of evidence
# Such as `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build`.
_NVIDIA_DRIVER = re.compile(r"^NVRM version: .* (\d{3}\.[\d.]+) ")
_READY = re.compile(vllm.API_READY)
# An exit after SIGTERM is no symptom, until the next start in the same log.
_STOP_OR_START = re.compile(
    rf"(\*\*\* SIGTERM received)|{upstream.text('vllm.engine-start')}"
    r"|vlaunch agent: starting the engine"
)
# Current states, regardless of time: they rank before failures that only logs show.
_UNREACHABLE = "node-unreachable"
RANK_HANGS = "rank-hangs"
_STATES = (RANK_HANGS, "server-died", "server-gave-up", _UNREACHABLE)
_FIRST = ("request-refused", *_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLine:
    """A line of a log, with its node, the log's title, and its time in seconds since 1970 by that
    node's clock.
    """

    node: str
    what: str
    line: str
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisFinding:
    """A known failure: its nodes, the number of its lines, and the first lines, one per node where
    there are several.
    """

    id: str
    kind: Kind
    cause: str
    fix: str
    source: str
    nodes: tuple[str, ...]
    count: int
    evidence: tuple[EvidenceLine, ...]

    @property
    def docs(self) -> str:
        """The anchor in the documentation."""
        return f"docs/reference/failures.md#{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings, most likely first, and the number of searched logs and lines; `gaps` are triples of
    a node, an unavailable source, and the reason.

    `ready` is when a server was last ready, in seconds since 1970.
    """

    findings: tuple[DiagnosisFinding, ...]
    nodes: tuple[str, ...]
    logs: int
    lines: int
    gaps: tuple[tuple[str, str, str], ...] = ()
    ready: float | None = None

    @property
    def has_problem(self) -> bool:
        """True for a cause, or an effect without a known cause."""
        return any(finding.kind in ("now", "after") for finding in self.findings)


def diagnose(
    reports: _Reports,
    missing: Mapping[str, str],
    *,
    rdma: bool,
    now: float,
    since: float | None = None,
    refused: Log | None = None,
) -> Diagnosis:
    """Diagnose the nodes' reports.

    Args:
        reports: by node, in display order.
        missing: unreachable nodes, with the reason.
        rdma: the inventory promises RDMA between the nodes.
        now: seconds since 1970.
        since: maximum age of lines in seconds; lines without a time always count.
        refused: the last rejected request, as the operator's machine recorded it.
    """
    oldest = -math.inf if since is None else now - since
    evidence: dict[str, list[EvidenceLine]] = {}
    for name, log in _all_logs(reports, refused, evidence, now):
        matches = list(_match_symptoms(log, rdma=rdma))
        times = diagnosis.line_times(log, now) if matches else []
        for symptom, number in matches:
            at = times[number]
            if at is None or at >= oldest:
                line = log.lines[number].strip()[:_WIDTH]
                entry = EvidenceLine(node=name, what=log.title, line=line, at=at)
                evidence.setdefault(symptom.id, []).append(entry)
    for name, reason in missing.items():
        line = f"node cannot be reached: {reason}"[:_WIDTH]
        entry = EvidenceLine(node=name, what="login", line=line, at=now)
        evidence.setdefault(_UNREACHABLE, []).append(entry)
    ready = _ready_times(reports, now)
    return Diagnosis(
        findings=tuple(_rank_findings(evidence, ready)),
        nodes=tuple(reports),
        logs=sum(len(report.logs) for report in reports.values()),
        lines=sum(report.lines for report in reports.values()),
        gaps=tuple((name, *gap) for name, report in reports.items() for gap in report.gaps.items()),
        ready=_latest(ready.values()),
    )


def _all_logs(
    reports: _Reports, refused: Log | None, evidence: Mapping[str, object], now: float
) -> Iterator[tuple[str, Log]]:
    """Yield the logs with their nodes; if the `evidence` so far shows a hanging rank, also versions
    that are known to hang.
    """
    for name, report in reports.items():
        for log in (*report.logs, *_state_logs(report), *_record_logs(report)):
            yield name, log
    if RANK_HANGS in evidence:
        for name, report in reports.items():
            yield name, _hang_log(report, now)
    if refused is not None:
        yield "operator", refused


def _match_symptoms(log: Log, *, rdma: bool) -> Iterator[tuple[Symptom, int]]:
    """Yield the numbers of lines with a symptom, each for the table's first match only: causes come
    before their effects.
    """
    text = "\n".join(log.lines)
    starts = [0, *accumulate(len(line) + 1 for line in log.lines)]
    shutdowns = _shutdown_ranges(text, starts)
    matched = set[int]()
    for symptom in symptoms.TABLE:
        if symptom.rdma and not rdma:
            continue
        for number in _matching_lines(symptom, text, starts):
            if number in matched or (symptom.after and any(number in lines for lines in shutdowns)):
                continue
            matched.add(number)
            yield symptom, number


def _shutdown_ranges(text: str, starts: Sequence[int]) -> list[range]:
    """Return the ranges of lines between a SIGTERM and the next start."""
    ranges, stopped_at = list[range](), -1
    for match in _STOP_OR_START.finditer(text):
        number = bisect_right(starts, match.start()) - 1
        if match[1]:
            stopped_at = number if stopped_at < 0 else stopped_at
        elif stopped_at >= 0:
            ranges.append(range(stopped_at, number))
            stopped_at = -1
    return ranges if stopped_at < 0 else [*ranges, range(stopped_at, len(starts))]


def _matching_lines(symptom: Symptom, text: str, starts: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of matching lines; one search of the whole text is faster than many."""
    offset, pattern = 0, re.compile(symptom.pattern, re.MULTILINE)
    for _ in range(_MAX_MATCHES):
        match = pattern.search(text, offset)
        if match is None:
            return
        number = bisect_right(starts, match.start()) - 1
        yield number
        offset = starts[number + 1]


def _state_logs(report: NodeReport) -> Iterator[Log]:
    """Yield Docker's state of containers as log lines, for matching against the table."""
    if refused := report.gaps.get("containers"):
        yield Log(part="ids", title="Docker", lines=(refused,))
    for state in report.states:
        stopped = state.status in ("exited", "dead", "restarting")
        stamp = state.finished if stopped else state.started
        yield _make_log("state", "Docker", _state_lines(state), stamp)


def _state_lines(state: ContainerState) -> list[str]:
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


def _record_logs(report: NodeReport) -> Iterator[Log]:
    """Yield the supervisor's records of servers as log lines: faults with their evidence, hanging
    ranks, and servers without restarts left.
    """
    for name, record in _server_records(report).items():
        lines = [(_fault_lines(name, fault), fault.at) for fault in record.faults]
        hang, reason = record.wedge, record.reason
        if record.verdict == "suspect":
            if hang is not None and not hang.rank:
                reason = "; ".join((reason, *hang.observations))
            lines.append(([f"keeper: server {name} hangs: {shorten(reason)}"], record.written))
        elif record.verdict == "quiet":
            lines.append(([f"keeper: server {name} is quiet: {shorten(reason)}"], record.written))
        if record.state == "gave-up":
            why = shorten(record.doing) or "no restarts are left"
            lines.append(([f"keeper: gave up server {name}: {why}"], record.since))
        for texts, at in lines:
            yield _make_log("record", server_log_title(name), texts, diagnosis.format_time(at))


def _hang_log(report: NodeReport, now: float) -> Log:
    """Return a log with the NCCL and driver versions in a node's logs that are known to hang."""
    lines = [line for log in report.logs for line in log.lines]
    nccl = [match[1] for line in lines if (match := VERSION.search(line))]
    drivers = [match[1] for line in lines if (match := _NVIDIA_DRIVER.search(line))]
    gpus = [line for line in lines if line.startswith("Model:")]
    ib = any("NET/IB : Using" in line or "NET/IB: Using" in line for line in lines)
    hangs = known_hangs.describe_hangs(nccl, drivers, gpus, ib=ib)
    return _make_log("versions", "versions", tuple(hangs), diagnosis.format_time(now))


def _server_records(report: NodeReport) -> dict[str, Observed]:
    """Return the supervisor's valid records, by server."""
    records = {}
    for name, files in report.supervisor_files.items():
        with contextlib.suppress(ValueError):
            records[name] = observed.parse_status(files.get("observed"))
    return records


def _fault_lines(server: str, fault: Fault) -> list[str]:
    """Describe a fault in one line, followed by its evidence."""
    lines = fault.evidence.splitlines()
    exception = find_exception(lines) if fault.cause and not fault.rank else None
    rank = f"rank {fault.rank}" if fault.rank else exception.process if exception else ""
    node = fault.node or (exception.address if exception else "")
    origin = " on ".join(shorten(part) for part in (rank, node) if part)
    line = f"keeper: fault of server {server}: {shorten(fault.what)}"
    if origin and origin not in line:
        line += f" ({origin})"
    # Each line matches one symptom only, so a cause in the table gets a line of its own.
    cause = shorten(fault.cause)
    cause_lines = [cause] if symptoms.first_match(cause) is not None else []
    if cause and not cause_lines:
        line += f": {cause}"
    if fault.ready_again_after is not None:
        line += f"; ready again after {fault.ready_again_after:.0f} s"
    evidence = [untrusted.sanitize(text)[:1000] for text in lines[-40:]]
    return [line, *cause_lines, *evidence]


def _make_log(part: str, title: str, lines: Sequence[str], stamp: str) -> Log:
    """Return a log whose lines all have the same time."""
    stamps = dict.fromkeys(range(len(lines)), stamp)
    return Log(part=part, title=title, lines=tuple(lines), stamps=stamps)


def _ready_times(reports: _Reports, now: float) -> dict[str, float | None]:
    """Return when each server was last ready, by its log's title: the later time of its record and
    its engine's log; None for never.

    Earlier lines of a server are resolved. Lines of no server are resolved once all servers that
    are not stopped have been ready since: this time has the empty title.
    """
    records: dict[str, Observed] = {}
    for report in reports.values():
        records |= _server_records(report)
    ready = {
        server_log_title(name): record.ready_at if record.state == "ready" else None
        for name, record in records.items()
    }
    for log in (log for report in reports.values() for log in report.logs):
        if log.part.startswith("engine-"):
            numbers = [number for number, line in enumerate(log.lines) if _READY.search(line)]
            at = diagnosis.line_times(log, now)[numbers[-1]] if numbers else None
            ready[log.title] = _latest((ready.get(log.title), at))
    stopped = [name for name, record in records.items() if record.state == "stopped"]
    ignored = {server_log_title(name) for name in stopped}
    times = [at for title, at in ready.items() if title not in ignored]
    ready_times = [at for at in times if at is not None]
    return {**ready, "": min(ready_times) if times and len(ready_times) == len(times) else None}


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)


def _rank_findings(
    evidence: Mapping[str, Sequence[EvidenceLine]], ready: _ReadyTimes
) -> list[DiagnosisFinding]:
    """Return the findings, most likely first: causes, possible causes, effects, resolved ones; then
    earlier before later, and more nodes before fewer, else in the table's order.
    """
    matched = [symptom for symptom in symptoms.TABLE if symptom.id in evidence]
    failed = [
        line.at
        for symptom in matched
        if _symptom_kind(symptom) != "perhaps" and symptom.id != _UNREACHABLE
        for line in evidence[symptom.id]
    ]
    start = (_latest(failed) or 0.0) - _INCIDENT
    findings = (_build_finding(symptom, evidence[symptom.id], start, ready) for symptom in matched)
    return sorted(findings, key=_sort_key)


def _symptom_kind(symptom: Symptom) -> Kind:
    return "after" if symptom.after else "now" if symptom.fatal else "perhaps"


def _build_finding(
    symptom: Symptom, evidence: Sequence[EvidenceLine], start: float, ready: _ReadyTimes
) -> DiagnosisFinding:
    """Build the finding of a symptom from its current lines; without any, it is over."""

    def over(line: EvidenceLine) -> bool:
        if line.at is None or symptom.id == _UNREACHABLE:
            return False
        since = ready.get(line.what, ready[""])
        return line.at < start or (since is not None and line.at <= since)

    logs = {line.what for line in evidence}
    is_batch = DRIVER in logs and not any(what.startswith(server_log_title("")) for what in logs)
    current = [line for line in evidence if not over(line)]
    shown = current or evidence
    ordered = sorted(shown, key=lambda trace: (trace.at is None, trace.at or 0.0))
    return DiagnosisFinding(
        id=symptom.id,
        kind=_symptom_kind(symptom) if current else "over",
        cause=symptom.cause,
        fix=symptom.batch or symptom.fix if is_batch else symptom.fix,
        source=symptom.source,
        nodes=tuple(dict.fromkeys(line.node for line in shown)),
        count=len(shown),
        evidence=tuple(_choose_evidence(ordered, latest=symptom.id in _STATES)),
    )


def _sort_key(finding: DiagnosisFinding) -> tuple[int, int, float, int]:
    order = (*_FIRST, finding.id).index(finding.id)
    # The first line shown is the earliest, except for those of `_FIRST`, which rank by that order.
    at = finding.evidence[0].at
    earliest = math.inf if at is None else at
    return KINDS.index(finding.kind), order, earliest, -len(finding.nodes)


def _choose_evidence(lines: Sequence[EvidenceLine], *, latest: bool) -> list[EvidenceLine]:
    """Choose the lines to show: first one of each node, then others; the earliest, or with `latest`
    the latest, for repeated states.
    """
    ordered = list(reversed(lines)) if latest else list(lines)
    firsts = list({line.node: line for line in reversed(ordered)}.values())
    texts = {line.line for line in firsts}
    chosen = [line for line in ordered if line in firsts]
    chosen += [line for line in ordered if line.line not in texts]
    return list(dict.fromkeys(chosen))[:_MAX_EVIDENCE]
