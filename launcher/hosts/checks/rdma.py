"""Checks of RDMA: unused devices, names, links, RoCE GIDs and GPUDirect."""

import re
from collections import Counter
from collections.abc import Sequence

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node, fold
from launcher.hosts.check import (
    NOT_SURVEYED,
    Check,
    Evidence,
    Host,
    collect_surveys,
    per_host,
    per_survey,
    skip_on_cpu,
    skip_without_rdma,
    uniform_value,
)
from launcher.tools.host.survey import Gid, RdmaDevice, RdmaPort, Survey

_Port = tuple[RdmaDevice, RdmaPort]

# Soft RoCE and Soft iWARP (names as in rdma-core's documentation) use sockets.
_SOFTWARE = re.compile(r"rxe|siw")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def _judge_devices(host: Host) -> Finding | None:
    fabric = host.inventory.fabric
    if fabric == "ethernet" or host.facts.infiniband:
        return None
    return failed(
        host,
        f"no /dev/infiniband, though the inventory says {fabric}",
        evidence=host.facts.part_errors.get("infiniband", ""),
        fix=(
            "load the drivers (`sudo modprobe mlx5_ib ib_uverbs`), or set `network: {fabric:"
            " ethernet}`"
        ),
    )


def lacks_shared_switch(survey: Survey) -> bool:
    """Return whether no GPU shares a PCIe switch with an RDMA device (`nvidia-smi topo -m`)."""
    levels = {level for gpu in survey.gpus for level in gpu.affinity.values()}
    return bool(levels) and not levels & {"PIX", "PXB"}


def active_port_names(survey: Survey) -> list[str]:
    """Return a node's active hardware RDMA ports, such as `mlx5_0:1`."""
    ports = _active_ports(_all_ports(survey))
    return [_port_name(device, port) for device, port in ports if not _SOFTWARE.match(device.name)]


def _active_ports(ports: Sequence[_Port]) -> list[_Port]:
    return [(device, port) for device, port in ports if port.state == "ACTIVE"]


def _all_ports(survey: Survey) -> list[_Port]:
    return [(device, port) for device in survey.rdma for port in device.ports]


def _port_name(device: RdmaDevice, port: RdmaPort) -> str:
    return f"{device.name}:{port.number}"


def _judge_unused(evidence: Evidence) -> Sequence[Finding]:
    surveys_by_node, findings = collect_surveys(evidence)
    inventory = evidence.inventory
    active_by_node = {name: active_port_names(survey) for name, survey in surveys_by_node.items()}
    with_ports = [name for name, ports in active_by_node.items() if ports]
    without = [name for name, ports in active_by_node.items() if not ports]
    unsurveyed = [node.name for node in inventory.nodes if node.name not in surveys_by_node]
    judge = warned if evidence.required == "any" else failed
    for name, ports in active_by_node.items():
        survey, port_list = surveys_by_node[name], ", ".join(ports)
        fabric = f"`network: {{fabric: {_fabric(survey)}}}`"
        if reason := _reason_unneeded(inventory, ports, with_ports):
            findings.append(passed(name, reason))
        elif not ports:
            fix = (
                f"check the port with `ibstat` on {name}; if {name} has none by design, remove it"
                " from the inventory or use `--skip rdma-unused`"
            )
            states = "\n".join(_describe_state(*port) for port in _all_ports(survey))
            text = f"no active RDMA port, while {fold(with_ports)} has some: all nodes use TCP"
            findings.append(judge(name, text, evidence=states, fix=fix))
        elif without:
            fix = f"repair {fold(without)}, then set {fabric} in the inventory"
            why = f"unused because {fold(without)} has none: {port_list}"
            findings.append(judge(name, f"has active RDMA ports, {why}", fix=fix))
        elif unsurveyed:
            text = f"has active RDMA ports; those of {fold(unsurveyed)} are unknown"
            findings.append(skipped(name, text))
        else:
            fix = f"set {fabric} in the inventory{_plugin_hint(survey)}"
            text = f"has active RDMA ports that the cluster will not use: {port_list}"
            findings.append(judge(name, text, fix=fix))
    return findings


