"""Level of the inter-node links in an NCCL log, and its verdict: TCP, RDMA, RDMA with GPUDirect, or
multi-node NVLink.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launcher.core.check import Finding, failed, passed, warned
from launcher.core.domain import LEVEL_LABELS, LEVELS, Level, fold
from launcher.failures.match import first_failure
from launcher.network import causes, nccl_log
from launcher.network.nccl_log import NcclLink, Reading
from launcher.network.probe.network_links import KIND_LEVELS, KINDS, Kind, link_kind

_HOW_TO_LOG = (
    "log a run that sends data between nodes, on all nodes, with `NCCL_DEBUG=INFO` and"
    " `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET`: NCCL connects at the first collective"
    " between nodes, not at startup; or run `vlaunch check-nccl`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstLink:
    """The worst inter-node network of a log, its level and its links."""

    network: str
    gpudirect: bool
    level: Level
    links: tuple[NcclLink, ...]

    @property
    def title(self) -> str:
        """Name in NCCL's own lines: `NET/IB/GDRDMA`, `P2P/MNNVL`."""
        return (
            "P2P/MNNVL"
            if self.network == "MNNVL"
            else f"NET/{self.network}" + "/GDRDMA" * self.gpudirect
        )


def between_nodes(reading: Reading) -> tuple[NcclLink, ...]:
    """Return the links between nodes, without those that connect ranks of one host."""
    near = nccl_log.local_links(reading)
    return tuple(link for link in reading.links if link not in near)


def find_worst_link(reading: Reading) -> WorstLink | None:
    """Return the worst network (TCP, RDMA, GPUDirect, MNNVL); `None` without inter-node links."""
    everywhere = [name for names in reading.providers.values() for name in names]
    links_by_kind: dict[Kind, list[NcclLink]] = {}
    for link in between_nodes(reading):
        providers = reading.providers.get(link.host, everywhere)
        links_by_kind.setdefault(link_kind(link.network, link.gpudirect, providers), []).append(
            link
        )
    worst = min(links_by_kind, key=KINDS.index, default=None)
    if worst is None:
        return None
    links = tuple(links_by_kind[worst])
    return WorstLink(
        network=links[0].network,
        gpudirect=worst == "GPUDirect",
        level=KIND_LEVELS[worst],
        links=links,
    )


def as_json(reading: Reading) -> dict[str, Any]:
    """Return the facts of a log as plain data; `gpudirect` is `None` without network links,
    `network` without any link.

    Links inside a host are no part of either; they are marked as `inside`.
    """
    worst_link, near = find_worst_link(reading), nccl_log.local_links(reading)
    far = [link for link in reading.links if link not in near and link.network != "MNNVL"]
    return {
        "network": worst_link.network if worst_link else None,
        "gpudirect": all(link.gpudirect for link in far) if far else None,
        "network_links": reading.network_links,
        "mnnvl": reading.mnnvl,
        "links": [{**link._asdict(), "inside": link in near} for link in reading.links],
        "local": reading.local,
        "using": list(reading.using),
        "devices": reading.devices,
        "warnings": list(reading.warnings),
        "versions": list(reading.versions),
        "lines": reading.lines,
        "truncated": reading.truncated,
    }


def judge(
    reading: Reading, require: Level | Literal["auto"], hardware: str = ""
) -> tuple[Finding, ...]:
    """Judge whether a log alone proves the level, and whether it is complete.

    Args:
        reading: the log, or several merged.
        require: the level; `auto` takes any RDMA, warns without GPUDirect, and fails TCP.
        hardware: the GPUs' name where it is known; GPUDirect is not expected of GB10, which shares
            its memory with the CPU.
    """
    worst = find_worst_link(reading)
    if worst is None:
        findings = [_no_links_finding(reading)]
    else:
        findings = [_level_finding(reading, worst, require, hardware)]
        findings += _coverage_findings(reading)
    evidence = "\n".join(finding.evidence for finding in findings)
    if alarms := [text for text in reading.alarms if text not in evidence]:
        good = all(finding.status == "pass" for finding in findings)
        findings.append(_alarm_finding(reading, alarms, good=good))
    return (*findings, *_completeness_findings(reading))


def _coverage_findings(reading: Reading) -> list[Finding]:
    """Warn if ranks are missing from the log."""
    listed, ranks = nccl_log.count_unlinked_ranks(reading)
    if not ranks:
        return []
    text = f"the log has links of {listed} of {ranks} ranks: the transport of the others is unknown"
    fix = "pass the logs of all ranks; if Ray merged them, log again with `RAY_DEDUP_LOGS=0`"
    return [warned("", text, fix=fix)]


def _completeness_findings(reading: Reading) -> list[Finding]:
    """Warn if the log is truncated or was not read completely."""
    findings = []
    if reading.truncated:
        text = "the log is truncated: later links are unknown"
        fix = "pass the complete log, after the job has ended"
        findings.append(warned("", text, fix=fix))
    if reading.overflow:
        text = (
            f"the log has more than {nccl_log.MAX_LINKS} different links: only the transport of"
            " the rest was checked"
        )
        fix = "pass the logs of one job at a time"
        findings.append(warned("", text, fix=fix))
    return findings


