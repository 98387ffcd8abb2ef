"""RDMA devices on the hosts: used when they are there, named as they are called, with their links
up at one rate.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from launcher.checks.consistency import having, usual
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
from launcher.tools.expectations import Expectations
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
    words, exact = named(node), _exact(node)
    found = []
    for device in survey.rdma:
        for port in device.ports:
            if not words or any(
                _is(word, device, exact) and _port(word) in (None, port.number) for word in words
            ):
                found.append((device, port))
    return found


def _exact(node: Node) -> bool:
    """True when the names of a node's devices are whole ones, not prefixes."""
    return bool(node.hca) or node.env.get("NCCL_IB_HCA", "").startswith("=")


def _is(word: str, device: RdmaDevice, exact: bool) -> bool:
    name = word.partition(":")[0]
    return device.name == name if exact else device.name.startswith(name)


def _port(word: str) -> int | None:
    number = word.partition(":")[2]
    return int(number) if number.isdigit() else None


def _unused(evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(evidence)
    up = {name: active(survey) for name, survey in found.items()}
    have, lacking = [name for name in up if up[name]], [name for name in up if not up[name]]
    judge = warned if evidence.required == "any" else failed
    for name, ports in up.items():
        if well := _none_needed(evidence.inventory, ports, have):
            findings.append(passed(name, well))
        elif not ports:
            fix = (
                f"look for the port: `ibstat` on {name}; where {name} is to have none, leave it out"
                " or `--skip rdma-unused`"
            )
            text = f"no active RDMA port, while {fold(have)} has some: all are left to TCP"
            findings.append(judge(name, text, evidence=_states(found[name]), fix=fix))
        else:
            findings.append(_idle(evidence, name, lacking, judge))
    return findings


def _none_needed(inventory: Inventory, ports: Sequence[str], have: Sequence[str]) -> str:
    """Say why a node with these ports goes without RDMA rightly, and nothing where it does not;
    `have` are the nodes that have some.
    """
    cpu = inventory.accelerator == "cpu"
    if ports and cpu:
        return "processors talk over TCP (Gloo), which uses no RDMA"
    if ports and len(inventory.nodes) < 2:
        return "a single node needs no network"
    return "no active RDMA port" if cpu or not have else ""


def _idle(
    evidence: Evidence, name: str, lacking: list[str], judge: Callable[..., Finding]
) -> Finding:
    """Judge a node with active ports in a cluster that does not use them: nodes that lack some must
    have theirs first.
    """
    found, _ = surveys(evidence)
    survey = found[name]
    ports, fabric = ", ".join(active(survey)), f"`network: {{fabric: {_fabric(survey)}}}`"
    if lacking:
        text = f"has active RDMA ports, which stay unused because {fold(lacking)} has none: {ports}"
        return judge(name, text, fix=f"mend {fold(lacking)}, then set {fabric} in the inventory")
    unseen = [node.name for node in evidence.inventory.nodes if node.name not in found]
    if unseen:
        return skipped(name, f"has active RDMA ports; whether {fold(unseen)} has any is not known")
    return judge(
        name,
        f"has active RDMA ports that the cluster will not use: {ports}",
        fix=f"set {fabric} in the inventory{_plugin(survey)}",
    )


def apart(survey: Survey) -> bool:
    """Tell whether no GPU shares a PCIe switch with an RDMA device (`nvidia-smi topo -m`)."""
    levels = {level for gpu in survey.gpus for level in gpu.affinity.values()}
    return bool(levels) and not levels & {"PIX", "PXB"}


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
    return "\n".join(_state(device, port) for device in survey.rdma for port in device.ports)


def _state(device: RdmaDevice, port: RdmaPort) -> str:
    return f"{device.name}:{port.number} is {port.state or '?'} ({port.physical or '?'})"


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


def _names(node: Node, survey: Survey) -> Finding:
    words = named(node)
    if not words:
        return passed(node, "no device is named; NCCL chooses")
    lost = [word for word in words if not _has(survey, word, _exact(node))]
    if not lost:
        return passed(node, f"has {', '.join(words)}")
    return failed(
        node,
        f"has no RDMA device `{', '.join(lost)}`",
        evidence="devices: " + (", ".join(sorted(_ports(survey))) or "none"),
        fix=_right_names(node, survey),
    )


def _has(survey: Survey, word: str, exact: bool) -> bool:
    """True when a node has the device that a word names; where it is a whole name, the port too."""
    if not any(_is(word, device, exact) for device in survey.rdma):
        return False
    return not exact or _port(word) is None or word in _ports(survey)


def _ports(survey: Survey) -> set[str]:
    return {f"{device.name}:{port.number}" for device in survey.rdma for port in device.ports}


def _right_names(node: Node, survey: Survey) -> str:
    if survey.rdma:
        there = ", ".join(device.name for device in survey.rdma)
        return f"set `network: {{hca: [{there}]}}` for {node.name} alone"
    return (
        f"take `hca:` and NCCL_IB_HCA away from {node.name}, or load its driver: `sudo"
        " modprobe mlx5_ib`"
    )


def _names_none(inventory: Inventory) -> str:
    return (
        ""
        if any(named(node) for node in inventory.nodes)
        else "network: names no RDMA device; NCCL chooses"
    )


def _link(evidence: Evidence) -> Sequence[Finding]:
    found, findings = surveys(evidence)
    rates, down = dict[str, str](), dict[str, str]()
    for name, survey in found.items():
        node = evidence.inventory.node(name)
        ports = in_use(node, survey)
        if (trouble := _no_link(node, ports)) is not None:
            findings.append(trouble)
            continue
        rates[name] = _rates(ports)
        # A port that nobody named may be unused on purpose; it is told, so that nobody takes it for
        # counted.
        down[name] = "".join(
            f"; {device.name}:{port.number} is {port.state or '?'}" for device, port in _down(ports)
        )
    common = usual(rates)
    for name, text in rates.items():
        ports = in_use(evidence.inventory.node(name), found[name])
        slow = _slow(ports, evidence.expectations)
        if text != common and common is not None:
            told = f"{text}, while {having(rates, common)} has {common}{down[name]}"
            fix = (
                f"look at `rdma link` and `ibstat` on {name}: cable, switch port, `hca:` of the"
                " inventory"
            )
            findings.append(warned(name, told, fix=fix))
        elif slow:
            fix = f"look at the cable and the switch port: `ibstat` or `sudo ethtool` on {name}"
            findings.append(warned(name, f"{text}: {slow}{down[name]}", fix=fix))
        else:
            findings.append(passed(name, text + down[name]))
    return findings


def _no_link(node: Node, ports: Sequence[tuple[RdmaDevice, RdmaPort]]) -> Finding | None:
    """Judge that a link is up, and, where the inventory names devices, that all of theirs are."""
    if not ports:
        return skipped(node, "no RDMA device is there to judge; see `rdma-devices` and `hca-names`")
    down = _down(ports)
    if not down or (len(down) < len(ports) and not named(node)):
        return None
    told = ", ".join(_state(device, port) for device, port in down)
    fix = (
        f"look at `ibstat` on {node.name}: Polling means no cable or no switch, INIT that no subnet"
        " manager runs"
    )
    return failed(node, f"no RDMA link: {told}", fix=fix)


def _down(ports: Sequence[tuple[RdmaDevice, RdmaPort]]) -> list[tuple[RdmaDevice, RdmaPort]]:
    return [(device, port) for device, port in ports if port.state != "ACTIVE"]


def _rates(ports: Sequence[tuple[RdmaDevice, RdmaPort]]) -> str:
    """Return the links that are up, in words: `2 × 400 Gbit/s Ethernet`."""
    counted = Counter(
        f"{port.rate:g} Gbit/s {port.link_layer}".strip()
        for _, port in ports
        if port.state == "ACTIVE"
    )
    return ", ".join(f"{count} × {text}" for text, count in sorted(counted.items()))


def _slow(ports: Sequence[tuple[RdmaDevice, RdmaPort]], known: Expectations) -> str:
    for device, port in ports:
        expected = known.nic(device.model)
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
        skip_reason=lambda inventory: (
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
        skip_reason=_names_none,
    ),
    Check(
        id="rdma-link",
        what="the RDMA links are up, at one rate",
        why="NCCL skips a port that is not ACTIVE, and the slowest port sets the pace",
        judge=_link,
        group="rdma",
        skip_reason=no_rdma,
        needs=("rdma-devices", "hca-names"),
    ),
)
