"""Addresses across the cluster: each once, all in one subnet, and no node with two interfaces in
the same one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.checks.consistency import alike
from launcher.checks.pairs import one_node
from launcher.checks.shape import Check, Evidence, Finding, each, failed, passed, skipped, warned
from launcher.model import Inventory, Node
from launcher.tools.host import Address, HostFacts

_UNKNOWN = "`ip` is not installed; addresses were not compared"


def _unique(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    findings = []
    reached = evidence.reached(inventory)
    for node in reached:
        known = evidence.facts[node.name].addresses
        if known is None:
            findings.append(skipped(node, _UNKNOWN))
            continue
        # Whoever has an address that the inventory gives to another node is the one to look at.
        stolen = [
            (each, other)
            for other in inventory.nodes
            if other.name != node.name
            for each in known
            if each.ip == other.ip
        ]
        if stolen:
            address, owner = stolen[0]
            findings.append(
                failed(
                    node,
                    f"`{address.interface}` has {address.ip}, the address of {owner.name}",
                    fix=(
                        f"run `sudo ip addr del {address.ip}/{address.prefix} dev"
                        f" {address.interface}` on {node.name}, or correct `ip:` of {owner.name}"
                    ),
                )
            )
        else:
            findings.append(passed(node, "no other node has its address"))
    return findings


def _subnet(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    nets, findings = dict[str, str](), list[Finding]()
    for node in evidence.reached(inventory):
        own = next(
            (each for each in evidence.facts[node.name].addresses or () if each.ip == node.ip), None
        )
        if own is None:
            findings.append(skipped(node, f"the interface with {node.ip} is not known"))
        else:
            nets[node.name] = str(_network(own))

    def differs(name: str, net: str, common: str, others: str) -> Finding:
        return warned(
            name,
            f"{inventory.node(name).ip} is in {net}, while {others} is in {common}",
            fix=(
                f"set `ip:` of {name} to its address in {common}, or its prefix length on the"
                " interface; packets go through a router otherwise"
            ),
        )

    return [*findings, *alike(nets, differs)]


def _network(address: Address) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_interface(f"{address.ip.split('%')[0]}/{address.prefix}").network


def _one_nic(inventory: Inventory, node: Node, facts: HostFacts) -> Finding:
    if facts.addresses is None:
        return skipped(node, _UNKNOWN)
    by_net: dict[str, dict[str, str]] = {}
    for address in filter(_in_subnet, facts.addresses):
        by_net.setdefault(str(_network(address)), {}).setdefault(address.interface, address.ip)
    double = {net: nics for net, nics in by_net.items() if len(nics) > 1}
    if not double:
        return passed(node, "each interface has a subnet of its own")
    net, nics = next(iter(double.items()))
    return warned(
        node,
        f"{' and '.join(f'`{name}`' for name in nics)} are both in {net}",
        evidence="\n".join(f"{name} {ip}" for name, ip in nics.items()),
        fix=(
            f"give each a subnet of its own; until then, on {node.name}: "
            "`sudo sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2`"
        ),
    )


def _in_subnet(address: Address) -> bool:
    """True for an address through which an interface that is up reaches other hosts directly."""
    parsed = ipaddress.ip_address(address.ip.split("%")[0])
    if parsed.is_loopback or parsed.is_link_local:
        return False
    return address.up and address.prefix < parsed.max_prefixlen


CHECKS = (
    Check(
        id="address-unique",
        what="no two nodes have the same address",
        why="packets for one of them reach the other, now and then",
        judge=_unique,
        group="network",
        skip_reason=one_node,
    ),
    Check(
        id="subnet",
        what="the nodes' addresses are in one subnet",
        why=(
            "addresses of different networks were mixed up more often than they were meant to be"
            " routed"
        ),
        judge=_subnet,
        group="network",
        skip_reason=one_node,
    ),
    Check(
        id="one-nic-per-subnet",
        what="no node has two interfaces in one subnet",
        why=(
            "Linux answers for either address on either interface, so that traffic takes another"
            " card than the one chosen"
        ),
        judge=each(_one_nic),
        group="network",
    ),
)
