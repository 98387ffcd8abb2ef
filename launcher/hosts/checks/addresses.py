"""Checks of addresses, interfaces and name resolution."""

import ipaddress
from collections.abc import Sequence

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory
from launcher.hosts.check import (
    NOT_SURVEYED,
    Check,
    Evidence,
    Host,
    per_host,
    skip_single_node,
    uniform_value,
)
from launcher.tools.host import Address
from launcher.tools.host.survey import LOOKUP_DEADLINE, Lookup, Nic

_NO_IP = "`ip` is not installed; addresses were not compared"
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLOW = 1.0  # seconds; a name in /etc/hosts or of a near server takes milliseconds
_MAX_NODES_IN_FIX = 8  # nodes listed in the fix for /etc/hosts


def _judge_address(host: Host) -> Finding | None:
    node, addresses = host.node, host.facts.addresses
    if addresses is None:
        return skipped(node, _NO_IP)
    declared = ipaddress.ip_address(node.ip)
    match = next((address for address in addresses if _parse_ip(address.ip) == declared), None)
    listing = "\n".join(
        f"{address.interface} {address.ip}" for address in addresses if address.interface != "lo"
    )
    if match is None:
        return failed(
            node,
            f"no interface has {node.ip}",
            evidence=listing,
            fix=f"set `ip:` of {node.name} to one of its addresses (the network between the nodes)",
        )
    if match.interface == "lo" and len(host.inventory.nodes) > 1:
        return failed(
            node,
            f"{node.ip} is on `lo`, where NCCL and Gloo take 127.0.0.1",
            evidence=listing,
            fix=(
                f"move it to a dummy interface on {node.name}, which routing can announce as well:"
                f" `sudo ip link add dummy0 type dummy`, `sudo ip addr add {node.ip} dev dummy0`,"
                " `sudo ip link set dummy0 up`"
            ),
        )
    if node.interface and match.interface != node.interface:
        fix = f"set `network: {{interface: {match.interface}}}` for {node.name}"
        text = f"there is no interface `{node.interface}` with an address"
        if node.interface in {address.interface for address in addresses}:
            text = f"{node.ip} is on `{match.interface}`, not on `{node.interface}`"
            fix += ", or correct its `ip:`"
        return failed(node, text, evidence=listing, fix=fix)
    if not match.up:
        return failed(
            node,
            f"`{match.interface}` is down",
            fix=f"run `sudo ip link set {match.interface} up` on {node.name}",
        )
    return None


