"""What a log of NCCL proves about the network between nodes, and whether that is the level that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.checks import causes
from launcher.checks.shape import Finding
from launcher.model import Level, fold
from launcher.tools.nccl import Link, Reading

_ORDER = ("Socket", "RDMA", "GPUDirect", "MNNVL")  # worst first
_WORTH: dict[str, Level] = {"Socket": "any", "RDMA": "rdma", "GPUDirect": "gdrdma", "MNNVL": "gdrdma"}
_LEVELS: tuple[Level, ...] = ("any", "rdma", "gdrdma")
_WANTED = {"any": "any network", "rdma": "RDMA", "gdrdma": "GPUDirect RDMA"}
_HOW = (
    "take the log of a run that sends between nodes, on all nodes, with `NCCL_DEBUG=INFO` and "
    "`NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET`: NCCL connects at the first collective that crosses nodes, not at its start; "
    "or run `vlaunch check-nccl`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The worst inter-node network of a log: its name, whether it is GPUDirect, the level it is worth, and its links."""

    network: str
    gpudirect: bool
    level: Level
    links: tuple[Link, ...]

    @property
    def title(self) -> str:
        """Its name as in NCCL's own lines: `NET/IB/GDRDMA`, `P2P/MNNVL`."""
        return "P2P/MNNVL" if self.network == "MNNVL" else f"NET/{self.network}" + "/GDRDMA" * self.gpudirect


def worst(reading: Reading) -> Worst | None:
    """Return the worst network: TCP before RDMA, RDMA before GPUDirect, that before MNNVL; `None` without inter-node links."""
    links = reading.links
    kind = min((_kind(link) for link in links), key=_ORDER.index, default=None)
    if kind is None:
        return None
    those = tuple(link for link in links if _kind(link) == kind)
    return Worst(network=those[0].network, gpudirect=kind == "GPUDirect", level=_WORTH[kind], links=those)


def as_json(reading: Reading) -> dict[str, Any]:
    """Return what the log proves as plain data; `gpudirect` is `None` without network links, `network` without any link."""
    found = worst(reading)
    net = [link for link in reading.links if link.network != "MNNVL"]
    return {
        "network": found.network if found else None,
        "gpudirect": all(link.gpudirect for link in net) if net else None,
        "network_links": reading.network_links,
        "mnnvl": reading.mnnvl,
        "links": [
            {
                "from": link.source, "to": link.target, "channel": link.channel, "direction": link.direction or None,
                "network": link.network, "device": link.device, "gpudirect": link.gpudirect, "host": link.host,
            }
            for link in reading.links
        ],
        "local": dict(reading.local),
        "using": list(reading.using),
        "devices": {host: {str(index): name for index, name in names.items()} for host, names in reading.devices.items()},
        "groups": [list(hosts) for hosts in reading.groups],
        "warnings": list(reading.warnings),
        "versions": list(reading.versions),
        "lines": reading.lines,
        "truncated": reading.truncated,
    }  # fmt: skip


def judge(reading: Reading, require: Level | Literal["auto"], hardware: str = "") -> tuple[Finding, ...]:
    """Judge a log alone: whether it proves the level, whether it is of one job, and whether it is whole.

    Args:
        reading: the log, or several merged.
        require: the level; `auto` takes any RDMA, warns without GPUDirect, and fails TCP.
        hardware: the GPUs' name where it is known; GPUDirect is not expected of GB10, which shares its memory with the CPU.
    """
    found = []
    if len(reading.groups) > 1:
        jobs = " and ".join(fold(hosts) for hosts in reading.groups)
        text = f"these are logs of {len(reading.groups)} jobs that share no communicator: {jobs}"
        found.append(Finding(node="", status="fail", text=text, fix="give the logs of one job at a time"))
    network = worst(reading)
    found.append(_nothing(reading) if network is None else _level(reading, network, require, hardware))
    if reading.truncated:
        text = "the log is cut off: what comes after is not known"
        found.append(Finding(node="", status="warn", text=text, fix="take the whole log, once the job has ended"))
    return tuple(found)


