"""Findings about a bad network: the node, rank, pair or direction to blame, cause and fix."""

import re
from collections.abc import Sequence

from launcher.core.check import Finding, failed, warned
from launcher.core.domain import Node
from launcher.network import causes, nccl_log
from launcher.network.network_shape import Cell, Measurement, by_node
from launcher.network.probe_command import RankReport, Report

# In the words of `network/probe/network_lanes.py`, heard from the node itself or from the rank on
# the other side.
_MISNAMED = re.compile(
    r"(?:rank \d+ \((?P<node>[^)]+)\): )?(?P<text>(?P<variable>\w+) names .+, which is not"
    r" here: .*)"
)

# The error of a rank that stopped because another, of its node or the head, had ended, as
# `network/probe/network_start.py` and `network_rank.py` write it.
_STOPPED = re.compile(r"stopped: |waiting for all ranks at .+: the store is gone: ")
# Seconds. torch is imported in 3 to 10 s from a warm disk, its GPUs' first use included; ranks that
# have it meet within a second or two.
_SLOW_TORCH, _SLOW_RENDEZVOUS = 30.0, 15.0
_TORCH_FIX = (
    "check the disk and the load of {node} (`uptime`, `iostat -x 1`); with NVIDIA GPUs, enable"
    " persistence mode there: `sudo nvidia-smi -pm 1`"
)
_NAMES_FIX = "check that node names resolve quickly: `vlaunch check --only names-resolve`"


def node_findings(measured: Measurement) -> list[Finding]:
    """Return the findings about each node's probe and its ranks."""
    arrived = [
        name
        for name, report in measured.reports.items()
        if report.ranks and not any(_before_rendezvous(rank) for rank in report.ranks)
    ]
    findings = []
    for node in measured.inventory.nodes:
        if node.name in measured.missing:
            text = f"its probe sent no report: {measured.missing[node.name]}"
            fix = f"check that its container is running: `vlaunch logs {node.name}`"
            findings.append(failed(node, text, fix=fix))
        else:
            findings += _report_findings(measured, node, arrived)
            findings += _slow_start_findings(node, measured.reports[node.name])
    return findings


def _report_findings(measured: Measurement, node: Node, arrived: Sequence[str]) -> list[Finding]:
    """Return the failures in a node's report; `arrived` are the nodes that met the others."""
    inventory, report = measured.inventory, measured.reports[node.name]
    findings = []
    if report.error:
        fix = _probe_fix(node, report.error, inventory.ports.probe)
        findings.append(failed(node, report.error, fix=fix))
    for rank in report.ranks:
        if rank.ended or _follows_another(measured, node, rank):
            continue
        others = f"; arrived: {', '.join(arrived)}" if _before_rendezvous(rank) and arrived else ""
        findings.append(
            failed(
                node,
                f"rank {rank.rank} {_describe_exit(rank)} in the phase “{rank.phase}”{others}",
                evidence=rank.error or rank.tail,
                fix=_rank_fix(measured, node, rank),
            )
        )
    return findings


def _follows_another(measured: Measurement, node: Node, rank: RankReport) -> bool:
    """True if a rank stopped because of another failure on its node or the head."""
    names = node.name, measured.inventory.head.name
    return _was_stopped(rank) and any(_failed_by_itself(measured, name) for name in names)


def _was_stopped(rank: RankReport) -> bool:
    return _STOPPED.match(rank.error) is not None


def _failed_by_itself(measured: Measurement, name: str) -> bool:
    """True if a node's probe, or one of its ranks, failed by itself."""
    report = measured.reports.get(name)
    if report is None or report.error:
        return True
    return any(not rank.ended and not _was_stopped(rank) for rank in report.ranks)


def _slow_start_findings(node: Node, report: Report) -> list[Finding]:
    """Return a warning for each slow phase before the measurement."""
    findings = []
    torch = max((rank.torch or 0.0 for rank in report.ranks), default=0.0)
    if torch > _SLOW_TORCH:
        text = f"its ranks took {torch:.0f} s to load torch and NCCL; all others waited for them"
        findings.append(warned(node, text, fix=_TORCH_FIX.format(node=node.name)))
    meeting = max((rank.meeting or 0.0 for rank in report.ranks), default=0.0)
    if meeting > _SLOW_RENDEZVOUS:
        text = f"its ranks took {meeting:.0f} s to join the others after all had loaded torch"
        findings.append(warned(node, text, fix=_NAMES_FIX))
    return findings


