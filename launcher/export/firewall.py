"""Packet filter of the nodes, from an inventory: text to read and to load, the same on every node,
whichever is the head.

All traffic between the nodes stays open: ranks, stores and queues of vLLM, Gloo and NCCL take ports
that the kernel chooses, and none of these protocols authenticates. From anywhere else, only SSH and
the endpoint answer. A node's other services, and other rules, stay as they are.
"""

import hashlib
import ipaddress
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from launcher.core.domain import Inventory, Ports
from launcher.hosts.checks.ports import DYNAMIC_PORTS

# From `mp_master` on: so many are used at most by the ranks of a data-parallel batch
# (batch/driver/rank_pool.py).
MP_PORTS = 8

PURPOSES: Mapping[str, str] = {
    "gcs": "Ray's cluster store",
    "dashboard": "Ray's dashboard and job API",
    "client": "Ray client server",
    "node_manager": "Ray's node manager",
    "object_manager": "Ray's object manager",
    "runtime_env_agent": "Ray's runtime environment agent",
    "dashboard_agent_grpc": "Ray's dashboard agent (gRPC)",
    "dashboard_agent_http": "Ray's dashboard agent (HTTP)",
    "metrics_export": "Ray's metrics",
    "worker_min": "Ray's worker processes",
    "api": "the OpenAI-compatible endpoint",
    "mp_master": "rendezvous of vLLM's ranks",
    "dp_rpc": "rendezvous of vLLM's replicas",
    "group": "the nodes' agents",
    "probe": "rendezvous of the network check",
    "copy": "copies of models",
    "metrics": "the agent's metrics",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRule:
    """Ports that are open or closed to other hosts; `address` limits an open one."""

    low: int
    high: int
    purpose: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Input of the rules, the same for every node."""

    cluster: str
    nodes: tuple[str, ...]
    open: tuple[PortRule, ...]
    closed: tuple[PortRule, ...]


def build_filter(
    inventory: Inventory, logins: Iterable[int], ranges: Iterable[tuple[int, int]] = ()
) -> Filter:
    """Build the filter; `logins` are the nodes' SSH ports, `ranges` the ephemeral port ranges of
    their kernels, if known.
    """
    lows, highs = zip(DYNAMIC_PORTS, *ranges, strict=True)
    handed_out = PortRule(
        low=min(lows),
        high=max(highs),
        purpose="ports that the kernel hands out: Gloo, NCCL, ZMQ, stores",
    )
    ssh = [
        PortRule(low=port, high=port, purpose="SSH, from operators") for port in sorted(set(logins))
    ]
    return Filter(
        cluster=inventory.cluster,
        nodes=tuple(dict.fromkeys(node.ip for node in inventory.nodes)),
        open=(*ssh, *_endpoint_rules(inventory), *_front_rules(inventory)),
        closed=(*_closed_ports(inventory), handed_out),
    )


def _endpoint_rules(inventory: Inventory) -> list[PortRule]:
    """Return the rule for the endpoint's port, unless it is bound to loopback or for the front."""
    if _endpoint_is_internal(inventory):
        return []
    bind = ipaddress.ip_address(inventory.api_bind([inventory.head]))
    port = inventory.ports.api
    # The head may have more addresses than the one in the inventory, so only a chosen one is
    # written down.
    address = "" if bind.is_unspecified else str(bind)
    return [PortRule(low=port, high=port, purpose=PURPOSES["api"], address=address)]


def _endpoint_is_internal(inventory: Inventory) -> bool:
    bind = inventory.serve.bind
    return inventory.front is not None if bind is None else ipaddress.ip_address(bind).is_loopback


def _front_rules(inventory: Inventory) -> list[PortRule]:
    """Return the rule for the front's port, unless it is bound to loopback."""
    front = inventory.front
    if front is None or ipaddress.ip_address(front.bind).is_loopback:
        return []
    return [PortRule(low=front.port, high=front.port, purpose="the front, for users")]


def _closed_ports(inventory: Inventory) -> Iterator[PortRule]:
    """Yield the ports that are only for nodes; Ray's only with Ray."""
    ports = inventory.ports
    last = {"worker_min": ports.worker_max, "mp_master": min(ports.mp_master + MP_PORTS - 1, 65535)}
    everywhere = ipaddress.ip_address(inventory.api_bind([inventory.head])).is_unspecified
    for name in (item.name for item in fields(Ports) if item.name != "worker_max"):
        if inventory.ray.off and PURPOSES[name].startswith("Ray"):
            continue
        if name == "api" and everywhere:
            continue
        first: int = getattr(ports, name)
        yield PortRule(low=first, high=last.get(name, first), purpose=f"{name}: {PURPOSES[name]}")
    if inventory.front:
        port = inventory.front.metrics
        yield PortRule(low=port, high=port, purpose="Prometheus metrics of the front")


def nft(filter: Filter) -> str:
    """Return a file for `nft -f`: one table of its own, replaced as a whole."""
    table = f"inet vlaunch_{re.sub(r'[^a-z0-9]', '_', filter.cluster)}"
    usage = f"Load it on every node: nft -f FILE. Remove it: nft delete table {table}"
    lines = [
        "#!/usr/sbin/nft -f",
        *_comment_lines(filter, usage),
        "",
        f"table {table}",
        f"delete table {table}",
        f"table {table} {{",
        "  set nodes {",
        "    type ipv4_addr",
        f"    elements = {{ {', '.join(filter.nodes)} }}",
        "  }",
        "",
        "  chain input {",
        # Before the usual filters, which may still drop packets.
        "    type filter hook input priority -10; policy accept;",
        "",
        '    iifname "lo" accept',
        "    ct state established,related accept",
        '    ip saddr @nodes accept comment "between the nodes: everything"',
        "",
        *(
            f'    {_nft_to(rule)}tcp dport {_port_range(rule, "-")} accept comment "{rule.purpose}"'
            for rule in filter.open
        ),
        "",
        *(
            f'    tcp dport {_port_range(rule, "-")} drop comment "{rule.purpose}"'
            for rule in filter.closed
        ),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def iptables(filter: Filter) -> str:
    """Return a script for iptables and ip6tables: one chain, replaced as a whole."""
    chain = _chain_name(filter.cluster)
    usage = f"Run it as root on every node. Remove it: ip(6)tables -D INPUT -j {chain}"
    lines = ["#!/bin/sh", *_comment_lines(filter, usage), "set -eu"]
    for tool, version in (("iptables", 4), ("ip6tables", 6)):
        nodes = [f"-A {chain} -s {ip} -j ACCEPT" for ip in filter.nodes] if version == 4 else []
        opened = [
            rule
            for rule in filter.open
            if not rule.address or ipaddress.ip_address(rule.address).version == version
        ]
        lines += [
            "",
            f"{tool}-restore -w --noflush <<'END'",
            "*filter",
            f":{chain} - [0:0]",
            f"-A {chain} -i lo -j ACCEPT",
            f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            *nodes,
            *(f"-A {chain} {_iptables_match(rule)} -j ACCEPT" for rule in opened),
            *(f"-A {chain} {_iptables_match(rule)} -j DROP" for rule in filter.closed),
            "COMMIT",
            "END",
            f"{tool} -w -C INPUT -j {chain} 2>/dev/null || {tool} -w -I INPUT 1 -j {chain}",
        ]
    return "\n".join(lines) + "\n"


def ufw(filter: Filter) -> str:
    """Return `ufw` commands; the first rule that matches counts, so open ports come first."""
    usage = "Run them as root on every node. Remove one: `ufw delete` instead of `ufw`"
    lines = [
        "#!/bin/sh",
        *_comment_lines(filter, usage),
        "set -eu",
        "",
        *(f"ufw allow from {ip} comment 'vlaunch {filter.cluster}: a node'" for ip in filter.nodes),
        "",
        *(
            f"ufw allow {_ufw_match(rule)} comment {_rule_comment(filter, rule)}"
            for rule in filter.open
        ),
        "",
        *(
            f"ufw deny {_ufw_match(rule)} comment {_rule_comment(filter, rule)}"
            for rule in filter.closed
        ),
    ]
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Callable[[Filter], str]] = {"nft": nft, "iptables": iptables, "ufw": ufw}


def _comment_lines(filter: Filter, usage: str) -> list[str]:
    nodes = ", ".join(filter.nodes)
    return [
        f"# Cluster {filter.cluster}, nodes {nodes}. The same on every node.",
        f"# {usage}",
        "# Traffic between the nodes is open: ranks use ports that the kernel chooses.",
        "# From elsewhere: SSH only, and the endpoint unless it is bound to loopback. Other",
        "# services of the nodes are not affected. Nodes are identified by the inventory's `ip`:",
        "# traffic between them from other addresses is dropped.",
    ]


def _port_range(rule: PortRule, dash: str) -> str:
    return str(rule.low) if rule.low == rule.high else f"{rule.low}{dash}{rule.high}"


def _nft_to(rule: PortRule) -> str:
    if not rule.address:
        return ""
    return f"{'ip6' if ':' in rule.address else 'ip'} daddr {rule.address} "


def _iptables_match(rule: PortRule) -> str:
    destination = f"-d {rule.address} " if rule.address else ""
    ports = _port_range(rule, ":")
    return f'{destination}-p tcp --dport {ports} -m comment --comment "{rule.purpose}"'


def _ufw_match(rule: PortRule) -> str:
    span = _port_range(rule, ":")
    return f"proto tcp to {rule.address} port {span}" if rule.address else f"{span}/tcp"


def _rule_comment(filter: Filter, rule: PortRule) -> str:
    # ufw takes no apostrophe in a comment.
    return shlex.quote(f"vlaunch {filter.cluster}: {rule.purpose}".replace("'", ""))


def _chain_name(cluster: str) -> str:
    """Return the chain's name, at most 28 characters; a long name ends in a hash."""
    name = f"vlaunch-{cluster}"
    if len(name) <= 28:
        return name
    return f"{name[:21]}-{hashlib.sha256(cluster.encode()).hexdigest()[:6]}"
