"""Diagnosis of failures from the nodes' reports: known failures in logs, most likely first."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.agent import observed
from launcher.agent.cause import find_exception
from launcher.agent.observed import Fault, Observed
from launcher.core import untrusted
from launcher.diagnose.evidence import LogError, find_first_error, find_shutdowns, find_suspect
from launcher.failures.explain import explain
from launcher.failures.hangs import describe_hangs
from launcher.failures.match import Match, describe_end, describe_error, fill, find_failures
from launcher.failures.table import Failure, load_failures
from launcher.network.nccl_log import VERSION
from launcher.tools import diagnosis, vllm
from launcher.tools.diagnosis import (
    DRIVER,
    ContainerState,
    Log,
    NodeReport,
    server_log_title,
    shorten,
)

# now: a cause; unknown: an error that is no known failure; perhaps: may be harmless; after: an
# effect of another one; over: a server has been ready since, or it happened long before the last
# failure.
Kind = Literal["now", "unknown", "perhaps", "after", "over"]
KINDS: tuple[Kind, ...] = ("now", "unknown", "perhaps", "after", "over")
_KINDS: Mapping[str, Kind] = {"cause": "now", "possible": "perhaps", "effect": "after"}
_Reports = Mapping[str, NodeReport]  # by node
_ReadyTimes = Mapping[str, float | None]  # by a log's title

_INCIDENT = 1800.0  # seconds before the last failure; older lines belong to another failure
_MAX_EVIDENCE = 3  # lines shown per finding
_WIDTH = 300  # characters of evidence
# Such as `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build`.
_NVIDIA_DRIVER = re.compile(r"^NVRM version: .* (\d{3}\.[\d.]+) ")
_READY = re.compile(vllm.API_READY)
# Current states, regardless of time: they rank before failures that only logs show.
_UNREACHABLE = "node-unreachable"
_UNKNOWN = "the first error in the logs is not a known failure"
_ONLY_WARNINGS = "the logs have no known failure and no error; this line may matter"
_UNKNOWN_FIX = (
    "search for this line in the issues of the program that printed it; more detail: run again with"
    " NCCL_DEBUG=INFO and VLLM_LOGGING_LEVEL=DEBUG, and read `dmesg`"
)
RANK_HANGS = "rank-hangs"
_STATES = (RANK_HANGS, "server-died", "server-gave-up", _UNREACHABLE)
_REFUSED = "request-refused"
_NO_STEP = "no step had ended for "  # the agent's fault of a server that hangs
_FIRST = (_REFUSED, *_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLine:
    """A line of a log, with its node, the log's title, its time in seconds since 1970 by that
    node's clock, the name in it that completes the cause, and the weight of its pattern.
    """

    node: str
    what: str
    line: str
    at: float | None = None
    name: str = ""
    weight: int = 0


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

    `ready` is when a server was last ready, in seconds since 1970; `elsewhere` means that the logs
    are not from a cluster of vlaunch.
    """

    findings: tuple[DiagnosisFinding, ...]
    nodes: tuple[str, ...]
    logs: int
    lines: int
    gaps: tuple[tuple[str, str, str], ...] = ()
    ready: float | None = None
    elsewhere: bool = False

    @property
    def has_problem(self) -> bool:
        """True for a cause, or an effect without a known cause."""
        return any(finding.kind in ("now", "unknown", "after") for finding in self.findings)


