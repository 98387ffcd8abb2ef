"""What `vlaunch check` asks besides the survey: containers from inside, every pair of nodes, the
model's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.model import Argv, Inventory, Node
from launcher.plan import containers
from launcher.tools import docker, inside, model, pairs
from launcher.tools.host import HostFacts
from launcher.transport import Command

Facts = Mapping[str, HostFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Commands, and for each node that is left out why it is."""

    commands: tuple[Command, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def look_inside(inventory: Inventory, facts: Facts) -> Asked:
    """Ask the Ray container of each node, or a throw-away one with the rights and devices that it
    would get.
    """
    commands, missing = [], {}
    for node in inventory.nodes:
        if node.name not in facts:
            continue
        argv = _inside(inventory, node, facts[node.name])
        if argv is None:
            missing[node.name] = f"{inventory.image} is not on this node yet: run `vlaunch up`"
        else:
            commands.append(Command(node=node.name, argv=argv, timeout=60))
    return Asked(commands=tuple(commands), missing=missing)


def probe_ports(inventory: Inventory, facts: Facts, *, high: int, nonce: str) -> Asked:
    """Let every node listen and probe all the others at once; `high` is a port above those in
    use everywhere.
    """
    missing = {
        node.name: why
        for node in inventory.nodes
        if node.name in facts and (why := _mute(node, facts, inventory))
    }
    able = [node for node in inventory.nodes if node.name in facts and node.name not in missing]
    if len(able) < 2:
        return Asked(missing=missing)
    commands = []
    for node in able:
        argv = pairs.probe(
            node=node.name,
            ip=node.ip,
            peers=_peers(inventory, node, able),
            listen=between(inventory, node),
            high=high,
            mtu=_mtu(node, facts[node.name]),
            nonce=nonce,
        )
        commands.append(
            Command(
                node=node.name,
                argv=_with_python(inventory, node, facts[node.name], argv),
                timeout=45,
                stdin=lambda: pairs.HOLD,
                hold_stdin=True,
                together=True,
            )
        )
    return Asked(commands=tuple(commands), missing=missing)


def _peers(inventory: Inventory, node: Node, able: Sequence[Node]) -> list[pairs.Peer]:
    return [
        pairs.Peer(name=each.name, ip=each.ip, ports=between(inventory, each))
        for each in able
        if each is not node
    ]


def list_files(inventory: Inventory, facts: Facts, name: str) -> list[Command]:
    """Ask every node for the files of a model, in its Ray container or on the node itself."""
    commands = []
    for node in inventory.nodes:
        if node.name not in facts:
            continue
        argv = model.list_files(name, node.hf_home)
        own = containers.own(inventory, node, facts[node.name])
        inside_argv = docker.exec_(node.docker, own.name, *argv) if own else argv
        commands.append(Command(node=node.name, argv=inside_argv, timeout=60))
    return commands


def between(inventory: Inventory, node: Node) -> tuple[int, ...]:
    """Return the fixed ports of a node that the other nodes must reach; a worker port stands for
    all of them.
    """
    ports = inventory.ports
    everywhere = (ports.node_manager, ports.object_manager, ports.worker_min)
    of_head = (ports.gcs, ports.client, ports.mp_master, ports.dp_rpc, ports.group, ports.probe)
    return (*of_head, *everywhere) if node.head else everywhere


def _inside(inventory: Inventory, node: Node, facts: HostFacts) -> Argv | None:
    argv = inside.look()
    if (own := containers.own(inventory, node, facts)) is not None:
        return docker.exec_(node.docker, own.name, *argv)
    if facts.images.get(inventory.image) is None:
        return None
    spec = containers.probe_spec(inventory, node, facts, argv)
    # Without mounts: Docker would make the directories that are not there yet.
    return docker.run(
        node.docker, replace(spec, mounts=(), entrypoint=argv[0], command=argv[1:]), once=True
    )


def _with_python(inventory: Inventory, node: Node, facts: HostFacts, argv: Argv) -> Argv:
    if facts.survey is not None and facts.survey.python:
        return argv
    if (own := containers.own(inventory, node, facts)) is not None:
        return docker.exec_(node.docker, own.name, *argv, stdin=True)
    return pairs.in_image(
        node.docker, inventory.image, argv, cluster=inventory.cluster, node=node.name
    )


def _mute(node: Node, facts: Facts, inventory: Inventory) -> str:
    """Return why a node cannot take part; empty when it can."""
    here = facts[node.name]
    if here.interface_of(node.ip) is None:
        return f"no interface carries {node.ip}"
    if here.survey is not None and here.survey.python:
        return ""
    if containers.own(inventory, node, here) is None and here.images.get(inventory.image) is None:
        return f"neither Python nor {inventory.image} is on this node yet: run `vlaunch up`"
    return ""


def _mtu(node: Node, facts: HostFacts) -> int:
    nics = (facts.survey.nics if facts.survey is not None else None) or ()
    name = facts.interface_of(node.ip)
    return next((nic.mtu for nic in nics if nic.name == name), 1500)


def high_port(facts: Facts, draw: Sequence[int]) -> int:
    """Return the first of some drawn ports on which nobody listens anywhere."""
    taken = {port for each in facts.values() for _, port in each.listening or ()}
    return next((port for port in draw if port not in taken), draw[0])
