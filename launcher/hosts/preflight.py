"""Queries of `vlaunch check` besides the survey: container views and port probes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.core.domain import Argv, Node, Ports
from launcher.core.transport import Command
from launcher.hosts import container_view, pairs
from launcher.tools import containers, docker
from launcher.tools.host import HostFacts
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQueries:
    """Commands, and the reason for each excluded node."""

    commands: tuple[Command, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def query_containers(site: Site) -> NodeQueries:
    """Inspect each node's Ray container, or a temporary one with equal rights and devices."""
    image = site.inventory.image
    commands, missing = [], {}
    for node in site.observed_nodes:
        argv = _container_argv(site, node)
        if argv is None:
            missing[node.name] = f"{image} is not on this node yet: run `vlaunch up`"
        else:
            commands.append(Command(node=node.name, argv=argv, timeout=60))
    return NodeQueries(commands=tuple(commands), missing=missing)


def query_port_probes(site: Site, *, high: int, nonce: str) -> NodeQueries:
    """Probe the ports between all nodes at once; `high` is a port above those in use."""
    missing = {node.name: why for node in site.observed_nodes if (why := _skip_reason(site, node))}
    participants = [node for node in site.observed_nodes if node.name not in missing]
    if len(participants) < 2:
        return NodeQueries(missing=missing)
    ports = site.inventory.ports
    commands = []
    for node in participants:
        argv = pairs.probe_argv(
            node=node.name,
            ip=node.ip,
            peers=_probe_peers(ports, node, participants),
            listen=fixed_ports(ports, node),
            high=high,
            mtu=_node_mtu(node, site.facts[node.name]),
            nonce=nonce,
        )
        commands.append(
            Command(
                node=node.name,
                argv=_python_argv(site, node, argv),
                timeout=45,
                stdin=lambda: pairs.HOLD,
                hold_stdin=True,
                simultaneous=True,
            )
        )
    return NodeQueries(commands=tuple(commands), missing=missing)


def _probe_peers(ports: Ports, node: Node, participants: Sequence[Node]) -> list[pairs.Peer]:
    return [
        pairs.Peer(name=peer.name, ip=peer.ip, ports=fixed_ports(ports, peer))
        for peer in participants
        if peer is not node
    ]


def fixed_ports(ports: Ports, node: Node) -> tuple[int, ...]:
    """Return a node's fixed ports that other nodes must reach; one worker port represents all."""
    everywhere = (ports.node_manager, ports.object_manager, ports.worker_min, ports.copy)
    of_head = (ports.gcs, ports.client, ports.mp_master, ports.dp_rpc, ports.group, ports.probe)
    return (*of_head, *everywhere) if node.head else everywhere


def _container_argv(site: Site, node: Node) -> Argv | None:
    argv = container_view.view_argv()
    if (container := site.running_container(node)) is not None:
        return docker.exec_(node.docker, container.name, *argv)
    if site.image(node, site.inventory.image) is None:
        return None
    spec = containers.probe_spec(site, node, argv)
    # Without mounts: Docker would create missing directories.
    return docker.run(
        node.docker, replace(spec, mounts=(), entrypoint=argv[0], command=argv[1:]), once=True
    )


def _python_argv(site: Site, node: Node, argv: Argv) -> Argv:
    survey = site.facts[node.name].survey
    if survey is not None and survey.python:
        return argv
    if (container := site.running_container(node)) is not None:
        return docker.exec_(node.docker, container.name, *argv, stdin=True)
    return docker.run_throwaway(
        node.docker,
        site.inventory.image,
        *argv,
        cluster=site.inventory.cluster,
        node=node.name,
        options=("--interactive", "--network", "host"),
    )


def _skip_reason(site: Site, node: Node) -> str:
    """Return the reason to exclude a node; empty if it can take part."""
    facts, image = site.facts[node.name], site.inventory.image
    if facts.interface_of(node.ip) is None:
        return f"no interface has {node.ip}"
    if facts.survey is not None and facts.survey.python:
        return ""
    if site.running_container(node) is None and site.image(node, image) is None:
        return f"neither Python nor {image} is on this node yet: run `vlaunch up`"
    return ""


def _node_mtu(node: Node, facts: HostFacts) -> int:
    nics = (facts.survey.nics if facts.survey is not None else None) or ()
    name = facts.interface_of(node.ip)
    return next((nic.mtu for nic in nics if nic.name == name), 1500)


def pick_high_port(facts: Mapping[str, HostFacts], candidates: Sequence[int]) -> int:
    """Return the first candidate port that is unused on all nodes."""
    used = {port for host in facts.values() for _, port in host.listening or ()}
    return next((port for port in candidates if port not in used), candidates[0])