def _reason_unneeded(inventory: Inventory, ports: Sequence[str], with_ports: Sequence[str]) -> str:
    """Return the reason if a node needs no RDMA, else an empty string."""
    cpu = inventory.accelerator == "cpu"
    if ports and cpu:
        return "CPUs communicate over TCP (Gloo), which uses no RDMA"
    if ports and len(inventory.nodes) < 2:
        return "a single node needs no network"
    return "no active RDMA port" if cpu or not with_ports else ""


def _describe_state(device: RdmaDevice, port: RdmaPort) -> str:
    return f"{_port_name(device, port)} is {port.state or '?'} ({port.physical or '?'})"


def _fabric(survey: Survey) -> str:
    return "roce" if "Ethernet" in _link_layers(survey) else "infiniband"


def _plugin_hint(survey: Survey) -> str:
    """Return a hint for fabrics that are neither InfiniBand nor Ethernet, such as AWS EFA."""
    standard = _link_layers(survey) & {"InfiniBand", "Ethernet", ""}
    hint = ", with an image that has NCCL's plugin for it (aws-ofi-nccl for EFA)"
    return "" if standard else hint


def _link_layers(survey: Survey) -> set[str]:
    return {port.link_layer for _, port in _active_ports(_all_ports(survey))}


def ports_in_use(node: Node, survey: Survey) -> list[_Port]:
    """Return the ports that NCCL may use: the configured ones, else all."""
    names, exact = _named_devices(node), _has_exact_names(node)
    return [
        (device, port)
        for device, port in _all_ports(survey)
        if not names
        or any(
            _matches_name(name, device, exact) and name.partition(":")[2] in ("", str(port.number))
            for name in names
        )
    ]


def _named_devices(node: Node) -> tuple[str, ...]:
    """Return a node's configured RDMA devices, as written: `mlx5_0`, `mlx5_0:1`, or a prefix."""
    value = node.env.get("NCCL_IB_HCA", "")
    return node.hca or tuple(
        name for name in value.lstrip("^=").split(",") if name and not value.startswith("^")
    )


def _has_exact_names(node: Node) -> bool:
    return bool(node.hca) or node.env.get("NCCL_IB_HCA", "").startswith("=")


def _matches_name(pattern: str, device: RdmaDevice, exact: bool) -> bool:
    name = pattern.partition(":")[0]
    return device.name == name if exact else device.name.startswith(name)


def _judge_names(node: Node, survey: Survey) -> Finding:
    names = _named_devices(node)
    if not names:
        return passed(node, "no device is named; NCCL chooses")
    missing = [name for name in names if not _has_device(survey, name, _has_exact_names(node))]
    if not missing:
        return passed(node, f"has {', '.join(names)}")
    fix = (
        f"remove `hca:` and NCCL_IB_HCA from {node.name}, or load its driver: `sudo modprobe"
        " mlx5_ib`"
    )
    if survey.rdma:
        available = ", ".join(device.name for device in survey.rdma)
        fix = f"set `network: {{hca: [{available}]}}` for {node.name} alone"
    ports = sorted({_port_name(*port) for port in _all_ports(survey)})
    return failed(
        node,
        f"has no RDMA device `{', '.join(missing)}`",
        evidence="devices: " + (", ".join(ports) or "none"),
        fix=fix,
    )


def _has_device(survey: Survey, name: str, exact: bool) -> bool:
    """True if a node has the device and, for a complete name, the port."""
    if not any(_matches_name(name, device, exact) for device in survey.rdma):
        return False
    return (
        not exact or ":" not in name or name in {_port_name(*port) for port in _all_ports(survey)}
    )


def _skip_without_names(inventory: Inventory) -> str:
    named = any(_named_devices(node) for node in inventory.nodes)
    return "" if named else "network: names no RDMA device; NCCL chooses"


def _link_rates(host: Host) -> str | Finding:
    """Return a summary of a node's active links: `2 × 400 Gbit/s Ethernet`."""
    if host.survey is None:
        return skipped(host, NOT_SURVEYED)
    node, ports = host.node, ports_in_use(host.node, host.survey)
    if not ports:
        return skipped(node, "no RDMA device to check; see `rdma-devices` and `hca-names`")
    active = _active_ports(ports)
    # Ports that are not configured may be unused on purpose.
    if not active or (len(active) < len(ports) and _named_devices(node)):
        fix = (
            f"run `ibstat` on {node.name}: Polling means no cable or switch, INIT means no subnet"
            " manager"
        )
        states = ", ".join(_describe_state(*port) for port in ports if port not in active)
        return failed(node, f"no RDMA link: {states}", fix=fix)
    counts = Counter(f"{port.rate:g} Gbit/s {port.link_layer}".strip() for _, port in active)
    return ", ".join(f"{count} × {text}" for text, count in sorted(counts.items()))


