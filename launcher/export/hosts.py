"""A server on the inventory's own nodes without a launcher: each node's container as `up` starts
it, with the agent as its first process, and the server that the head's agent is to keep.

What docker compose (`compose.py`) and systemd (`systemd.py`) are written from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from launcher import containers
from launcher.checks.network import transport
from launcher.errors import RequestError
from launcher.export import programs
from launcher.model import Argv, Inventory, Node, Ports, RaySettings, Secret
from launcher.payload.agent.desired import Desired, Policy
from launcher.plan import network, wanted
from launcher.plan.request import Request
from launcher.site import Site
from launcher.state import endpoints
from launcher.state.snapshot import ClusterSnapshot
from launcher.state.verdict import Ask
from launcher.tools import network as probe
from launcher.tools import payload, ray
from launcher.tools.docker import ContainerSpec
from launcher.tools.expectations import Expectations

# Beside the files of the nodes, and where the head's agent finds the server that it is to keep.
PROGRAMS, SERVER_FILE = "payload", "server.json"
SERVER = "/etc/vlaunch/server.json"
_SECONDS = 40.0  # for an answer of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes that run a server by themselves; `gate` says whether they prove the network first."""

    original: Inventory
    inventory: Inventory
    request: Request
    desired: Desired
    gate: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that take part, the head first."""
        ranks = [node.name for node in self.request.nodes_with_ranks(self.inventory)]
        others = [node for node in self.inventory.workers if node.name in ranks]
        return (self.inventory.head, *others)

    @property
    def gated(self) -> bool:
        """True when the network is proven before a start."""
        return self.gate and self.request.placement.networked

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets that containers read, sorted; the agents know each other by Ray's token."""
        return tuple(sorted({*self.original.secrets, ray.TOKEN}))


def cluster(inventory: Inventory, request: Request, policy: Policy, *, gate: bool) -> Cluster:
    """Return a server as its nodes run it by themselves; raises RequestError."""
    if request.backend != "mp":
        raise RequestError(
            "Ray would have to be in the image", hint="leave it to vLLM's own ranks: no `--backend`"
        )
    alone = replace(inventory, ray=RaySettings(version="none"))
    seen = ClusterSnapshot(site=Site(alone))
    return Cluster(
        original=inventory,
        inventory=alone,
        request=request,
        desired=wanted.desired(seen, request, asked=0.0, policy=policy),
        gate=gate,
    )


def spec(made: Cluster, node: Node) -> ContainerSpec:
    """Return a node's container: the one that `up` would start, told which server to keep, and to
    print what engines do, for nobody else shows their logs.
    """
    secrets = {name: Secret("") for name in made.secrets}
    found = containers.node_spec(
        Site(made.inventory), node, made.inventory.image, secrets, fingerprinted="by reference"
    )
    labels = {name: each for name, each in found.labels.items() if name != "vlaunch.secrets"}
    kept = ("--server", SERVER) if node.head else ()
    # `agent` is the second word, behind the entry script.
    first, agent, *rest = found.command
    return replace(found, labels=labels, command=(first, agent, "--aloud", *kept, *rest))


def gate_spec(made: Cluster, node: Node) -> ContainerSpec:
    """Return the container of a node that proves the network, and ends."""
    ranks = made.request.nodes_with_ranks(made.inventory)
    inventory = replace(made.inventory, nodes=tuple(ranks))
    shares = dict(made.request.placement.nodes)
    ask = Ask(nonce=made.request.digest, ranks_per_node=min(shares.values()))
    # Nobody was asked for its RDMA ports: the fabric alone says what is there.
    level, _ = transport.required(inventory, gpus=(), rdma=(), known=Expectations())
    argv = probe.gate(
        rank=str([each.name for each in ranks].index(node.name)),
        size=len(ranks),
        ranks_per_node=network.ranks(inventory, ask),
        master=ranks[0].ip,
        port=inventory.ports.probe,
        backend="gloo" if inventory.accelerator == "cpu" else "nccl",
        require=level,
        nonce=made.request.digest,
        deadline=network.deadline(inventory, ask),
        wait=made.desired.policy.start_timeout,
    )
    found = containers.probe_spec(Site(made.inventory), node, argv)
    return replace(found, command=(f"{containers.PAYLOAD}/entry.sh", *argv))


def answered(made: Cluster) -> Argv:
    """Return what ends with 0 in a node's container once its server has answered."""
    return payload.answered(_ports(made), _host(made), _SECONDS, made.request.placement.dp)


def alive(made: Cluster) -> Argv:
    """Return what ends with 0 in a node's container while its server lives."""
    return payload.alive(_ports(made), _host(made), _SECONDS)


def answers(made: Cluster, node: Node) -> bool:
    """True of a node whose process has an API."""
    return node in made.request.api_nodes(made.inventory)


def files(made: Cluster) -> Mapping[str, str]:
    """Return what every node has beside its own files, by path: the programs, and the server that
    the head's agent keeps.
    """
    gate = programs.GATE if made.gated else ()
    found = programs.needed((*programs.AGENT, *gate))
    server = json.dumps(made.desired.as_json(), indent=1) + "\n"
    return {**{f"{PROGRAMS}/{path}": text for path, text in found.items()}, SERVER_FILE: server}


def left_out(made: Cluster) -> list[str]:
    """Name what is not carried over, whatever the target."""
    inventory = made.original
    found = [
        "`ssh:`, `docker:`, `connection:`: somebody else brings the files to the nodes",
        "`vlaunch status`, `logs` and others: `up` on the same nodes takes the containers' place",
    ]
    if not inventory.ray.off:
        found.append("`ray:`: vLLM's own ranks need none; there are no batch jobs")
    if inventory.secrets_in == "memory":
        found.append("`secrets_in: memory`: secrets are files beside what is printed")
    return found


def _ports(made: Cluster) -> Ports:
    return replace(made.inventory.ports, api=made.request.port)


def _host(made: Cluster) -> str:
    return payload.api_host(made.request.host)


def url(made: Cluster) -> str:
    """Return where the server answers, with `/v1`."""
    node = made.request.api_nodes(made.inventory)[0].name
    return endpoints.url(made.original, made.request.host, made.request.port, node)