def judge_files(
    readings: Mapping[str, Reading], require: Level | Literal["auto"]
) -> tuple[Finding, ...]:
    """Judge several logs of one job together, and report each log that proves nothing by itself."""
    findings = judge(nccl_log.merge_readings(readings.values()), require)
    if len(readings) == 1:
        return findings
    alone = [
        replace(
            _no_links_finding(reading),
            status="warn" if _count_local_links(reading) else "fail",
            text=f"{name}: {_no_links_finding(reading).text}",
        )
        for name, reading in readings.items()
        if find_worst_link(reading) is None
    ]
    return (*findings, *alone)


def _alarm_finding(reading: Reading, alarms: Sequence[str], *, good: bool) -> Finding:
    """Return a finding with all of NCCL's warnings, and the cause of the first known one."""
    hosts = sorted({host for text in alarms for host in reading.warnings[text] if host})
    count = len(alarms)
    text = "NCCL logged a warning" if count == 1 else f"NCCL logged {count} different warnings"
    failure = first_failure(alarms, rdma=True)
    return warned(
        fold(hosts) if hosts else "",
        text + ", but its links are good" * good + (f": {failure.cause}" if failure else ""),
        evidence="\n".join(alarms),
        fix=failure.choose_fix(elsewhere=True)
        if failure
        else "find it in the log; then check the network: `vlaunch check --group network`",
    )


def _count_local_links(reading: Reading) -> dict[str, int]:
    """Count the links inside nodes, by kind."""
    counts = dict(reading.local)
    for link in nccl_log.local_links(reading):
        counts[f"NET/{link.network}"] = counts.get(f"NET/{link.network}", 0) + 1
    return counts


def _no_links_finding(reading: Reading) -> Finding:
    if local_links := _count_local_links(reading):
        reason = "it has only links within nodes: " + ", ".join(
            f"{count} {kind}" for kind, count in sorted(local_links.items())
        )
    elif reading.truncated:
        reason = "it is truncated before the first link"
    elif not reading.lines:
        reason = "it is empty"
    elif reading.using:
        announced = next(iter(reading.using))
        reason = f"`Using network {announced}` is what NCCL intends, not what a link uses"
    elif reading.warnings or reading.versions:
        reason = "NCCL logged no link"
    else:
        reason = f"none of its {reading.lines} lines is from NCCL"
    likely = causes.find_cause(warnings=list(reading.warnings), level=None)
    return failed(
        "",
        f"the log does not show the network between nodes: {reason}",
        evidence=likely[1] if likely else "",
        fix=_HOW_TO_LOG,
    )


def _level_finding(
    reading: Reading, worst: WorstLink, require: Level | Literal["auto"], hardware: str
) -> Finding:
    total = len(between_nodes(reading))
    every = f"all {total} links" if total > 1 else "the one link"
    count = f"{len(worst.links)} of {total} links" if len(worst.links) < total else every
    text = f"{worst.title}" + " (TCP)" * (worst.level == "any") + f" on {count} between nodes"
    needed: Level = "rdma" if require == "auto" else require
    if LEVELS.index(worst.level) < LEVELS.index(needed):
        return _below_finding(
            reading, worst, require, f"{text}, but {LEVEL_LABELS[needed]} is required"
        )
    if require == "auto" and worst.level == "rdma":
        if "GB10" in hardware:
            return passed("", f"{text}; GPUDirect is not expected on {hardware}")
        cause, evidence, fix, _ = _explain(reading, worst)
        fix = fix or "if these GPUs have no GPUDirect, pass `--require rdma`"
        return warned("", f"{text}: GPUDirect is not used{cause}", evidence=evidence, fix=fix)
    return passed("", text)


def _below_finding(
    reading: Reading, worst: WorstLink, require: Level | Literal["auto"], text: str
) -> Finding:
    cause, evidence, fix, host = _explain(reading, worst)
    hosts = [host] if host else _list_hosts(worst)
    allow = (
        "if these nodes have no RDMA, pass `--require any`"
        if worst.level == "any"
        else "if these GPUs have no GPUDirect, pass `--require rdma`"
    )
    if not fix:
        fix = (
            "log the devices that NCCL finds with `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET`;"
            f" {allow}"
        )
    elif require == "auto":
        fix = f"{fix}; {allow}"
    return failed(
        fold(hosts) if hosts else "",
        f"{text} ({_list_ranks(worst.links)}){cause}",
        evidence=evidence,
        fix=fix,
    )


def _explain(reading: Reading, worst: WorstLink) -> tuple[str, str, str, str]:
    """Return the likely cause as the end of a sentence, its evidence, the fix, and its host; no
    host if all of them have the evidence.
    """
    hosts = _list_hosts(worst)
    for host in (*hosts, ""):
        warnings = [
            text for text, writers in reading.warnings.items() if not host or host in writers
        ]
        if (likely := causes.find_cause(warnings=warnings, level=worst.level)) is None:
            continue
        hosts_by_line = [reading.warnings[text].keys() for text in warnings if text in likely[1]]
        everywhere = all(set(hosts) <= line_hosts for line_hosts in hosts_by_line)
        if not host or (len(hosts) > 1 and everywhere):
            return f": {likely[0]}", likely[1], likely[2], ""
        return f": {likely[0]} on {host}", likely[1], likely[2], host
    return "", "", "", ""


def _list_hosts(worst: WorstLink) -> list[str]:
    return sorted({link.host for link in worst.links if link.host})


def _list_ranks(links: Sequence[NcclLink]) -> str:
    pairs = [f"{a}→{b}" for a, b in dict.fromkeys((link.source, link.target) for link in links)]
    return "ranks " + ", ".join(pairs[:6]) + f" and {len(pairs) - 6} more" * (len(pairs) > 6)