def _before_rendezvous(rank: RankReport) -> bool:
    """True if a rank failed before the rendezvous."""
    return not rank.ended and (
        "rendezvous" in rank.phase or "importing" in rank.phase or rank.phase == "starting"
    )


def _describe_exit(rank: RankReport) -> str:
    if rank.exit is None:
        return "did not finish before the deadline"
    return (
        f"was killed (signal {-rank.exit})"
        if rank.exit < 0
        else f"ended with exit code {rank.exit}"
    )


def _probe_fix(node: Node, error: str, port: int) -> str:
    if "taken" in error:
        return (
            f"find its process with `sudo ss -ltnp 'sport = :{port}'` on {node.name},"
            " or choose another: `ports: {probe: PORT}` in the inventory"
        )
    return f"run `vlaunch check --group network`, then read `vlaunch logs {node.name}`"


def _rank_fix(measured: Measurement, node: Node, rank: RankReport) -> str:
    """Return the fix for a failed rank. Only a rank that could not open the head's port needs a
    firewall rule: late ranks got through.
    """
    inventory = measured.inventory
    head, port = inventory.head, inventory.ports.probe
    if "did not open" in rank.error:
        head_report = measured.reports.get(head.name)
        if head_report is None or head_report.error:
            return f"fix {head.name} first: no probe was listening there"
        return (
            f"allow TCP from {node.ip} to {head.ip}:{port}, then run `vlaunch check --only"
            " ports-reachable`"
        )
    if "importing" in rank.phase and rank.exit in (None, -9):
        return _TORCH_FIX.format(node=node.name)
    if "rendezvous" in rank.phase and rank.exit in (None, -9):
        return _NAMES_FIX
    if rank.exit == -9:
        return f"check {node.name} for out-of-memory kills: `sudo dmesg | grep -i oom`"
    return "run `vlaunch check --group network`"


def cell_findings(measured: Measurement, cells: Sequence[Cell]) -> list[Finding]:
    """Return findings for bad cells, one per cause: the cluster, a node, a pair or a direction."""
    misnamed, cells = _split_misnamed(_without_absent(measured, cells))
    bad = [cell for cell in cells if _is_bad(cell)]
    if len(cells) > 2 and len(bad) == len(cells) and _same_problem(bad):
        return [*misnamed, _cell_finding("", bad[0], measured, prefix="every pair: ")]
    sick = _failing_nodes(measured.inventory.nodes, cells)
    rest = [cell for cell in bad if not sick.keys() & {cell.source, cell.target}]
    return [
        *misnamed,
        *(
            _cell_finding(name, cell, measured, prefix="every pair with this node: ")
            for name, cell in sick.items()
        ),
        *(_cell_finding(where, cell, measured) for where, cell in _group_by_pair(rest).items()),
    ]


def _without_absent(measured: Measurement, cells: Sequence[Cell]) -> list[Cell]:
    """Leave out the cells of absent nodes, which have a finding of their own."""
    reports = measured.reports
    absent = {node.name for node in measured.inventory.nodes if _is_absent(reports.get(node.name))}
    return [cell for cell in cells if not absent & {cell.source, cell.target}]


def _is_bad(cell: Cell) -> bool:
    return cell.status in ("fail", "warn")


def _same_problem(bad: Sequence[Cell]) -> bool:
    """True if all cells have the same status and the same problem."""
    return len({(cell.status, _normalize_problem(cell.text)) for cell in bad}) == 1


def _failing_nodes(nodes: Sequence[Node], cells: Sequence[Cell]) -> dict[str, Cell]:
    """Return nodes whose cells all failed in the same way while others passed, each with one such
    cell. With two nodes the failing one is unknown.
    """
    if len(nodes) <= 2:
        return {}
    failing, of_node = {}, by_node(cells)
    for node in nodes:
        node_cells = of_node.get(node.name, [])
        bad = [cell for cell in node_cells if _is_bad(cell) and cell.status == "fail"]
        if len(bad) == len(node_cells) < len(cells) and _same_problem(bad):
            failing[node.name] = bad[0]
    return failing


