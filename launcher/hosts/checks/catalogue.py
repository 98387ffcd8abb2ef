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
    wanted = [
        check
        for check in CATALOGUE
        if (not only and not group) or check.id in only or check.group in group
    ]
    return tuple(check for check in wanted if check.id not in skip)


def run(evidence: Evidence, ids: Collection[str] | None = None) -> list[Result]:
    """Judge the checks with these ids (all by default), in the catalogue's order.

    Every check gets at least one finding.

    A check that does not apply is one SKIP with its reason. A node that was not reached, or that
    failed a check that another one needs, is a SKIP there.
    """
    known: dict[str, list[Finding]] = {}
    return [
        Result(check=check, findings=tuple(found), status=worst(found))
        for check in CATALOGUE
        if ids is None or check.id in ids
        for found in [_findings(check, evidence, known)]
    ]


def _findings(check: Check, evidence: Evidence, known: dict[str, list[Finding]]) -> list[Finding]:
    """Return what came of a check; `known` keeps it for the checks that need it."""
    if check.id not in known:
        known[check.id] = _judged(check, evidence, known)
    return known[check.id]


def _judged(check: Check, evidence: Evidence, known: dict[str, list[Finding]]) -> list[Finding]:
    if reason := check.skip_reason(evidence.inventory):
        return [skipped("", reason)]
    blocked = _blocked(check, evidence, known)
    facts = {name: each for name, each in evidence.facts.items() if name not in blocked}
    found = [_told(check, each) for each in check.judge(replace(evidence, facts=facts))]
    judged = {each.node for each in found}
    found += [skipped(name, reason) for name, reason in blocked.items() if name not in judged]
    if not found:
        return [skipped("", "nothing was there to judge")]
    order = {node.name: at for at, node in enumerate(evidence.inventory.nodes)}
    return sorted(found, key=lambda each: order.get(each.node, len(order)))


def _blocked(check: Check, evidence: Evidence, known: dict[str, list[Finding]]) -> dict[str, str]:
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
    for need in check.needs:
        reason = f"it failed `{need}`, without which this cannot be judged"
        for finding in _findings(_BY_ID[need], evidence, known):
            if finding.status == "fail" and finding.node:
                blocked.setdefault(finding.node, reason)
    return blocked


def _told(check: Check, finding: Finding) -> Finding:
    """Give a green finding without words those of its check."""
    if finding.status == "pass" and not finding.text:
        return replace(finding, text=check.what)
    return finding


def _known(kind: str, words: Iterable[str], known: Collection[str]) -> None:
    strange = [word for word in words if word not in known]
    if not strange:
        return
    near = difflib.get_close_matches(strange[0].lower(), list(known), n=1, cutoff=0.5)
    raise RequestError(
        f"there is no {kind} `{strange[0]}`" + (f"; did you mean `{near[0]}`?" if near else ""),
        hint=f"{kind}s: {', '.join(known)}",
    )
