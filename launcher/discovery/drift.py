"""What an inventory states that is no longer so: one line each, as `nodes[1] gpu02: gpus: 8 →
7`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.discovery import software
from launcher.discovery.discover import names
from launcher.discovery.shape import GID, DiscoveredNode, Discovery, Probed
from launcher.model import Accelerator, Inventory, Node
from launcher.tools.survey import RdmaDevice


def drift(
    inventory: Inventory, hosts: Sequence[Probed], found: Discovery | None
) -> tuple[str, ...]:
    """Compare what the inventory states with what the hosts said; `found` is what would be chosen
    now.

    Hosts are matched with nodes by name. What the inventory leaves open (no `hca`, no GID index)
    cannot drift. Without `found`, because nothing could be chosen, only what each host says by
    itself is compared.
    """
    told: Mapping[str, DiscoveredNode] = {node.name: node for node in found.nodes} if found else {}
    asked = dict(zip(names(hosts), hosts, strict=True))
    lines: list[str] = []
    if found is not None and found.fabric != inventory.fabric:
        lines.append(f"network: fabric: {inventory.fabric} → {found.fabric}")
    for at, node in enumerate(inventory.nodes):
        if node.name in asked:
            changes = _node(inventory, node, asked[node.name], told.get(node.name))
            lines += [f"nodes[{at}] {node.name}: {change}" for change in changes]
    return (*lines, *_strangers(inventory, told))


def _strangers(inventory: Inventory, told: Mapping[str, DiscoveredNode]) -> Iterator[str]:
    known = {node.name for node in inventory.nodes}
    for name, new in told.items():
        if name not in known:
            yield f"nodes: {name} is not in the inventory: ip {new.ip}, {new.gpus} GPUs"


def _node(
    inventory: Inventory, node: Node, host: Probed, now: DiscoveredNode | None
) -> Iterator[str]:
    if inventory.accelerator != "cpu":
        yield from _gpus(inventory.accelerator, node, host, now)
    yield from _address(node, host, now)
    if node.hca:
        yield from _hca(node, host, now)
    if now is not None and inventory.fabric == "roce":
        yield from _gid(node, now)


def _gpus(
    accelerator: Accelerator, node: Node, host: Probed, now: DiscoveredNode | None
) -> Iterator[str]:
    """Compare the GPUs that a node names with those that are there, or their number with that of
    those which would be chosen.
    """
    if node.gpu_ids and accelerator == "nvidia":
        there = {each for gpu in host.facts.gpus or () for each in (str(gpu.index), gpu.uuid)}
        for each in node.gpu_ids:
            if each not in there:
                yield f"gpus: {each} → gone"
    elif not node.gpu_ids:
        found = now.gpus if now is not None else software.gpus(host, accelerator)
        if found != node.gpus:
            yield f"gpus: {node.gpus} → {found}"


def _address(node: Node, host: Probed, now: DiscoveredNode | None) -> Iterator[str]:
    interfaces = [each.interface for each in host.facts.addresses or () if each.ip == node.ip]
    if not interfaces:
        yield f"ip: {node.ip} → {now.ip if now else 'on no interface'}"
        interfaces = [now.interface] if now else []
    if node.interface is not None and interfaces and node.interface not in interfaces:
        yield f"interface: {node.interface} → {interfaces[0]}"


def _hca(node: Node, host: Probed, now: DiscoveredNode | None) -> Iterator[str]:
    devices = {device.name: device for device in host.survey.rdma}
    stated = {each.partition(":")[0] for each in node.hca}
    for each in node.hca:
        name, _, number = each.partition(":")
        states = _states(devices.get(name), number)
        if not states:
            yield f"hca: {each} → gone"
        elif "ACTIVE" not in states:
            yield f"hca: {each} → {states[0]}"
    for each in now.hca if now else ():
        if each.partition(":")[0] not in stated:
            yield f"hca: {each} is not in the inventory"


def _states(device: RdmaDevice | None, number: str) -> list[str]:
    """Return the states of a device's ports, or of the one with this number."""
    ports = device.ports if device else ()
    return [port.state for port in ports if number in ("", str(port.number))]


def _gid(node: Node, now: DiscoveredNode) -> Iterator[str]:
    stated = node.env.get(GID)
    if stated is not None and stated != str(now.gid):
        there = now.gid if now.gid is not None else "no RoCE v2 over IPv4"
        yield f"{GID}: {stated} → {there}"