def _group_by_pair(bad: Sequence[Cell]) -> dict[str, Cell]:
    """Group bad directions: `a ↔ b` for one problem both ways, else `a → b`; with a cell each."""
    directions = {(cell.source, cell.target): cell for cell in bad}
    grouped: dict[str, Cell] = {}
    for (source, target), cell in directions.items():
        back = directions.get((target, source))
        if back is None or _normalize_problem(back.text) != _normalize_problem(cell.text):
            grouped[f"{source} → {target}"] = cell
        elif f"{target} ↔ {source}" not in grouped:
            grouped[f"{source} ↔ {target}"] = cell
    return grouped


def _cell_finding(subject: str, cell: Cell, measured: Measurement, *, prefix: str = "") -> Finding:
    """Return a cell's finding for a node, pair or direction (the cluster without `subject`)."""
    text, evidence, fix = _explain(measured, cell)
    return Finding(node=subject, status=cell.status, text=prefix + text, evidence=evidence, fix=fix)


def _split_misnamed(cells: Sequence[Cell]) -> tuple[list[Finding], list[Cell]]:
    """Report nodes whose variable names a missing interface; return the other cells, too."""
    matches = {}
    for cell in cells:
        if match := _MISNAMED.fullmatch(cell.text):
            matches[match["node"] or cell.target] = match
    findings = [
        failed(
            name,
            match["text"],
            fix=(
                f"remove {match['variable']} from `env:` (vlaunch sets it for each node), or set"
                f" it under {name}'s own `env:`; check with `vlaunch check --only interface`"
            ),
        )
        for name, match in matches.items()
    ]
    return findings, [cell for cell in cells if not matches.keys() & {cell.source, cell.target}]


def _is_absent(report: Report | None) -> bool:
    """True if a node has no usable pairs: no report, or a rank that failed early."""
    if report is None or report.error or not report.ranks:
        return True
    return any(_before_rendezvous(rank) or (rank.exit or 0) < 0 for rank in report.ranks)


def _normalize_problem(text: str) -> str:
    """Return a problem without its figures, to compare the problems of two cells."""
    return re.sub(r"[\d.]+", "#", text)[:40]


def _explain(measured: Measurement, cell: Cell) -> tuple[str, str, str]:
    """Return the problem of a direction, the evidence for its likely cause, and the fix."""
    inventory = measured.inventory
    a, b = inventory.node(cell.source), inventory.node(cell.target)
    if not cell.transport.startswith("Gloo"):
        for name in (cell.source, cell.target):
            if (report := measured.reports.get(name)) is not None and (
                likely := _find_cause(report, cell)
            ) is not None:
                return (
                    f"{cell.text}: {likely[0]} on {name}",
                    likely[1],
                    _host_fix(name, likely[2], inventory.fabric),
                )
    if cell.bandwidth is None:
        fix = (
            f"allow TCP between {a.ip} and {b.ip} on all ports, then run `vlaunch check --group"
            " network`"
        )
        return cell.text, "", fix
    if "required" in cell.text:
        fix = (
            "check the RDMA devices: `vlaunch check --group rdma`;"
            f" with `network: {{require: {cell.level}}}`"
        )
        return cell.text, "", f"{fix} it is allowed"
    interface = b.interface or "eth0"
    fix = (
        f"compare the links: `vlaunch check --only link-speed`, and `ethtool {interface}` on"
        f" {a.name} and {b.name}"
    )
    return cell.text, "", fix


def _host_fix(name: str, fix: str, fabric: str) -> str:
    """Return the fix for a node; if the inventory sets the fabric, the host lacks the devices."""
    if fabric == "ethernet" or "set `network: {fabric:" not in fix:
        return fix
    return (
        f"run `sudo modprobe -a mlx5_ib ib_uverbs` on {name}, check `ls /dev/infiniband` there,"
        " then `vlaunch down` and `up`"
    )


def _find_cause(report: Report, cell: Cell) -> tuple[str, str, str] | None:
    """Return the cause of a link's level from NCCL's lines and the container; missing devices
    explain TCP, not a link that never connected.
    """
    reading = nccl_log.parse_log([report.log.encode()])
    connected = cell.bandwidth is not None
    return causes.find_cause(
        warnings=list(reading.warnings),
        level=cell.level,
        env=report.env,
        infiniband=report.infiniband if connected else None,
        memlock=report.memlock if connected else None,
    )