def _other_rates(host: Host, rates: str, common: str, others: str) -> Finding:
    fix = f"check `rdma link` and `ibstat` on {host.name}: cable, switch port, `hca:` in the"
    text = f"{rates}, while {others} has {common}{_describe_down_ports(host)}"
    return warned(host, text, fix=f"{fix} inventory")


def _usual_rates(host: Host, rates: str) -> Finding:
    for device, port in _active_ports(ports_in_use(host.node, host.survey)) if host.survey else ():
        expected = host.evidence.expectations.nic(device.model)
        if expected and expected.rate and 0 < port.rate < expected.rate:
            slow = f"{device.name} is a {expected.model}, which can do {expected.rate:g} Gbit/s"
            fix = "check the cable and the switch port: `ibstat` or `sudo ethtool` on"
            return warned(
                host, f"{rates}: {slow}{_describe_down_ports(host)}", fix=f"{fix} {host.name}"
            )
    return passed(host, rates + _describe_down_ports(host))


def _describe_down_ports(host: Host) -> str:
    """Return a list of the ports that are down, which are not counted."""
    ports = ports_in_use(host.node, host.survey) if host.survey else []
    down = [port for port in ports if port not in _active_ports(ports)]
    return "".join(f"; {_port_name(*port)} is {port[1].state or '?'}" for port in down)


def _gid_index(host: Host) -> int | Finding:
    if host.survey is None:
        return skipped(host, NOT_SURVEYED)
    used = _active_ports(ports_in_use(host.node, host.survey))
    ports = [(device, port) for device, port in used if port.link_layer == "Ethernet"]
    if not ports:
        return skipped(host, "no active RoCE port to check")
    configured = host.node.env.get("NCCL_IB_GID_INDEX", "")
    if re.fullmatch(r"\d+", configured):
        return _judge_gid_index(host.name, ports, int(configured)) or int(configured)
    for device, port in ports:
        if _best_gid_index(port) < 0:
            netdev = next(iter(device.netdevs), "its interface")
            return failed(
                host,
                f"{_port_name(device, port)} has no RoCE v2 GID",
                evidence=_format_gids(port.gids),
                fix=(
                    f"assign an address to {netdev} of {host.name}: `sudo ip addr add"
                    f" ADDRESS/PREFIX dev {netdev}`"
                ),
            )
    return _best_gid_index(ports[0][1])


def _judge_gid_index(name: str, ports: Sequence[_Port], index: int) -> Finding | None:
    """Judge that the configured index is a RoCE v2 GID on every port in use."""
    for device, port in ports:
        gid = next((gid for gid in port.gids if gid.index == index), None)
        if gid is None:
            problem = "is empty"
        elif gid.kind == "RoCE v2" and (not device.netdevs or gid.netdev in ("", *device.netdevs)):
            continue
        else:
            problem = f"is {gid.kind or 'of an unknown kind'}" + f" on {gid.netdev}" * bool(
                gid.netdev
            )
        best = _best_gid_index(port)
        fix = "remove NCCL_IB_GID_INDEX from `env:`"
        return failed(
            name,
            f"NCCL_IB_GID_INDEX={index}, but GID {index} of {_port_name(device, port)} {problem}",
            evidence=_format_gids(port.gids),
            fix=f"{fix}, or set it to {best} for {name}" if best >= 0 else fix,
        )
    return None


def _other_gid(host: Host, index: int, common: int, others: str) -> Finding:
    return warned(
        host,
        f"its RoCE v2 GID has index {index}, while {others} has {common}",
        fix=(
            "remove NCCL_IB_GID_INDEX from `env:`: NCCL 2.21 and newer choose for each port; with"
            f" an older one, give {host.name} its own: `env: {{NCCL_IB_GID_INDEX: {index}}}`"
        ),
    )