def diagnose(
    reports: _Reports,
    missing: Mapping[str, str],
    *,
    rdma: bool,
    now: float,
    since: float | None = None,
    refused: Log | None = None,
    elsewhere: bool = False,
) -> Diagnosis:
    """Diagnose the nodes' reports.

    Args:
        reports: by node, in display order.
        missing: unreachable nodes, with the reason.
        rdma: the inventory promises RDMA between the nodes.
        now: seconds since 1970.
        since: maximum age of lines in seconds; lines without a time always count.
        refused: the last rejected request, as the operator's machine recorded it.
        elsewhere: the logs are not from a cluster of vlaunch.
    """
    oldest = -math.inf if since is None else now - since
    evidence: dict[str, list[EvidenceLine]] = {}
    scans = [
        _LogScan(name, log, tuple(find_failures(log.lines, rdma=rdma)))
        for name, report in reports.items()
        for log in (*report.logs, *_docker_logs(report), *_fault_logs(report))
    ]
    states = _find_states(reports, missing, refused, now)
    for id_, line in (*_find_evidence(scans, now), *states):
        if line.at is None or line.at >= oldest:
            evidence.setdefault(id_, []).append(line)
    if RANK_HANGS in evidence:
        for name, report in reports.items():
            for line in _known_hangs(name, report, now):
                evidence.setdefault("known-to-hang", []).append(line)
    ready = _ready_times(reports, now)
    findings = _rank_findings(evidence, ready, elsewhere=elsewhere)
    findings += _unexplained_findings(findings, scans, now, elsewhere=elsewhere)
    findings.sort(key=_sort_key)
    if elsewhere and not findings:
        findings = list(_suspect_findings(scans, now))
    return Diagnosis(
        findings=tuple(findings),
        nodes=tuple(reports),
        logs=sum(len(report.logs) for report in reports.values()),
        lines=sum(report.lines for report in reports.values()),
        gaps=tuple((name, *gap) for name, report in reports.items() for gap in report.gaps.items()),
        ready=_latest(ready.values()),
        elsewhere=elsewhere,
    )


@dataclass(frozen=True, slots=True)
class _LogScan:
    """A log of a node, and the known failures in it."""

    node: str
    log: Log
    matches: tuple[Match, ...]


def _find_evidence(scans: Sequence[_LogScan], now: float) -> Iterator[tuple[str, EvidenceLine]]:
    """Yield the lines of logs that show a failure, with its id, without effects of a shutdown."""
    for scan in scans:
        log = scan.log
        times = diagnosis.line_times(log, (match.line for match in scan.matches), now)
        shutdowns = find_shutdowns(log.lines) if scan.matches else []
        for match in scan.matches:
            is_effect = match.failure.kind == "effect"
            if is_effect and any(match.line in lines for lines in shutdowns):
                continue
            yield (
                match.failure.id,
                EvidenceLine(
                    node=scan.node,
                    what=log.title,
                    line=_evidence_line(log, match),
                    at=times[match.line],
                    name=match.name,
                    weight=match.weight,
                ),
            )


def _find_states(
    reports: _Reports, missing: Mapping[str, str], refused: Log | None, now: float
) -> Iterator[tuple[str, EvidenceLine]]:
    """Yield failures in the states of nodes, containers and servers, and the refused request."""
    for name, report in reports.items():
        yield from _state_evidence(name, report)
        yield from _record_evidence(name, report)
    for name, reason in missing.items():
        line = f"node cannot be reached: {reason}"[:_WIDTH]
        yield _UNREACHABLE, EvidenceLine(node=name, what="login", line=line, at=now)
    if refused is not None:
        times = diagnosis.line_times(refused, range(len(refused.lines)), now)
        for index, at in times.items():
            line = refused.lines[index].strip()[:_WIDTH]
            yield _REFUSED, EvidenceLine(node="operator", what=refused.title, line=line, at=at)


def _unexplained_findings(
    findings: Sequence[DiagnosisFinding],
    scans: Sequence[_LogScan],
    now: float,
    *,
    elsewhere: bool,
) -> Iterator[DiagnosisFinding]:
    """Yield an unknown cause, if the findings have a failure without one."""
    if any(finding.kind == "now" and finding.id not in _STATES for finding in findings):
        return
    kinds = {finding.kind for finding in findings}
    if elsewhere or kinds & {"now", "after"}:
        yield from _unknown_findings(scans, now, words="after" not in kinds, elsewhere=elsewhere)


