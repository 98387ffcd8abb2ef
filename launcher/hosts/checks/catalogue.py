"""The catalogue of `vlaunch check`: every check in order, which of them to run, and what came of
it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from launcher.core.check import Finding, Status, skipped, worst
from launcher.core.errors import RequestError
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
class Result:
    """What came of one check: a finding for each node (or one for the cluster), and the worst of
    their statuses.
    """

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
# What `up` judges again before it writes anything, in this order: without a GPU it does not matter
# whether Docker can expose one.
ESSENTIAL = tuple(
    _BY_ID[check]
    for check in (
        *("docker", "docker-engine", "selinux", "accelerator", "gpu-runtime", "gpu-shared"),
        *("ports", "address", "rdma-devices", "disk", "state-dir"),
    )
)


def select(
    only: Collection[str] = (), skip: Collection[str] = (), group: Collection[str] = ()
) -> tuple[Check, ...]:
    """Return the checks to run, in the catalogue's order; raises RequestError for an id or group
    that is not there.

    `only` and `group` add up; with neither, all checks run. `skip` takes away from what is left.
    """
    _known("check", (*only, *skip), _BY_ID)
    _known("group", group, GROUPS)
    selected = [
        check
        for check in CATALOGUE
        if (not only and not group) or check.id in only or check.group in group
    ]
    return tuple(check for check in selected if check.id not in skip)


def run(evidence: Evidence, ids: Collection[str] | None = None) -> list[Result]:
    """Judge the checks with these ids (all by default), in the catalogue's order.

    Every check gets at least one finding.

    A check that does not apply is one SKIP with its reason. A node that was not reached, or that
    failed a check that another one needs, is a SKIP there.
    """
    cache: dict[str, list[Finding]] = {}
    return [
        Result(check=check, findings=tuple(findings), status=worst(findings))
        for check in CATALOGUE
        if ids is None or check.id in ids
        for findings in [_findings(check, evidence, cache)]
    ]


def _findings(check: Check, evidence: Evidence, cache: dict[str, list[Finding]]) -> list[Finding]:
    """Return what came of a check; `known` keeps it for the checks that need it."""
    if check.id not in cache:
        cache[check.id] = _judged(check, evidence, cache)
    return cache[check.id]


def _judged(check: Check, evidence: Evidence, cache: dict[str, list[Finding]]) -> list[Finding]:
    if reason := check.skip_reason(evidence.inventory):
        return [skipped("", reason)]
    blocked = _blocked(check, evidence, cache)
    facts = {name: host_facts for name, host_facts in evidence.facts.items() if name not in blocked}
    findings = [_told(check, finding) for finding in check.judge(replace(evidence, facts=facts))]
    judged_nodes = {finding.node for finding in findings}
    findings += [
        skipped(name, reason) for name, reason in blocked.items() if name not in judged_nodes
    ]
    if not findings:
        return [skipped("", "nothing was there to judge")]
    order = {node.name: at for at, node in enumerate(evidence.inventory.nodes)}
    return sorted(findings, key=lambda finding: order.get(finding.node, len(order)))


def _blocked(check: Check, evidence: Evidence, cache: dict[str, list[Finding]]) -> dict[str, str]:
    """Return the nodes that a check cannot judge, with the reason: not reached, or they failed what
    it needs.
    """
    if check.id == "ssh":
        return {}
    blocked = {
        node.name: "it was not reached: see `ssh`"
        for node in evidence.inventory.nodes
        if node.name not in evidence.facts
    }
    for required_id in check.needs:
        reason = f"it failed `{required_id}`, without which this cannot be judged"
        for finding in _findings(_BY_ID[required_id], evidence, cache):
            if finding.status == "fail" and finding.node:
                blocked.setdefault(finding.node, reason)
    return blocked


def _told(check: Check, finding: Finding) -> Finding:
    """Give a green finding without words those of its check."""
    if finding.status == "pass" and not finding.text:
        return replace(finding, text=check.what)
    return finding


def _known(kind: str, ids: Iterable[str], valid: Collection[str]) -> None:
    unknown = [name for name in ids if name not in valid]
    if not unknown:
        return
    similar = difflib.get_close_matches(unknown[0].lower(), list(valid), n=1, cutoff=0.5)
    raise RequestError(
        f"there is no {kind} `{unknown[0]}`"
        + (f"; did you mean `{similar[0]}`?" if similar else ""),
        hint=f"{kind}s: {', '.join(valid)}",
    )