def _best_gid_index(port: RdmaPort) -> int:
    """Return the index of a RoCE v2 GID for an IPv4 address, else of any RoCE v2 GID, else -1."""
    candidates = [gid for gid in port.gids if gid.kind == "RoCE v2"]
    mapped = [
        gid for gid in candidates if re.match(r"(?:0000:){5}ffff:|::ffff:", gid.value.lower())
    ]
    return next((gid.index for gid in (*mapped, *candidates)), -1)


def _format_gids(gids: Sequence[Gid]) -> str:
    return "\n".join(
        f"{gid.index}: {gid.value} {gid.kind} {gid.netdev}".rstrip() for gid in gids[:8]
    )


def _skip_without_roce(inventory: Inventory) -> str:
    fabric = inventory.fabric
    return "" if fabric == "roce" else f"network: fabric is {fabric}; GID indexes are for RoCE"


def _judge_gpudirect(host: Host) -> Finding:
    node, survey, expected = host.node, host.survey, host.expected_gpu
    if expected is not None and not expected.gpudirect:
        return skipped(node, f"{expected.model} has no GPUDirect RDMA, and none is expected")
    if survey is None or not survey.modules:
        return skipped(node, "the list of kernel modules is unknown")
    loaded = next((name for name in _PEER_MODULES if name in survey.modules), None)
    if loaded is not None:
        return passed(node, f"`{loaded}` is loaded")
    judge = failed if host.evidence.required == "gdrdma" else warned
    text = "`nvidia_peermem` is not loaded"
    fix = f"run `sudo modprobe nvidia_peermem` on {node.name}, then `vlaunch check-nccl`"
    version = re.match(r"(\d+)\.(\d+)", survey.kernel)
    if version is not None and (int(version[1]), int(version[2])) >= (5, 12):
        judge = warned
        text += "; the kernel may use DMA-BUF instead, which only `vlaunch check-nccl` can verify"
    return judge(node, text, evidence=survey.kernel, fix=fix)


def _skip_gpudirect(inventory: Inventory) -> str:
    amd = "ROCm has its own module; `vlaunch check-nccl` verifies it"
    return (
        skip_without_rdma(inventory)
        or skip_on_cpu(inventory)
        or amd * (inventory.accelerator == "amd")
    )


CHECKS = (
    Check(
        id="rdma-devices",
        what="RDMA devices exist",
        why="without them, NCCL silently falls back to TCP",
        judge=per_host(_judge_devices),
        skip_reason=skip_without_rdma,
        group="rdma",
    ),
    Check(
        id="rdma-unused",
        what="all active RDMA ports are used",
        why=(
            "with `fabric: ethernet` the containers get no RDMA device, and NCCL silently uses TCP"
        ),
        judge=_judge_unused,
        group="rdma",
        skip_reason=lambda inventory: (
            "" if inventory.fabric == "ethernet" else "`fabric:` already selects RDMA"
        ),
    ),
    Check(
        id="hca-names",
        what="the RDMA devices in the inventory exist",
        why=(
            "device names of the head that do not exist on another node make NCCL fall back to TCP"
        ),
        judge=per_survey(_judge_names),
        group="rdma",
        skip_reason=_skip_without_names,
    ),
    Check(
        id="rdma-link",
        what="the RDMA links are up and equally fast",
        why="NCCL skips a port that is not ACTIVE, and the slowest port limits all others",
        judge=uniform_value(_link_rates, _other_rates, _usual_rates),
        group="rdma",
        skip_reason=skip_without_rdma,
        needs=("rdma-devices", "hca-names"),
    ),
    Check(
        id="gid-index",
        what="NCCL will use the same RoCE v2 GID index on all nodes",
        why="RoCE v1 and empty GIDs cannot be routed: connections fail or fall back to TCP",
        judge=uniform_value(
            _gid_index, _other_gid, lambda host, index: passed(host, f"GID index {index}, RoCE v2")
        ),
        group="rdma",
        skip_reason=_skip_without_roce,
        needs=("rdma-devices", "hca-names"),
    ),
    Check(
        id="gpudirect",
        what="network cards can access GPU memory",
        why="without GPUDirect RDMA, every byte between nodes goes through the host's memory",
        judge=per_host(_judge_gpudirect),
        group="rdma",
        skip_reason=_skip_gpudirect,
        needs=("rdma-devices",),
    ),
)