def _parse_ip(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address without the scope that `ip` appends to link-local ones."""
    return ipaddress.ip_address(ip.partition("%")[0])


def _judge_unique_address(host: Host) -> Finding:
    if host.facts.addresses is None:
        return skipped(host, _NO_IP)
    # The fault is on the node with another node's address.
    for owner in host.inventory.nodes:
        for address in host.facts.addresses:
            if owner.name != host.name and address.ip == owner.ip:
                return failed(
                    host,
                    f"`{address.interface}` has {address.ip}, the address of {owner.name}",
                    fix=(
                        f"run `sudo ip addr del {address.ip}/{address.prefix} dev"
                        f" {address.interface}` on {host.name}, or correct `ip:` of {owner.name}"
                    ),
                )
    return passed(host, "no other node has its address")


def _subnet(host: Host) -> str | Finding:
    ip = host.node.ip
    own = next((address for address in host.facts.addresses or () if address.ip == ip), None)
    return skipped(host, f"the interface with {ip} is unknown") if own is None else _network(own)


def _other_subnet(host: Host, network: str, common: str, others: str) -> Finding:
    return warned(
        host,
        f"{host.node.ip} is in {network}, while {others} is in {common}",
        fix=(
            f"set `ip:` of {host.name} to its address in {common}, or correct the prefix length on"
            " its interface; otherwise packets go through a router"
        ),
    )


def _network(address: Address) -> str:
    return str(ipaddress.ip_interface(f"{_parse_ip(address.ip)}/{address.prefix}").network)


def _judge_nics_per_subnet(host: Host) -> Finding:
    if host.facts.addresses is None:
        return skipped(host, _NO_IP)
    interfaces: dict[str, dict[str, str]] = {}
    for address in filter(_in_subnet, host.facts.addresses):
        interfaces.setdefault(_network(address), {}).setdefault(address.interface, address.ip)
    for network, ips in interfaces.items():
        if len(ips) > 1:
            return warned(
                host,
                f"{' and '.join(f'`{name}`' for name in ips)} are both in {network}",
                evidence="\n".join(f"{name} {ip}" for name, ip in ips.items()),
                fix=(
                    f"give each a subnet of its own; until then, on {host.name}: `sudo sysctl -w"
                    " net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2`"
                ),
            )
    return passed(host, "each interface has a subnet of its own")


def _in_subnet(address: Address) -> bool:
    """True for an address through which an active interface reaches other hosts directly."""
    parsed = _parse_ip(address.ip)
    if parsed.is_loopback or parsed.is_link_local:
        return False
    return address.up and address.prefix < parsed.max_prefixlen


def nic_of(host: Host) -> Nic | None:
    """Return the interface with the node's address."""
    nics = host.survey.nics if host.survey is not None else None
    name = host.facts.interface_of(host.node.ip)
    return next((nic for nic in nics or () if nic.name == name), None)


def _mtu(host: Host) -> int | Finding:
    nic = nic_of(host)
    return _skip_unsurveyed(host) if nic is None else nic.mtu


def _skip_unsurveyed(host: Host) -> Finding:
    return skipped(host, f"the interface with {host.node.ip} was not surveyed")


def _other_mtu(host: Host, mtu: int, common: int, others: str) -> Finding:
    nic = host.facts.interface_of(host.node.ip)
    return failed(
        host,
        f"mtu {mtu} on `{nic}`, while {others} has {common}",
        fix=(
            f"run `sudo ip link set {nic} mtu {common}` on {host.name}, and make it permanent in"
            " its network configuration"
        ),
    )


def _speed(host: Host) -> int | Finding:
    nic = nic_of(host)
    if nic is None:
        return _skip_unsurveyed(host)
    return nic.speed or skipped(host, f"`{nic.name}` reports no speed (virtual interface)")


def _other_speed(host: Host, speed: int, common: int, others: str) -> Finding:
    nic = host.facts.interface_of(host.node.ip)
    return warned(
        host,
        f"`{nic}` runs at {_bitrate(speed)}, while {others} has {_bitrate(common)}",
        fix=f"check `sudo ethtool {nic}` on {host.name}: cable, switch port, negotiated speed",
    )


def _bitrate(mbits: int) -> str:
    return f"{mbits / 1000:g} Gbit/s" if mbits >= 1000 else f"{mbits} Mbit/s"


def _judge_hostname(host: Host) -> Finding:
    node, resolved = host.node, host.survey.own_names if host.survey else None
    if resolved is None:
        return skipped(node, "the address of its own name is unknown")
    name = host.facts.hostname or node.name
    add = f"echo '{node.ip} {name}' | sudo tee -a /etc/hosts"
    loopback = [address for address in resolved if _within(address, ("127.0.0.0/8", "::1/128"))]
    if loopback:
        script = f"/^(127[.]|::1)/s/[[:space:]]{name}([[:space:]]|$)/ /g"
        return failed(
            node,
            f"its name `{name}` resolves to {', '.join(loopback)}",
            fix=f"run on {node.name}: `sudo sed -E -i '{script}' /etc/hosts; {add}`",
        )
    if not resolved:
        text = f"its name `{name}` does not resolve"
        return warned(node, text, fix=f"run on {node.name}: `{add}`")
    networks = [
        _network(address) for address in host.facts.addresses or () if address.ip == node.ip
    ]
    if any(address == node.ip or _within(address, networks) for address in resolved):
        return passed(node, "its own name resolves to an address on the cluster's network")
    if not networks:
        return skipped(
            node, "its addresses are unknown, so the address of its own name was not compared"
        )
    return warned(
        node,
        f"its name `{name}` resolves to {', '.join(resolved[:3])}, which is not on the network of"
        f" {node.ip}",
        fix=f"run on {node.name}: `{add}`, and remove other lines with this name",
    )


def _within(address: str, networks: Sequence[str]) -> bool:
    try:
        parsed = _parse_ip(address)
    except ValueError:
        return False
    return any(parsed in ipaddress.ip_network(network) for network in networks)


def _judge_interface(host: Host) -> Finding:
    node, facts = host.node, host.facts
    names = {address.interface for address in facts.addresses or ()}
    if facts.survey is not None and facts.survey.nics:
        names = {nic.name for nic in facts.survey.nics}
    values = {variable: node.env[variable] for variable in _VARIABLES if node.env.get(variable)}
    if not values:
        return passed(
            node, "no variable names an interface; vlaunch uses the one with the node's address"
        )
    if not names:
        return skipped(node, "its interfaces were not queried")
    for variable, value in values.items():
        if unmatched := _unmatched_names(variable, value, names):
            carrier = facts.interface_of(node.ip) or "the right one"
            return failed(
                node,
                f"{variable} names `{', '.join(unmatched)}`, which does not exist",
                evidence="interfaces: " + ", ".join(sorted(names - {"lo"})),
                fix=(
                    f"remove {variable} from `env:` (vlaunch sets it for each node), or set it to"
                    f" {carrier} under {node.name}'s own `env:`"
                ),
            )
    return passed(node, ", ".join(f"{variable}={value}" for variable, value in values.items()))


def _unmatched_names(variable: str, value: str, names: set[str]) -> list[str]:
    """Return the names in a variable that match no interface; exclusions (`^`) may.

    NCCL takes prefixes unless the value starts with `=`; Gloo and TensorPipe take full names.
    """
    if value.startswith("^"):
        return []
    prefixes = [prefix for prefix in value.lstrip("=").split(",") if prefix]
    if variable != "NCCL_SOCKET_IFNAME" or value.startswith("="):
        return [prefix for prefix in prefixes if prefix not in names]
    return [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]


def _skip_without_variables(inventory: Inventory) -> str:
    is_set = any(node.env.get(variable) for node in inventory.nodes for variable in _VARIABLES)
    reason = "env: names no interface; vlaunch uses the one with its address"
    return "" if is_set else reason


def _judge_lookups(host: Host) -> Finding:
    survey = host.survey
    if survey is None:
        return skipped(host, NOT_SURVEYED)
    if survey.lookups is None:
        return skipped(host, "`getent` is not installed; no name was looked up")
    slow = [lookup for lookup in survey.lookups if not lookup.answered or lookup.seconds >= _SLOW]
    if not slow:
        return passed(host, "its own name and those of the nodes resolve within a second")
    outcome = f"took {max(lookup.seconds for lookup in slow):.0f} s"
    if unanswered := [lookup for lookup in slow if not lookup.answered]:
        outcome = f"got no answer within {LOOKUP_DEADLINE} s"
    text = f"looking up {_describe_lookups(unanswered or slow)} {outcome}"
    return warned(
        host, text, evidence="\n".join(survey.resolver_lines), fix=_hosts_file_fix(host.evidence)
    )


def _describe_lookups(slow: Sequence[Lookup]) -> str:
    parts = []
    for kind, label in (("reverse", "the name of"), ("forward", "the address of")):
        if targets := sorted({lookup.subject for lookup in slow if lookup.kind == kind}):
            suffix = f" and {len(targets) - 3} more" if len(targets) > 3 else ""
            parts.append(f"{label} {', '.join(targets[:3])}{suffix}")
    if any(lookup.kind == "own" for lookup in slow):
        parts.append("its own name")
    return " and ".join(parts)


def _hosts_file_fix(evidence: Evidence) -> str:
    nodes = evidence.inventory.nodes
    instruction = "a line `ADDRESS NAME` for each node in /etc/hosts"
    if len(nodes) <= _MAX_NODES_IN_FIX:
        hostnames = {host.name: host.facts.hostname for host in evidence.reached}
        lines = " ".join(f"'{node.ip} {hostnames.get(node.name) or node.name}'" for node in nodes)
        instruction = f"`printf '%s\\n' {lines} | sudo tee -a /etc/hosts`"
    return (
        f"on every node: {instruction}; or correct the name server in /etc/resolv.conf. Then"
        " `vlaunch down` and `vlaunch up`: containers copy both files when they start"
    )


CHECKS = (
    Check(
        id="address",
        what="the declared address is on the declared interface",
        why="Ray, NCCL and Gloo bind to it; a wrong one hangs the start without a message",
        judge=per_host(_judge_address),
        group="network",
    ),
    Check(
        id="address-unique",
        what="no two nodes have the same address",
        why="packets for one of them sometimes reach the other",
        judge=per_host(_judge_unique_address),
        group="network",
        skip_reason=skip_single_node,
    ),
    Check(
        id="subnet",
        what="the nodes' addresses are in one subnet",
        why="different subnets usually mean a wrong address",
        judge=uniform_value(_subnet, _other_subnet),
        group="network",
        skip_reason=skip_single_node,
    ),
    Check(
        id="one-nic-per-subnet",
        what="no node has two interfaces in one subnet",
        why=(
            "Linux answers for both addresses on both interfaces, so traffic may use the wrong card"
        ),
        judge=per_host(_judge_nics_per_subnet),
        group="network",
    ),
    Check(
        id="hostname",
        what="a node's own name does not resolve to loopback",
        why=(
            "Gloo and other libraries give peers the address of the node's own name; no peer can"
            " reach 127.0.1.1"
        ),
        judge=per_host(_judge_hostname),
        group="network",
    ),
    Check(
        id="interface",
        what="interfaces named in variables exist",
        why=(
            "an interface name that one node lacks leaves NCCL or Gloo without an interface there"
        ),
        judge=per_host(_judge_interface),
        group="network",
        skip_reason=_skip_without_variables,
    ),
    Check(
        id="mtu",
        what="the MTU is the same on all nodes",
        why=(
            "if one side sends larger packets than the other accepts, transfers hang although pings"
            " pass"
        ),
        judge=uniform_value(_mtu, _other_mtu, lambda host, mtu: passed(host, f"mtu {mtu}")),
        group="network",
    ),
    Check(
        id="link-speed",
        what="all links run at the same speed",
        why="one link at a lower speed slows every collective down",
        judge=uniform_value(
            _speed, _other_speed, lambda host, speed: passed(host, _bitrate(speed))
        ),
        group="network",
    ),
    Check(
        id="names-resolve",
        what="node names resolve quickly",
        why=(
            "an unresponsive name server delays each connection of torch's store and each sudo by"
            " 10 s, and Ray's start by half a minute"
        ),
        judge=per_host(_judge_lookups),
        group="network",
    ),
)
