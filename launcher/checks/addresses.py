"""Addresses across the cluster: each once, all in one subnet, and no node with two interfaces in
the same one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.checks.consistency import alike
from launcher.checks.pairs import one_node
from launcher.checks.shape import (
    Check,
    Evidence,
    Finding,
    Host,
    each,
    failed,
    passed,
    skipped,
    warned,
)
from launcher.tools.host import Address

_UNKNOWN = "`ip` is not installed; addresses were not compared"


def _unique(evidence: Evidence) -> Sequence[Finding]:
    findings = []
    for host in evidence.reached:
        if host.facts.addresses is None:
            findings.append(skipped(host, _UNKNOWN))
            continue
        # Whoever has an address that the inventory gives to another node is the one to look at.
        stolen = [
            (each, other)
            for other in evidence.inventory.nodes
            if other.name != host.name
            for each in host.facts.addresses
            if each.ip == other.ip
        ]
        if stolen:
            address, owner = stolen[0]
            findings.append(
                failed(
                    host,
                    f"`{address.interface}` has {address.ip}, the address of {owner.name}",
                    fix=(
                        f"run `sudo ip addr del {address.ip}/{address.prefix} dev"
                        f" {address.interface}` on {host.name}, or correct `ip:` of {owner.name}"
                    ),
                )
            )
        else:
            findings.append(passed(host, "no other node has its address"))
    return findings


def _subnet(evidence: Evidence) -> Sequence[Finding]:
    nets, findings = dict[str, str](), list[Finding]()
    for host in evidence.reached:
        ip = host.node.ip
        own = next((each for each in host.facts.addresses or () if each.ip == ip), None)
        if own is None:
            findings.append(skipped(host, f"the interface with {ip} is not known"))
        else:
            nets[host.name] = str(_network(own))

    def differs(name: str, net: str, common: str, others: str) -> Finding:
        return warned(
            name,
            f"{evidence.inventory.node(name).ip} is in {net}, while {others} is in {common}",
            fix=(
                f"set `ip:` of {name} to its address in {common}, or its prefix length on the"
                " interface; packets go through a router otherwise"
            ),
        )

    return [*findings, *alike(nets, differs)]


def _network(address: Address) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_interface(f"{address.ip.split('%')[0]}/{address.prefix}").network


def _one_nic(host: Host) -> Finding:
    if host.facts.addresses is None:
        return skipped(host, _UNKNOWN)
    by_net: dict[str, dict[str, str]] = {}
    for address in filter(_in_subnet, host.facts.addresses):
        by_net.setdefault(str(_network(address)), {}).setdefault(address.interface, address.ip)
    double = {net: nics for net, nics in by_net.items() if len(nics) > 1}
    if not double:
        return passed(host, "each interface has a subnet of its own")
    net, nics = next(iter(double.items()))
    return warned(
        host,
        f"{' and '.join(f'`{name}`' for name in nics)} are both in {net}",
        evidence="\n".join(f"{name} {ip}" for name, ip in nics.items()),
        fix=(
            f"give each a subnet of its own; until then, on {host.name}: "
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
