"""Verdict from probe reports and NCCL's logs: each direction against the level and other pairs."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from statistics import median

from launcher import upstream
from launcher.core.check import Finding, Status
from launcher.core.domain import LEVEL_LABELS, LEVELS, Level
from launcher.core.expectations import NO_SHARED_SWITCH
from launcher.network import levels, nccl_log, suspects
from launcher.network.network_shape import Cell, Measurement, Verdict, format_rate
from launcher.network.probe_command import Collective, Report, Transfer

# A pair with less than this share of the others' median bandwidth is not like them: a quarter is no
# noise, a half may be.
_BROKEN, _SLOW = 1 / 4, 1 / 2
# The process that wrote of a link between nodes: `host:pid:tid [dev] NCCL INFO Channel …`.
_WRITER = re.compile(
    rf"^\S+?:(\d+):\d+ .*{upstream.text('nccl.channel-line')}"
    rf"(?:NET/|{upstream.text('nccl.path-mnnvl')})",
    re.MULTILINE,
)


def judge(measured: Measurement, level: tuple[Level, str], *, collective: bool = True) -> Verdict:
    """Judge every direction between two nodes, and the ranks themselves.

    Args:
        measured: the probes' reports.
        level: the required level, and the reason for it.
        collective: whether collectives will cross nodes, so that a failing all_reduce is a failure
            and not a warning.
    """
    inventory, reports = measured.inventory, measured.reports
    names = tuple(node.name for node in inventory.nodes)
    findings = [*suspects.node_findings(measured), *_version_findings(reports)]
    received = _transfers_by_direction(reports)
    cells = _mark_outliers(
        [
            _judge_cell(measured, pair, received.get(pair, ()), level[0])
            for pair in permutations(names, 2)
        ]
    )
    findings += suspects.cell_findings(measured, cells)
    failed = any(finding.status == "fail" for finding in findings)
    outcome, problems = _judge_collective(names, reports, needed=collective, failed=failed)
    findings += [
        *problems,
        *_missing_rdma_findings(measured, level[0]),
        *_no_gpudirect_findings(measured, level, cells),
    ]
    backend = next(
        (report.backend for report in reports.values()),
        "nccl" if inventory.accelerator != "cpu" else "gloo",
    )
    return Verdict(
        backend=backend,
        nodes=names,
        required=level[0],
        why=level[1],
        cells=tuple(cells),
        findings=tuple(findings),
        collective=outcome,
        ranks=sum(len(report.ranks) for report in reports.values()),
        seconds=max((report.seconds for report in reports.values()), default=0.0),
        versions=next((report.versions for report in reports.values() if report.versions), {}),
    )


def _judge_collective(
    names: Sequence[str], reports: Mapping[str, Report], *, needed: bool, failed: bool
) -> tuple[Collective | None, list[Finding]]:
    """Return the worst all_reduce of any node, and its problem: every rank must have the right sum.
    It was not tried if a pair `failed` before.
    """
    collectives = [reports[name].collective for name in names if name in reports]
    worst = min(
        (collective for collective in collectives if collective),
        key=lambda outcome: (not outcome.error, outcome.correct, outcome.busbw or 0),
        default=None,
    )
    problem = _collective_problem(
        worst, everywhere=None not in collectives and len(collectives) == len(names)
    )
    if not problem:
        return worst, []
    tried = not failed if worst is None else worst.tried
    status: Status = "fail" if needed and tried else "warn"
    return worst, [Finding(node="", status=status, text=f"all_reduce over all ranks: {problem}")]


def _collective_problem(worst: Collective | None, *, everywhere: bool) -> str:
    if worst is not None and (worst.error or not worst.correct):
        return worst.error or "the returned sum is wrong"
    return "" if worst is not None and everywhere else "was not measured on every node"


def _missing_rdma_findings(measured: Measurement, level: Level) -> list[Finding]:
    """Warn about nodes without an active RDMA port: they take the whole cluster down to TCP."""
    reports, required = measured.reports, measured.inventory.require
    missing = [name for name, report in reports.items() if not report.rdma]
    if level != "any" or required == "any" or not missing or len(missing) == len(reports):
        return []
    text = "has no active RDMA port, unlike the other nodes: all of them use TCP"
    fix = (
        "bring its port up (`ibstat`, `vlaunch check --group rdma`), or set `network: {require:"
        " any}` in the inventory"
    )
    return [Finding(node=name, status="warn", text=text, fix=fix) for name in missing]


def _no_gpudirect_findings(
    measured: Measurement, level: tuple[Level, str], cells: Sequence[Cell]
) -> list[Finding]:
    """Warn if `auto` settled for RDMA without GPUDirect because of the nodes' PCIe topology."""
    if not level[1].endswith(NO_SHARED_SWITCH) or all(cell.level != "rdma" for cell in cells):
        return []
    fix = (
        "compare `nvidia-smi topo -m` on the node: to require GPUDirect anyway, set"
        " `network: {require: gdrdma}` (and NCCL_NET_GDR_LEVEL=SYS under `env:`)"
    )
    return [
        Finding(node=name, status="warn", text=NO_SHARED_SWITCH, fix=fix)
        for name, report in measured.reports.items()
        if report.shared_switch is False
    ]


