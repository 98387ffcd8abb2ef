"""What an inventory states that is no longer so: one line each, as `nodes[1] gpu02: gpus: 8 →
7`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.discovery.discover import names
from launcher.discovery.shape import GID, Found, FoundNode, Probed
from launcher.model import Inventory, Node


def drift(inventory: Inventory, hosts: Sequence[Probed], found: Found | None) -> tuple[str, ...]:
    """Compare what the inventory states with what the hosts said; `found` is what would be chosen
    now.

    Hosts are matched with nodes by name. What the inventory leaves open (no `hca`, no GID index)
    cannot drift. Without `found`, because nothing could be chosen, only what each host says by
    itself is compared.
    """
    told: Mapping[str, FoundNode] = {node.name: node for node in found.nodes} if found else {}
    asked = dict(zip(names(hosts), hosts, strict=True))
    lines = (
        []
        if found is None or found.fabric == inventory.fabric
        else [f"network: fabric: {inventory.fabric} → {found.fabric}"]
    )
    for at, node in enumerate(inventory.nodes):
        if node.name in asked:
            changes = _node(inventory, node, asked[node.name], told.get(node.name))
            lines += [f"nodes[{at}] {node.name}: {change}" for change in changes]
    known = {node.name for node in inventory.nodes}
    for name, new in told.items():
        if name not in known:
            lines.append(f"nodes: {name} is not in the inventory: ip {new.ip}, {new.gpus} GPUs")
    return tuple(lines)


def _node(inventory: Inventory, node: Node, host: Probed, now: FoundNode | None) -> Iterator[str]:
    if inventory.accelerator != "cpu":
        facts = host.facts
        there = (
            len(facts.gpus or ())
            if inventory.accelerator == "nvidia"
            else max(host.stock.amd_gpus, facts.amd_gpus or 0)
        )
        if there != node.gpus:
            yield f"gpus: {node.gpus} → {there}"
    where = [each.interface for each in host.facts.addresses or () if each.ip == node.ip]
    if not where:
        yield f"ip: {node.ip} → {now.ip if now else 'on no interface'}"
        where = [now.interface] if now else []
    if node.interface is not None and where and node.interface not in where:
        yield f"interface: {node.interface} → {where[0]}"
    if node.hca:
        yield from _hca(node, host, now)
    stated, index = node.env.get(GID), now.gid if now else None
    if (
        stated is not None
        and now is not None
        and inventory.fabric == "roce"
        and stated != str(index)
    ):
        yield f"{GID}: {stated} → {index if index is not None else 'no RoCE v2 over IPv4'}"


def _hca(node: Node, host: Probed, now: FoundNode | None) -> Iterator[str]:
    devices = {device.name: device for device in host.survey.rdma}
    stated = {each.partition(":")[0] for each in node.hca}
    for each in node.hca:
        name, _, number = each.partition(":")
        device = devices.get(name)
        states = (
            [port.state for port in device.ports if number in ("", str(port.number))]
            if device
            else []
        )
        if not states:
            yield f"hca: {each} → gone"
        elif "ACTIVE" not in states:
            yield f"hca: {each} → {states[0]}"
    for each in now.hca if now else ():
        if each.partition(":")[0] not in stated:
            yield f"hca: {each} is not in the inventory"
