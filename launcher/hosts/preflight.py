"""What `vlaunch check` asks besides the survey: containers from inside, every pair of nodes, the
model's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.core.domain import Argv, Node, Ports
from launcher.core.transport import Command
from launcher.hosts import inside, pairs
from launcher.tools import containers, docker
from launcher.tools.host import HostFacts
from launcher.tools.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Commands, and for each node that is left out why it is."""

    commands: tuple[Command, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def look_inside(site: Site) -> Asked:
    """Ask the Ray container of each node, or a throw-away one with the rights and devices that it
    would get.
    """
    image = site.inventory.image
    commands, missing = [], {}
    for node in site.seen:
        argv = _inside(site, node)
        if argv is None:
            missing[node.name] = f"{image} is not on this node yet: run `vlaunch up`"
        else:
            commands.append(Command(node=node.name, argv=argv, timeout=60))
    return Asked(commands=tuple(commands), missing=missing)


def probe_ports(site: Site, *, high: int, nonce: str) -> Asked:
    """Let every node listen and probe all the others at once; `high` is a port above those in
    use everywhere.
    """
    missing = {node.name: why for node in site.seen if (why := _mute(site, node))}
    participants = [node for node in site.seen if node.name not in missing]
    if len(participants) < 2:
        return Asked(missing=missing)
    ports = site.inventory.ports
    commands = []
    for node in participants:
        argv = pairs.probe(
            node=node.name,
            ip=node.ip,
            peers=_peers(ports, node, participants),
            listen=between(ports, node),
            high=high,
            mtu=_mtu(node, site.facts[node.name]),
            nonce=nonce,
        )
        commands.append(
            Command(
                node=node.name,
                argv=_with_python(site, node, argv),
                timeout=45,
                stdin=lambda: pairs.HOLD,
                hold_stdin=True,
                together=True,
            )
        )
    return Asked(commands=tuple(commands), missing=missing)


def _peers(ports: Ports, node: Node, participants: Sequence[Node]) -> list[pairs.Peer]:
    return [
        pairs.Peer(name=peer.name, ip=peer.ip, ports=between(ports, peer))
        for peer in participants
        if peer is not node
    ]


def between(ports: Ports, node: Node) -> tuple[int, ...]:
    """Return the fixed ports of a node that the other nodes must reach; a worker port stands for
    all of them.
    """
    everywhere = (ports.node_manager, ports.object_manager, ports.worker_min, ports.copy)
    of_head = (ports.gcs, ports.client, ports.mp_master, ports.dp_rpc, ports.group, ports.probe)
    return (*of_head, *everywhere) if node.head else everywhere


def _inside(site: Site, node: Node) -> Argv | None:
    argv = inside.look()
    if (container := site.running(node)) is not None:
        return docker.exec_(node.docker, container.name, *argv)
    if site.image(node, site.inventory.image) is None:
        return None
    spec = containers.probe_spec(site, node, argv)
    # Without mounts: Docker would make the directories that are not there yet.
    return docker.run(
        node.docker, replace(spec, mounts=(), entrypoint=argv[0], command=argv[1:]), once=True
    )


def _with_python(site: Site, node: Node, argv: Argv) -> Argv:
    survey = site.facts[node.name].survey
    if survey is not None and survey.python:
        return argv
    if (container := site.running(node)) is not None:
        return docker.exec_(node.docker, container.name, *argv, stdin=True)
    return docker.throw_away(
        node.docker,
        site.inventory.image,
        *argv,
        cluster=site.inventory.cluster,
        node=node.name,
        options=("--interactive", "--network", "host"),
    )


def _mute(site: Site, node: Node) -> str:
    """Return why a node cannot take part; empty when it can."""
    facts, image = site.facts[node.name], site.inventory.image
    if facts.interface_of(node.ip) is None:
        return f"no interface carries {node.ip}"
    if facts.survey is not None and facts.survey.python:
        return ""
    if site.running(node) is None and site.image(node, image) is None:
        return f"neither Python nor {image} is on this node yet: run `vlaunch up`"
    return ""


def _mtu(node: Node, facts: HostFacts) -> int:
    nics = (facts.survey.nics if facts.survey is not None else None) or ()
    name = facts.interface_of(node.ip)
    return next((nic.mtu for nic in nics if nic.name == name), 1500)


def high_port(facts: Mapping[str, HostFacts], candidates: Sequence[int]) -> int:
    """Return the first of some drawn ports on which nobody listens anywhere."""
    used = {port for host in facts.values() for _, port in host.listening or ()}
    return next((port for port in candidates if port not in used), candidates[0])
