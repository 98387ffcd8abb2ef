"""RDMA devices on the hosts: used when they are there, named as they are called, with their links
up at one rate.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from launcher.checks.alike import having, usual
from launcher.checks.host import no_rdma
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    failed,
    passed,
    skipped,
    surveyed,
    surveys,
    warned,
)
from launcher.model import Inventory, Node, fold
from launcher.tools.survey import RdmaDevice, RdmaPort, Survey


def named(node: Node) -> tuple[str, ...]:
    """Return the RDMA devices that the inventory names for a node, as written: `mlx5_0`,
    `mlx5_0:1`, or a prefix.
    """
    value = node.env.get("NCCL_IB_HCA", "")
    return node.hca or tuple(
        word for word in value.lstrip("^=").split(",") if word and not value.startswith("^")
    )


def in_use(node: Node, survey: Survey) -> list[tuple[RdmaDevice, RdmaPort]]:
    """Return the ports that NCCL may use on a node: those that are named, else all."""
    words, exact = named(node), bool(node.hca) or node.env.get("NCCL_IB_HCA", "").startswith("=")
    found = []
    for device in survey.rdma:
        for port in device.ports:
            if not words or any(
                _is(word, device, exact) and _port(word) in (None, port.number) for word in words
            ):
                found.append((device, port))
    return found


def _is(word: str, device: RdmaDevice, exact: bool) -> bool:
    name = word.partition(":")[0]
    return device.name == name if exact else device.name.startswith(name)


def _port(word: str) -> int | None:
    number = word.partition(":")[2]
    return int(number) if number.isdigit() else None


def _unused(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(inventory, evidence)
    up = {name: active(survey) for name, survey in found.items()}
    have, lacking = [name for name in up if up[name]], [name for name in up if not up[name]]
    unseen = [node.name for node in inventory.nodes if node.name not in up]
    judge = warned if evidence.required == "any" else failed
    for name, ports in up.items():
        if ports and inventory.accelerator == "cpu":
            findings.append(passed(name, "processors talk over TCP (Gloo), which uses no RDMA"))
        elif ports and len(inventory.nodes) < 2:
            findings.append(passed(name, "a single node needs no network"))
        elif not have or inventory.accelerator == "cpu":
            findings.append(passed(name, "no active RDMA port"))
        elif not ports:
            fix = (
                f"look for the port: `ibstat` on {name}; where {name} is to have none, leave it out"
                " or `--skip rdma-unused`"
            )
            findings.append(
                judge(
                    name,
                    f"no active RDMA port, while {fold(have)} has some: all are left to TCP",
                    evidence=_states(found[name]),
                    fix=fix,
                )
            )
        elif lacking:
            findings.append(
                judge(
                    name,
                    f"has active RDMA ports, which stay unused because {fold(lacking)} has none:"
                    f" {', '.join(ports)}",
                    fix=(
                        f"mend {fold(lacking)}, then set `network: {{fabric:"
                        f" {_fabric(found[name])}}}` in the inventory"
                    ),
                )
            )
        elif unseen:
            findings.append(
                skipped(name, f"has active RDMA ports; whether {fold(unseen)} has any is not known")
            )
        else:
            findings.append(
                judge(
                    name,
                    f"has active RDMA ports that the cluster will not use: {', '.join(ports)}",
                    fix=(
                        f"set `network: {{fabric: {_fabric(found[name])}}}` in the"
                        f" inventory{_plugin(found[name])}"
                    ),
                )
            )
    return findings


def active(survey: Survey) -> list[str]:
    """Return a node's RDMA ports whose link is up, such as `mlx5_0:1`, without those that are made
    of software.
    """
    return [
        f"{device.name}:{port.number}"
        for device in survey.rdma
        if not _SOFTWARE.match(device.name)
        for port in device.ports
        if port.state == "ACTIVE"
    ]


# Soft RoCE and Soft iWARP, by the names that rdma-core's documentation gives them: RDMA in form,
# sockets in fact.
_SOFTWARE = re.compile(r"rxe|siw")


def _states(survey: Survey) -> str:
    return "\n".join(
        f"{device.name}:{port.number} is {port.state or '?'} ({port.physical or '?'})"
        for device in survey.rdma
        for port in device.ports
    )


def _fabric(survey: Survey) -> str:
    return (
        "roce"
        if any(_is_ethernet(port) for device in survey.rdma for port in device.ports)
        else "infiniband"
    )


def _plugin(survey: Survey) -> str:
    """Say what a fabric needs besides the devices when it is neither InfiniBand nor Ethernet, as
    AWS's EFA is.
    """
    layers = {
        port.link_layer for device in survey.rdma for port in device.ports if port.state == "ACTIVE"
    }
    known = layers & {"InfiniBand", "Ethernet", ""}
    return "" if known else ", with an image that has NCCL's plugin for it (aws-ofi-nccl for EFA)"


def _is_ethernet(port: RdmaPort) -> bool:
    return port.state == "ACTIVE" and port.link_layer == "Ethernet"


def _names(inventory: Inventory, node: Node, survey: Survey) -> Finding:
    words = named(node)
    if not words:
        return passed(node, "no device is named; NCCL chooses")
    exact = bool(node.hca) or node.env.get("NCCL_IB_HCA", "").startswith("=")
    there = {f"{device.name}:{port.number}" for device in survey.rdma for port in device.ports}
    lost = [
        word
        for word in words
        if not any(_is(word, device, exact) for device in survey.rdma)
        or (_port(word) is not None and exact and word not in there)
    ]
    if not lost:
        return passed(node, f"has {', '.join(words)}")
    has = [device.name for device in survey.rdma]
    return failed(
        node,
        f"has no RDMA device `{', '.join(lost)}`",
        evidence="devices: " + (", ".join(sorted(there)) or "none"),
        fix=(
            f"set `network: {{hca: [{', '.join(has)}]}}` for {node.name} alone"
            if has
            else (
                f"take `hca:` and NCCL_IB_HCA away from {node.name}, or load its driver: `sudo"
                " modprobe mlx5_ib`"
            )
        ),
    )


def _names_none(inventory: Inventory) -> str:
    return (
        ""
        if any(named(node) for node in inventory.nodes)
        else "network: names no RDMA device; NCCL chooses"
    )


def _link(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(inventory, evidence)
    rates, dead = dict[str, str](), dict[str, str]()
    for name, survey in found.items():
        node = inventory.node(name)
        ports = in_use(node, survey)
        up = [(device, port) for device, port in ports if port.state == "ACTIVE"]
        down = [(device, port) for device, port in ports if port.state != "ACTIVE"]
        if not ports:
            findings.append(
                skipped(
                    name, "no RDMA device is there to judge; see `rdma-devices` and `hca-names`"
                )
            )
        elif not up or (down and named(node)):
            findings.append(_down(name, down))
        else:
            counted = Counter(f"{port.rate:g} Gbit/s {port.link_layer}".strip() for _, port in up)
            rates[name] = ", ".join(f"{count} × {text}" for text, count in sorted(counted.items()))
            # A port that nobody named may be unused on purpose; it is told, so that nobody takes it
            # for counted.
            dead[name] = "".join(
                f"; {device.name}:{port.number} is {port.state or '?'}" for device, port in down
            )
    common = usual(rates)
    for name, text in rates.items():
        slow = _slow(inventory.node(name), found[name], evidence)
        if text != common and common is not None:
            fix = (
                f"look at `rdma link` and `ibstat` on {name}: cable, switch port, `hca:` of the"
                " inventory"
            )
            findings.append(
                warned(
                    name, f"{text}, while {having(rates, common)} has {common}{dead[name]}", fix=fix
                )
            )
        elif slow:
            fix = f"look at the cable and the switch port: `ibstat` or `sudo ethtool` on {name}"
            findings.append(warned(name, f"{text}: {slow}{dead[name]}", fix=fix))
        else:
            findings.append(passed(name, text + dead[name]))
    return findings


def _down(name: str, down: Sequence[tuple[RdmaDevice, RdmaPort]]) -> Finding:
    told = ", ".join(
        f"{device.name}:{port.number} is {port.state or '?'} ({port.physical or '?'})"
        for device, port in down
    )
    return failed(
        name,
        f"no RDMA link: {told}",
        fix=(
            f"look at `ibstat` on {name}: Polling means no cable or no switch, INIT that no subnet"
            " manager runs"
        ),
    )


def _slow(node: Node, survey: Survey, evidence: Evidence) -> str:
    for device, port in in_use(node, survey):
        expected = evidence.expectations.nic(device.model)
        if port.state == "ACTIVE" and expected and expected.rate and 0 < port.rate < expected.rate:
            return f"{device.name} is a {expected.model}, which can do {expected.rate:g} Gbit/s"
    return ""


CHECKS = (
    Check(
        id="rdma-unused",
        what="no RDMA is left unused",
        why=(
            "with `fabric: ethernet` the containers get no RDMA device, and NCCL uses TCP without a"
            " word"
        ),
        judge=_unused,
        group="rdma",
        spared=lambda inventory: (
            "" if inventory.fabric == "ethernet" else "network: fabric says to use RDMA"
        ),
    ),
    Check(
        id="hca-names",
        what="the RDMA devices that the inventory names are there",
        why=(
            "names of the head's devices, copied to a node that calls them otherwise, let NCCL fall"
            " back to TCP"
        ),
        judge=surveyed(_names),
        group="rdma",
        spared=_names_none,
    ),
    Check(
        id="rdma-link",
        what="the RDMA links are up, at one rate",
        why="NCCL skips a port that is not ACTIVE, and the slowest port sets the pace",
        judge=_link,
        group="rdma",
        spared=no_rdma,
        needs=("rdma-devices", "hca-names"),
    ),
)
