"""Checks of the cluster's fixed ports: their purpose, and conflicts."""

import re
from itertools import pairwise

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node
from launcher.hosts.check import NOT_SURVEYED, Check, Host, per_host

# Temporary containers occupy no ports.
_LONG_RUNNING_ROLES = ("head", "worker", "front")
# Linux's default range of ephemeral ports (net.ipv4.ip_local_port_range). It includes Ray's
# autoscaler metrics (44217) and dashboard metrics (44227), which cannot be configured.
DYNAMIC_PORTS = (32768, 60999)
_PORT = re.compile("[0-9]{1,5}")


def ports_of(inventory: Inventory, node: Node) -> dict[int, str]:
    """Return a node's fixed ports, which must be free, with their purpose."""
    ports, serve = inventory.ports, inventory.serve
    common = {
        ports.node_manager: "Ray node manager",
        ports.object_manager: "Ray object manager",
        ports.runtime_env_agent: "Ray runtime env agent",
        ports.dashboard_agent_grpc: "Ray dashboard agent",
        ports.dashboard_agent_http: "Ray dashboard agent",
        ports.metrics_export: "Ray metrics",
    }
    of_ray = {ports.gcs: "Ray head", ports.dashboard: "Ray dashboard", ports.client: "Ray client"}
    # Ranks of the `mp` backend meet on the server's first node, by default the head.
    rendezvous = (
        {ports.dp_rpc: "the replicas' rendezvous"}
        if serve.dp > 1
        else {ports.mp_master: "vLLM's rendezvous"}
    )
    head = {
        **({} if inventory.ray.off else of_ray),
        ports.group: "the nodes' agents",
        ports.metrics: "the agent's metrics",
        ports.api: "vLLM API",
        ports.probe: "network check",
        **(rendezvous if serve.backend == "mp" and len(inventory.nodes) > 1 else {}),
    }
    front = inventory.front if node in inventory.front_nodes else None
    return {
        **({} if inventory.ray.off else common),
        **(head if node.head else {}),
        **({front.port: "the front", front.metrics: "the front's metrics"} if front else {}),
    }


def _judge_ports(host: Host) -> Finding | None:
    node, listening = host.node, host.facts.listening
    if listening is None:
        return skipped(node, "neither `ss` nor `netstat` is installed; ports were not checked")
    used = {port for _, port in listening}
    in_use = {port: use for port, use in ports_of(host.inventory, node).items() if port in used}
    own_ports = _own_ports(host)
    conflicts = {port: use for port, use in in_use.items() if port not in own_ports}
    if not conflicts:
        return passed(node, "in use by this cluster's own containers") if in_use else None
    first = min(conflicts)
    return failed(
        node,
        "port "
        + ", ".join(f"{port} ({conflicts[port]})" for port in sorted(conflicts))
        + " is in use",
        fix=(
            f"find its process with `sudo ss -ltnp 'sport = :{first}'` on {node.name}, or choose"
            " others under `ports:` or `front:` in the inventory"
        ),
    )


def _own_ports(host: Host) -> set[int]:
    """Return the ports of the cluster's running containers, whatever the inventory says now."""
    running = [container for container in host.facts.containers if container.running]
    ports_in_use = {
        int(value)
        for container in running
        if container.role in _LONG_RUNNING_ROLES
        for option, value in pairwise(container.argv)
        if option.endswith("port") and _PORT.fullmatch(value)
    }
    if any(container.role == "head" for container in running):
        # Servers and batch jobs may use these, without a trace in the container's argv; `serve`
        # checks them again.
        ports = host.inventory.ports
        ports_in_use |= {ports.api, ports.mp_master, ports.dp_rpc}
    return ports_in_use


def _judge_port_range(host: Host) -> Finding:
    node, ports = host.node, host.survey.port_range if host.survey else None
    if ports is None:
        return skipped(node, "the range is unknown" if host.survey else NOT_SURVEYED)
    (low, high), text = DYNAMIC_PORTS, "{} to {}".format(*ports)
    if low <= ports[0] and ports[1] <= high:
        return passed(node, text)
    return warned(
        node,
        f"{text}; without `--scan`, `vlaunch export firewall` closes only {low} to {high}",
        fix=(
            "close their own ranges with `vlaunch export firewall --scan`; or set the usual one on"
            f' {node.name}: `sudo sysctl -w net.ipv4.ip_local_port_range="{low} {high}"`'
        ),
    )


CHECKS = (
    Check(
        id="ports",
        what="the cluster's ports are free",
        why="containers use the host network, so a port in use makes an agent, Ray or vLLM fail",
        judge=per_host(_judge_ports),
        group="ports",
    ),
    Check(
        id="port-range",
        what="the exported firewall covers the kernel's dynamic ports",
        why=(
            "ranks listen on these ports without authentication, and some execute what they receive"
        ),
        judge=per_host(_judge_port_range),
        group="ports",
    ),
)