def _unknown_findings(
    scans: Sequence[_LogScan], now: float, *, words: bool, elsewhere: bool
) -> Iterator[DiagnosisFinding]:
    """Yield the first error of the logs that is no known failure (`find_first_error`)."""
    errors = []
    for scan in scans:
        known = {match.line for match in scan.matches}
        lines = ["" if at in known else line for at, line in enumerate(scan.log.lines)]
        if (error := find_first_error(lines, words=words)) is not None:
            errors.append((_log_evidence(scan, error, now), error))
    if errors:
        first, error = min(errors, key=lambda item: math.inf if item[0].at is None else item[0].at)
        match = describe_error(error.text, error.origin)
        yield _build_unknown("unknown", first, match, elsewhere=elsewhere)


def _suspect_findings(scans: Sequence[_LogScan], now: float) -> Iterator[DiagnosisFinding]:
    """Yield the step at which a log without errors ends, where the program may hang, or else its
    first warning.
    """
    for scan in scans:
        lines, match = scan.log.lines, describe_end(scan.log.lines)
        suspect = LogError(match.line, lines[match.line]) if match else find_suspect(lines)
        if suspect is not None:
            description = match or describe_error(suspect.text, "")
            line = _log_evidence(scan, suspect, now)
            yield _build_unknown("perhaps", line, description, elsewhere=True)


def _build_unknown(
    kind: Literal["unknown", "perhaps"], line: EvidenceLine, match: Match | None, *, elsewhere: bool
) -> DiagnosisFinding:
    """Build the finding of a line that is no known failure, with the description of its code."""
    causes, fixes = [_UNKNOWN if kind == "unknown" else _ONLY_WARNINGS], [_UNKNOWN_FIX]
    if match is not None:
        if match.failure.last:
            causes, fixes = [], []
        causes.append(match.cause)
        fixes.insert(0, match.choose_fix(elsewhere=elsewhere))
    return DiagnosisFinding(
        id=match.failure.id if match else "unknown",
        kind=kind,
        cause="; ".join(causes),
        fix="; ".join(fixes),
        source=match.failure.source if match else "",
        nodes=(line.node,),
        count=1,
        evidence=(line,),
    )


def _log_evidence(scan: _LogScan, error: LogError, now: float) -> EvidenceLine:
    """Return the line of an error: the text of an exception where the line is only its start."""
    log, line = scan.log, scan.log.lines[error.line].strip()
    text = error.text if error.origin and error.text not in line else line
    at = diagnosis.line_times(log, [error.line], now)[error.line]
    return EvidenceLine(node=scan.node, what=log.title, line=text[:_WIDTH], at=at)