def merge_best(first: Mapping[str, Report], second: Mapping[str, Report]) -> dict[str, Report]:
    """Return the second measurement with the better figures of both: interference only slows."""
    before = {
        (t.source, t.target, t.local_rank): t for report in first.values() for t in report.transfers
    }
    return {
        name: replace(
            report,
            transfers=tuple(
                _better_transfer(before.get((t.source, t.target, t.local_rank)), t)
                for t in report.transfers
            ),
        )
        for name, report in second.items()
    }


def _better_transfer(before: Transfer | None, after: Transfer) -> Transfer:
    if (
        before is None
        or before.bandwidth is None
        or after.bandwidth is None
        or before.bandwidth <= after.bandwidth
    ):
        return after
    return replace(
        after,
        bandwidth=before.bandwidth,
        size=before.size,
        latency=min(before.latency or 1, after.latency or 1),
    )


def is_only_slow(verdict: Verdict) -> bool:
    """True if slow directions are the only problem: other traffic may cause that."""
    failed = [cell for cell in verdict.cells if cell.status == "fail"]
    named = [finding for finding in verdict.findings if finding.status == "fail"]
    return bool(failed) and all(cell.slow for cell in failed) and len(named) <= len(failed)


def _version_findings(reports: Mapping[str, Report]) -> list[Finding]:
    """Require equal versions of NCCL and PyTorch: ranks with different ones hang or fail."""
    findings = []
    for name in ("torch", "nccl"):
        versions = {
            report.node: report.versions.get(name, "")
            for report in reports.values()
            if report.versions
        }
        if len(set(versions.values())) > 1:
            listing = ", ".join(
                f"{node} has {version or 'none'}" for node, version in versions.items()
            )
            fix = "run `vlaunch check --only image`: every node must have the same image"
            findings.append(
                Finding(
                    node="",
                    status="fail",
                    text=f"{name} is not the same everywhere: {listing}",
                    fix=fix,
                )
            )
    return findings


def _judge_cell(
    measured: Measurement, pair: tuple[str, str], transfers: Sequence[Transfer], level: Level
) -> Cell:
    source, target = pair
    transport, device, reached = _pair_transport(measured, source, target)
    text = _transfer_problem(transfers) or _shortfall(transport, reached, level)
    bandwidths = [transfer.bandwidth for transfer in transfers if transfer.bandwidth is not None]
    latencies = [transfer.latency for transfer in transfers if transfer.latency is not None]
    return Cell(
        source=source,
        target=target,
        status="fail" if text else "pass",
        transport=transport,
        device=device,
        level=reached,
        bandwidth=sum(bandwidths) if bandwidths else None,
        latency=median(latencies) if latencies else None,
        size=max((transfer.size for transfer in transfers), default=0),
        text=text,
    )


def _transfers_by_direction(reports: Mapping[str, Report]) -> dict[tuple[str, str], list[Transfer]]:
    """Return the transfers of each direction, reported by its target."""
    by_direction: dict[tuple[str, str], list[Transfer]] = {}
    for target, report in reports.items():
        for transfer in report.transfers:
            if transfer.target == target:
                by_direction.setdefault((transfer.source, target), []).append(transfer)
    return by_direction


