"""The catalogue of `vlaunch check`: all checks in order, their selection and results."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from launcher.core.check import Finding, Status, skipped, worst_status
from launcher.core.errors import RequestError
from launcher.core.similar import did_you_mean
from launcher.hosts.check import GROUPS, Check, Evidence
from launcher.hosts.checks import (
    addresses,
    container,
    docker,
    gpu,
    gpu_memory,
    host,
    model,
    pairs,
    ports,
    rdma,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """Result of one check: its findings per node (or for the cluster), and the worst status."""

    check: Check
    findings: tuple[Finding, ...]
    status: Status


_MODULES = (host, docker, gpu, gpu_memory, addresses, ports, pairs, rdma, container, model)
CATALOGUE: tuple[Check, ...] = tuple(
    sorted(
        (check for module in _MODULES for check in module.CHECKS),
        key=lambda check: GROUPS.index(check.group),
    )
)
_BY_ID = {check.id: check for check in CATALOGUE}
# Checks that `up` repeats before any change, in this order: without GPUs, Docker's GPU support does
# not matter.
ESSENTIAL = tuple(
    _BY_ID[check]
    for check in (
        *("docker", "docker-engine", "selinux", "accelerator", "gpu-runtime", "gpu-shared"),
        *("ports", "address", "rdma-devices", "disk", "state-dir"),
    )
)


def select_checks(
    only: Collection[str] = (), skip: Collection[str] = (), group: Collection[str] = ()
) -> tuple[Check, ...]:
    """Return the selected checks in catalogue order; raises RequestError for an unknown id or
    group.

    `only` and `group` add up; without either, all checks are selected. `skip` removes checks.
    """
    _require_valid("check", (*only, *skip), _BY_ID)
    _require_valid("group", group, GROUPS)
    selected = [
        check
        for check in CATALOGUE
        if (not only and not group) or check.id in only or check.group in group
    ]
    return tuple(check for check in selected if check.id not in skip)


def run_checks(evidence: Evidence, ids: Collection[str] | None = None) -> list[CheckOutcome]:
    """Run the checks with these ids (default: all) in catalogue order, each with at least one
    finding.

    A check that does not apply yields one SKIP with the reason; so does an unreachable node, or one
    that failed a required check.
    """
    cache: dict[str, list[Finding]] = {}
    return [
        CheckOutcome(check=check, findings=tuple(findings), status=worst_status(findings))
        for check in CATALOGUE
        if ids is None or check.id in ids
        for findings in [_cached_findings(check, evidence, cache)]
    ]


def _cached_findings(
    check: Check, evidence: Evidence, cache: dict[str, list[Finding]]
) -> list[Finding]:
    """Return a check's findings, from `cache` if it ran already for another check."""
    if check.id not in cache:
        cache[check.id] = _judge_check(check, evidence, cache)
    return cache[check.id]


def _judge_check(
    check: Check, evidence: Evidence, cache: dict[str, list[Finding]]
) -> list[Finding]:
    if reason := check.skip_reason(evidence.inventory):
        return [skipped("", reason)]
    blocked = _blocked_nodes(check, evidence, cache)
    facts = {name: host_facts for name, host_facts in evidence.facts.items() if name not in blocked}
    findings = [
        _with_default_text(check, finding)
        for finding in check.judge(replace(evidence, facts=facts))
    ]
    judged_nodes = {finding.node for finding in findings}
    findings += [
        skipped(name, reason) for name, reason in blocked.items() if name not in judged_nodes
    ]
    if not findings:
        return [skipped("", "nothing to check")]
    order = {node.name: position for position, node in enumerate(evidence.inventory.nodes)}
    return sorted(findings, key=lambda finding: order.get(finding.node, len(order)))


def _blocked_nodes(
    check: Check, evidence: Evidence, cache: dict[str, list[Finding]]
) -> dict[str, str]:
    """Return the nodes that a check cannot judge: unreachable, or a required check failed."""
    if check.id == "ssh":
        return {}
    blocked = {
        node.name: "unreachable: see `ssh`"
        for node in evidence.inventory.nodes
        if node.name not in evidence.facts
    }
    for required_id in check.needs:
        reason = f"it failed `{required_id}`, which this check requires"
        for finding in _cached_findings(_BY_ID[required_id], evidence, cache):
            if finding.status == "fail" and finding.node:
                blocked.setdefault(finding.node, reason)
    return blocked


def _with_default_text(check: Check, finding: Finding) -> Finding:
    """Use the check's title as the text of a PASS without one."""
    if finding.status == "pass" and not finding.text:
        return replace(finding, text=check.what)
    return finding


def _require_valid(kind: str, ids: Iterable[str], valid: Collection[str]) -> None:
    unknown = [name for name in ids if name not in valid]
    if not unknown:
        return
    suggestion = did_you_mean(unknown[0].lower(), valid, cutoff=0.5)
    raise RequestError(
        f"there is no {kind} `{unknown[0]}`{suggestion}",
        hint="`vlaunch check --list` shows all checks and groups",
    )