def _evidence_line(log: Log, match: Match) -> str:
    """Return the line of a failure, and those below it that belong to it; in a long line, the part
    that matched.
    """
    lines = log.lines[match.line : match.line + match.failure.lines]
    text = " ".join(line.strip() for line in lines)
    if match.end > _WIDTH - 20:
        text = "…" + text[match.end - _WIDTH // 2 :]
    return text[:_WIDTH]


def _docker_logs(report: NodeReport) -> Iterator[Log]:
    """Yield the errors of Docker's client and daemon as logs."""
    if refused := report.gaps.get("containers"):
        yield Log(part="ids", title="Docker", lines=(refused,))
    for state in report.states:
        if state.error:
            yield _make_log("state", "Docker", [f"{state.name}: {state.error}"], _state_time(state))


def _state_time(state: ContainerState) -> str:
    stopped = state.status in ("exited", "dead", "restarting")
    return state.finished if stopped else state.started


def _state_evidence(name: str, report: NodeReport) -> Iterator[tuple[str, EvidenceLine]]:
    """Yield the containers that were killed, keep restarting, or ended."""
    for state in report.states:
        lines = []
        if state.oom:
            text = f"container {state.name} was killed for lack of memory (OOMKilled)"
            lines.append(("kernel-oom", text))
        if state.status == "restarting":
            text = (
                f"container {state.name} keeps ending: {state.restarts} restarts, the last exit"
                f" code {state.exit_code}"
            )
            lines.append(("container-restarts", text))
        elif state.status in ("exited", "dead") and state.role != "probe":
            killed = state.exit_code == 137 and not state.oom
            how = " (it was killed: by hand, or for lack of memory)" if killed else ""
            text = f"container {state.name} ended with exit code {state.exit_code}{how}"
            lines.append(("container-ended", text))
        at = diagnosis.parse_time(_state_time(state), 0.0, math.inf)
        for id_, text in lines:
            yield id_, EvidenceLine(node=name, what="Docker", line=text, at=at)


def _record_evidence(node: str, report: NodeReport) -> Iterator[tuple[str, EvidenceLine]]:
    """Yield the supervisor's records of servers: faults, hanging ranks, no restarts left."""
    for name, record in _server_records(report).items():
        entries = [
            (
                RANK_HANGS if fault.what.startswith(_NO_STEP) else "server-died",
                _describe_fault(name, fault),
                fault.at,
            )
            for fault in record.faults
        ]
        reason = record.reason
        if record.verdict == "suspect":
            if record.wedge is not None and not record.wedge.rank:
                reason = "; ".join((reason, *record.wedge.observations))
            text = f"server {name} hangs: {shorten(reason)}"
            entries.append((RANK_HANGS, text, record.written))
        elif record.verdict == "quiet":
            text = f"server {name} is quiet: {shorten(reason)}"
            entries.append(("server-quiet", text, record.written))
        if record.state == "gave-up":
            why = shorten(record.doing) or "no restarts are left"
            entries.append(("server-gave-up", f"server {name}: {why}", record.since))
        for id_, text, at in entries:
            line = EvidenceLine(node=node, what=server_log_title(name), line=text[:_WIDTH], at=at)
            yield id_, line


def _fault_logs(report: NodeReport) -> Iterator[Log]:
    """Yield the causes and the last lines of servers' faults, as the supervisor recorded them."""
    for name, record in _server_records(report).items():
        for fault in record.faults:
            evidence = [line[:1000] for line in fault.evidence.splitlines()[-40:]]
            lines = [untrusted.sanitize(line) for line in (shorten(fault.cause), *evidence)]
            stamp = diagnosis.format_time(fault.at)
            yield _make_log("record", server_log_title(name), lines, stamp)


def _known_hangs(node: str, report: NodeReport, now: float) -> Iterator[EvidenceLine]:
    """Yield the NCCL and driver versions in a node's logs that are known to hang."""
    lines = [line for log in report.logs for line in log.lines]
    nccl = [match[1] for line in lines if (match := VERSION.search(line))]
    drivers = [match[1] for line in lines if (match := _NVIDIA_DRIVER.search(line))]
    gpus = [line for line in lines if line.startswith("Model:")]
    ib = any("NET/IB : Using" in line or "NET/IB: Using" in line for line in lines)
    for text in describe_hangs(nccl, drivers, gpus, ib=ib):
        yield EvidenceLine(node=node, what="versions", line=text[:_WIDTH], at=now)


def _server_records(report: NodeReport) -> dict[str, Observed]:
    """Return the supervisor's valid records, by server."""
    records = {}
    for name, files in report.supervisor_files.items():
        with contextlib.suppress(ValueError):
            records[name] = observed.parse_status(files.get("observed"))
    return records


def _describe_fault(server: str, fault: Fault) -> str:
    """Describe a fault in one line."""
    lines = fault.evidence.splitlines()
    exception = find_exception(lines) if fault.cause and not fault.rank else None
    rank = f"rank {fault.rank}" if fault.rank else exception.process if exception else ""
    node = fault.node or (exception.address if exception else "")
    origin = " on ".join(shorten(part) for part in (rank, node) if part)
    line = f"server {server}: {shorten(fault.what)}"
    if origin and origin not in line:
        line += f" ({origin})"
    cause = shorten(fault.cause)
    if cause and explain(cause) is None:  # else it is a finding of its own
        line += f": {cause}"
    if fault.ready_again_after is not None:
        line += f"; ready again after {fault.ready_again_after:.0f} s"
    return line


def _make_log(part: str, title: str, lines: Sequence[str], stamp: str) -> Log:
    """Return a log whose lines all have the same time."""
    stamps = dict.fromkeys(range(len(lines)), stamp)
    return Log(part=part, title=title, lines=tuple(lines), stamps=stamps)


def _ready_times(reports: _Reports, now: float) -> dict[str, float | None]:
    """Return when each server was last ready, by its log's title: the later time of its record and
    its engine's log; None for never.

    Earlier lines of a server are resolved. Lines of no server are resolved once all servers have
    been ready since, without stopped ones beside others: this time has the empty title.
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
            numbers = [number for number, line in enumerate(log.lines) if _READY.search(line)][-1:]
            at = _latest(diagnosis.line_times(log, numbers, now).values())
            ready[log.title] = _latest((ready.get(log.title), at))
    stopped = [name for name, record in records.items() if record.state == "stopped"]
    ignored = {server_log_title(name) for name in stopped}
    running = [at for title, at in ready.items() if title not in ignored]
    times = running or list(ready.values())
    ready_times = [at for at in times if at is not None]
    return {**ready, "": min(ready_times) if times and len(ready_times) == len(times) else None}


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)


def _rank_findings(
    evidence: Mapping[str, Sequence[EvidenceLine]], ready: _ReadyTimes, *, elsewhere: bool
) -> list[DiagnosisFinding]:
    """Return the findings, most likely first: causes, possible causes, effects, resolved ones; then
    earlier before later, more nodes before fewer, and specific patterns before general ones.
    """
    failures = load_failures()
    matched = [failure for id_, failure in failures.items() if id_ in evidence]
    failed = [
        line.at
        for failure in matched
        if failure.kind != "possible" and failure.id != _UNREACHABLE
        for line in evidence[failure.id]
    ]
    start = (_latest(failed) or 0.0) - _INCIDENT
    findings = (
        _build_finding(failure, evidence[failure.id], start, ready, elsewhere=elsewhere)
        for failure in matched
    )
    return sorted(findings, key=_sort_key)


def _build_finding(
    failure: Failure,
    evidence: Sequence[EvidenceLine],
    start: float,
    ready: _ReadyTimes,
    *,
    elsewhere: bool,
) -> DiagnosisFinding:
    """Build the finding of a failure from its current lines; without any, it is over."""

    def over(line: EvidenceLine) -> bool:
        if line.at is None or failure.id == _UNREACHABLE:
            return False
        since = ready.get(line.what, ready[""])
        return line.at < start or (since is not None and line.at <= since)

    logs = {line.what for line in evidence}
    is_batch = DRIVER in logs and not any(what.startswith(server_log_title("")) for what in logs)
    current = [line for line in evidence if not over(line)]
    shown = current or evidence
    ordered = sorted(shown, key=lambda trace: (trace.at is None, trace.at or 0.0))
    fix = failure.choose_fix(mode="*" if is_batch else "", elsewhere=elsewhere)
    return DiagnosisFinding(
        id=failure.id,
        kind=_KINDS[failure.kind] if current else "over",
        cause=fill(failure.cause, ordered[0].name),
        fix=fill(fix, ordered[0].name),
        source=failure.source,
        nodes=tuple(dict.fromkeys(line.node for line in shown)),
        count=len(shown),
        evidence=tuple(_choose_evidence(ordered, latest=failure.id in _STATES)),
    )


def _sort_key(finding: DiagnosisFinding) -> tuple[int, int, float, int, int]:
    order = (*_FIRST, finding.id).index(finding.id)
    # The first line shown is the earliest, except for those of `_FIRST`, which rank by that order.
    at = finding.evidence[0].at
    earliest = math.inf if at is None else at
    weight = max(line.weight for line in finding.evidence)
    return KINDS.index(finding.kind), order, earliest, -len(finding.nodes), -weight


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