def _transfer_problem(transfers: Sequence[Transfer]) -> str:
    """Return the problem of a direction's transfers; empty if they arrived correctly."""
    if not transfers:
        return "was not measured"
    failed = next(
        (transfer for transfer in transfers if transfer.error or not transfer.correct), None
    )
    if failed is None:
        return ""
    return failed.error or "the received data differs from the data that was sent"


def _shortfall(transport: str, reached: Level | None, level: Level) -> str:
    """Return the reason why a direction misses a level; empty if it reaches it."""
    if reached is None:
        return (
            "NCCL did not log this link on every rank of both nodes: its transport is not confirmed"
        )
    if LEVELS.index(reached) < LEVELS.index(level):
        return f"{transport} is below the required level: {LEVEL_LABELS[level]}"
    return ""


def _pair_transport(
    measured: Measurement, source: str, target: str
) -> tuple[str, str, Level | None]:
    """Return the transport of a pair: its name, the device, and the level."""
    reports = measured.reports
    ends = [(reports[a], b) for a, b in ((source, target), (target, source)) if a in reports]
    if any(report.backend == "gloo" for report, _ in ends):
        node = measured.inventory.node(source)
        return "Gloo/TCP", node.interface or "", "any"
    reading = _read_links(ends)
    worst = levels.find_worst_link(reading)
    return ("", "", None) if worst is None else (worst.title, _device_names(reading), worst.level)


def _read_links(ends: Sequence[tuple[Report, str]]) -> nccl_log.Reading:
    """Parse NCCL's lines about the links between two nodes; empty unless every rank of both wrote
    one.

    Each end and each rank counts: one line proves one link.
    """
    logs = [report.pair_logs.get(peer, "") for report, peer in ends]
    proven = len(ends) == 2 and all(
        len(set(_WRITER.findall(text))) >= len(report.ranks)
        for text, (report, _) in zip(logs, ends, strict=True)
    )
    return nccl_log.merge_readings(
        [nccl_log.parse_log([text.encode()]) for text in logs] if proven else []
    )


def _device_names(reading: nccl_log.Reading) -> str:
    """Return the names of the devices that the links use, as far as the log names them."""
    names = [
        devices[link.device]
        for link in reading.links
        if link.device is not None
        and link.device in (devices := reading.devices.get(link.host, {}))
    ]
    return ", ".join(dict.fromkeys(names))


def _mark_outliers(cells: Sequence[Cell]) -> list[Cell]:
    """Mark the directions that are far slower than other pairs; with two nodes only the other
    direction is comparable.
    """
    rates = {
        (cell.source, cell.target): cell.bandwidth for cell in cells if cell.bandwidth is not None
    }
    ranked = sorted(rates.values())
    return [_compare_cell(cell, rates, ranked) for cell in cells]


def _compare_cell(
    cell: Cell, rates: Mapping[tuple[str, str], float], ordered: Sequence[float]
) -> Cell:
    """Compare a direction with the median of the other pairs' bandwidths (bytes/s)."""
    if cell.status != "pass" or cell.bandwidth is None:
        return cell
    # The median without two of the rates is no higher than this; there may be 100,000 rates.
    if cell.bandwidth >= _SLOW * ordered[min(len(ordered) // 2 + 1, len(ordered) - 1)]:
        return cell
    back = rates.get((cell.target, cell.source))
    others = list(ordered)
    for rate_of_pair in (cell.bandwidth, back):
        if rate_of_pair is not None:
            del others[bisect_left(others, rate_of_pair)]
    middle = (len(others) - 1) // 2, len(others) // 2
    typical = sum(others[at] for at in middle) / 2 if others else back or 0.0
    if cell.bandwidth >= _SLOW * typical:
        return cell
    reference = "other pairs have" if others else "the reverse direction has"
    # One other pair, whose two rates these are, may itself be the odd one on a busy machine.
    certain = len(others) > 2
    return replace(
        cell,
        status="fail" if certain and cell.bandwidth < _BROKEN * typical else "warn",
        text=f"{format_rate(cell.bandwidth)}; {reference} {format_rate(typical)}",
        slow=True,
    )