def _kind(link: Link) -> str:
    if link.network in ("Socket", "MNNVL"):
        return link.network
    return "GPUDirect" if link.gpudirect else "RDMA"


def _nothing(reading: Reading) -> Finding:
    if not reading.lines:
        said = "it is empty"
    elif reading.local:
        said = "it has only links inside nodes: " + ", ".join(
            f"{count} {kind}" for kind, count in sorted(reading.local.items())
        )
    elif reading.using:
        said = f"`Using network {reading.using[0]}` is what NCCL intends, not what a link uses"
    elif reading.warnings or reading.versions:
        said = "NCCL wrote of no link"
    else:
        said = f"none of its {reading.lines} lines is of NCCL"
    why = causes.cause(warnings=reading.warnings, using=reading.using, env={})
    return Finding(
        node="", status="fail", text=f"the log proves nothing about the network between nodes: {said}",
        evidence=why[1] if why else "", fix=_HOW,
    )  # fmt: skip


def _level(reading: Reading, found: Worst, require: Level | Literal["auto"], hardware: str) -> Finding:
    total = len(reading.links)
    every = f"all {total} links" if total > 1 else "the one link"
    count = f"{len(found.links)} of {total} links" if len(found.links) < total else every
    is_said = f"{found.title}" + " (TCP)" * (found.level == "any") + f" on {count} between nodes"
    needed: Level = "rdma" if require == "auto" else require
    if _LEVELS.index(found.level) < _LEVELS.index(needed):
        return _below(reading, found, require, f"{is_said}, where {_WANTED[needed]} is required")
    if require == "auto" and found.level == "rdma":
        if "GB10" in hardware:
            return Finding(node="", status="pass", text=f"{is_said}; GPUDirect is not expected of {hardware}")
        why, evidence, fix, _ = _why(reading, found.links)
        fix = fix or "where these GPUs have no GPUDirect, say `--require rdma`"
        return Finding(node="", status="warn", text=f"{is_said}: GPUDirect is not used{why}", evidence=evidence, fix=fix)
    return Finding(node="", status="pass", text=is_said)


def _below(reading: Reading, found: Worst, require: Level | Literal["auto"], text: str) -> Finding:
    why, evidence, fix, host = _why(reading, found.links)
    hosts = [host] if host else sorted({link.host for link in found.links if link.host})
    allow = (
        "if these nodes have no RDMA, say `--require any`"
        if found.level == "any"
        else "if these GPUs have no GPUDirect, say `--require rdma`"
    )
    if not fix:
        fix = f"see what NCCL says of its devices with `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET`; {allow}"
    elif require == "auto":
        fix = f"{fix}; {allow}"
    return Finding(
        node=fold(hosts) if hosts else "",
        status="fail",
        text=f"{text} ({_ranks(found.links)}){why}",
        evidence=evidence,
        fix=fix,
    )


def _why(reading: Reading, links: Sequence[Link]) -> tuple[str, str, str, str]:
    """Return the likely cause as the end of a sentence, its evidence, the fix, and the host that it was found on."""
    hosts = sorted({link.host for link in links if link.host})
    using = tuple({link.network: None for link in links})
    direct = "Socket" not in using
    for host in hosts:
        told = [text for text in reading.warnings if host in reading.told_by.get(text, ())]
        if (why := causes.cause(warnings=told, using=using, env={}, gpudirect=direct)) is not None:
            everybody = len(hosts) > 1 and all(
                set(hosts) <= set(reading.told_by.get(text, ())) for text in told if text in why[1]
            )
            return f": {why[0]}" + f" on {host}" * (not everybody), why[1], why[2], "" if everybody else host
    if (why := causes.cause(warnings=reading.warnings, using=using, env={}, gpudirect=direct)) is not None:
        return f": {why[0]}", why[1], why[2], ""
    return "", "", "", ""


def _ranks(links: Sequence[Link]) -> str:
    pairs = [f"{a}→{b}" for a, b in dict.fromkeys((link.source, link.target) for link in links)]
    return "ranks " + ", ".join(pairs[:6]) + f" and {len(pairs) - 6} more" * (len(pairs) > 6)
