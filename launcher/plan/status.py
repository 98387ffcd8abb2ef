"""What is there, compared with what was asked for: one question a node, one more to the head, and
nothing assumed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher.checks.ray import read_payload
from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Inventory, Node, Secret, fold
from launcher.payload.agent.desired import Desired
from launcher.payload.agent.observed import Load, Observed
from launcher.plan import batches, containers, running, servers, verdict
from launcher.plan.batch import ask_list
from launcher.plan.batches import BatchStatus
from launcher.plan.servers import Kept, Server
from launcher.plan.watched import endpoint
from launcher.tools import docker, payload, ray
from launcher.tools.desk import Entry, parse_list
from launcher.tools.host import HostFacts
from launcher.transport import Command

ServerState = Literal[
    "answering",
    "busy",
    "silent",
    "starting",
    "waiting",
    "stopping",
    "recovering",
    "failed",
    "gave-up",
    "unknown",
]
_BAD = ("silent", "recovering", "failed", "gave-up", "unknown")
_PATIENCE = 5  # seconds for a completion; who has many requests waiting is known by its counters
_BRIEF = 2  # the same, where the keeper's own has been waiting for longer
_STILL = 10.0  # seconds without any movement after which a server is silent


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node.

    `drift` says how its container differs from the inventory; `trouble` why it could not be looked
    at.

    `agent` is `connected` or `lost`, as the head's agent says; empty where nobody says it.
    """

    node: str
    role: str
    ip: str
    container: str
    image: str = ""
    ray: str = ""
    agent: str = ""
    gpus: str = ""
    ranks: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server.

    It is `answering` only when a completion has just come back, and `busy` when others come back
    meanwhile.

    `observed` is what its keeper said `age` seconds ago, with nodes' names in the place of
    addresses; `seconds` is how long the completion took. A server without a name stands for what
    nobody could tell.
    """

    name: str
    state: ServerState
    backend: str = ""
    model: str = ""
    nodes: tuple[str, ...] = ()
    endpoint: str = ""
    detail: str = ""
    warning: str = ""
    fingerprint: str = ""
    seconds: float = 0.0
    kv_tokens: int | None = None
    concurrency: float | None = None
    load: Load | None = None
    observed: Observed | None = None
    age: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Everything that `status` shows; `servers` are those that somebody wants, or that are still
    being ended.
    """

    cluster: str
    nodes: tuple[NodeStatus, ...]
    servers: tuple[ServerStatus, ...] = ()
    endpoint: str
    network: str = ""
    batches: tuple[BatchStatus, ...] = ()

    @property
    def whole(self) -> bool:
        """True when every container runs as the inventory says, every node is in the cluster, and
        no server is dead.
        """
        good = (
            n.container == "running"
            and n.ray in ("alive", "-")
            and n.agent != "lost"
            and not n.drift
            and not n.trouble
            for n in self.nodes
        )
        return all(good) and not any(each.state in _BAD for each in self.servers)

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON.

        `server` is the first of `servers`, for those who knew only one.
        """
        said = asdict(self)
        first = said["servers"][0] if self.servers else {"state": "none"}
        return {
            **said,
            "server": first,
            "batches": [each.as_json() for each in self.batches],
            "whole": self.whole,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was answered: by the head about Ray, jobs and servers (`error` where it could not),
    about the network and batch jobs, and by each server's API, by its name.
    """

    head: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    abouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    completions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batches: tuple[Entry, ...] = ()

    @property
    def kept(self) -> Kept:
        """What the head's keeper says of servers."""
        return servers.read(self.head)


def ask_head(inventory: Inventory, facts: Mapping[str, HostFacts]) -> list[Command]:
    """Return what to ask the head about Ray, jobs, servers and the network: nothing when its
    container does not run.
    """
    head = inventory.head
    if containers.own(inventory, head, facts.get(head.name)) is None:
        return []
    peers = tuple(f"{node.ip}:{inventory.ports.node_manager}" for node in inventory.nodes)
    verb = payload.jobs(
        inventory.ports, "127.0.0.1", () if inventory.ray.off else peers, ray=not inventory.ray.off
    )
    asked = Command(
        node=head.name,
        argv=docker.exec_(head.docker, containers.name(inventory, head), *verb),
        timeout=60,
    )
    return [asked, verdict.ask_record(inventory, facts)]


def ask_server(
    inventory: Inventory, facts: Mapping[str, HostFacts], server: Server
) -> list[Command]:
    """Return what to ask a server's own node: what its API says, and a completion, the only proof
    that it answers.

    Nothing where no engine runs that could answer, or where its node cannot be asked.
    """
    wanted = server.desired
    if wanted is None or server.state not in ("starting", "ready"):
        return []
    node = next((each for each in inventory.nodes if each.name == wanted.api_node), None)
    if node is None or containers.own(inventory, node, facts.get(node.name)) is None:
        return []
    ports, host = replace(inventory.ports, api=wanted.port), payload.api_host(wanted.host)
    # Behind a canary that has waited for longer already, ours would not be answered sooner.
    seen = server.observed
    late = (
        seen is not None
        and server.age < _STILL
        and (seen.asking >= _PATIENCE or seen.still >= _STILL)
    )
    patience = _BRIEF if late else _PATIENCE
    verbs = (
        payload.server(ports, host),
        payload.complete(ports, host, "Say hello.", 1, patience, wanted.replicas),
    )
    inside = containers.name(inventory, node)
    return [
        Command(node=node.name, argv=docker.exec_(node.docker, inside, *verb), timeout=40)
        for verb in verbs
    ]


def undecided(kept: Kept, completions: Mapping[str, Mapping[str, Any]]) -> bool:
    """True while a server that has not answered may be busy or silent, and its keeper will know in
    a moment.
    """
    return any(
        each.state == "ready"
        and each.observed is not None
        and each.observed.still < _STILL
        and each.observed.asking > 0
        and completions[each.name].get("status") != 200
        and completions[each.name].get("moved") is None
        for each in kept.running
        if completions.get(each.name)
    )


def ask_batches(inventory: Inventory, said: Mapping[str, Any]) -> list[Command]:
    """Return what to ask about batch jobs: nothing when none runs."""
    return [ask_list(inventory)] if running.batches(said) else []


def hear_batches(answer: Answer) -> tuple[Entry, ...]:
    """Read what lies on the head of batch jobs; nothing when that cannot be read."""
    try:
        return parse_list(answer)
    except UnreadableAnswer:
        return ()


def hear(answer: Answer) -> dict[str, Any]:
    """Read one answer of a container; what cannot be read is an `error` like any other."""
    try:
        return read_payload(answer)
    except UnreadableAnswer as error:
        return {"error": error.message or "no answer"}


def read(
    inventory: Inventory, facts: Mapping[str, HostFacts], said: Said, missing: Mapping[str, str]
) -> ClusterStatus:
    """Put the answers together; `missing` has, for each node that could not be reached, why."""
    listed = ray.parse_nodes(said.head["nodes"]) if said.head.get("nodes") else ()
    ranks = ray.parse_ranks(said.head["actors"], listed) if said.head.get("actors") else {}
    closed = said.head.get("unreachable") or ()
    # Ray misses a node some seconds after its port is closed.
    table = [
        replace(row, alive=row.alive and f"{row.ip}:{inventory.ports.node_manager}" not in closed)
        for row in listed
    ]
    kept = said.kept
    nodes = tuple(
        (
            NodeStatus(
                node=node.name,
                role="head" if node.head else "worker",
                ip=node.ip,
                container="unknown",
                trouble=missing[node.name],
            )
            if node.name in missing
            else _node(
                inventory,
                node,
                facts[node.name],
                table,
                kept,
                _held(kept, node, ranks.get(node.ip, ())),
            )
        )
        for node in inventory.nodes
    )
    found = _servers(inventory, facts, said, kept)
    first = next((each.endpoint for each in found if each.endpoint), "")
    return ClusterStatus(
        cluster=inventory.cluster,
        nodes=nodes,
        servers=found,
        endpoint=first or endpoint(inventory, inventory.serve.bind, inventory.ports.api),
        network=_network(inventory, facts, said.network, kept),
        batches=tuple(
            each for each in batches.read(inventory, said.batches, said.head) if each.runs
        ),
    )


def drift(inventory: Inventory, node: Node, facts: HostFacts) -> tuple[str, ...]:
    """Say how a node's container differs from the inventory, and which are left from an earlier
    vlaunch.

    `status` fetches no secrets, so that a new value of one goes unseen: the container's own
    fingerprint stands in for it.
    """
    there = facts.container(containers.name(inventory, node))
    left = [each.name for each in facts.containers if each.role == "rank"]
    return (
        *(_differences(inventory, node, facts, there) if there is not None else ()),
        *(
            f"container {name} is left from an earlier vlaunch: `vlaunch up` removes it"
            for name in left
        ),
    )


def _differences(
    inventory: Inventory, node: Node, facts: HostFacts, there: docker.Container
) -> list[str]:
    if not containers.renewed(there):
        return ["its container is of an earlier vlaunch: `vlaunch up` renews it"]
    base, image = facts.images.get(inventory.image), facts.images.get(there.image)
    made_from = image.labels.get("vlaunch.base") if image else None
    secrets = dict.fromkeys([*inventory.secrets, ray.TOKEN], Secret(""))
    spec = containers.node_spec(
        inventory,
        node,
        facts,
        there.image if made_from else inventory.image,
        secrets,
        fingerprinted=there.labels.get("vlaunch.secrets"),
    )
    said = []
    if made_from and (base is None or made_from != base.identity):
        said.append(f"{there.image} was not made from the present {inventory.image}")
    if there.spec != spec.hash:
        # Of an image that was not looked at nobody knows which variables it brings: those that
        # nobody sets are its own.
        brought = (
            image.env
            if image
            else {name: value for name, value in there.env.items() if name not in spec.env}
        )
        said += docker.differences(there, spec, brought)
    return said


def _network(
    inventory: Inventory, facts: Mapping[str, HostFacts], proof: Mapping[str, Any], kept: Kept
) -> str:
    """Say what is proven of the network between these very containers, and what servers' own logs
    say of it.

    Empty where there is no network, or nobody to ask.
    """
    own = [containers.own(inventory, node, facts.get(node.name)) for node in inventory.nodes]
    if len(own) == 1 or None in own:
        return ""
    measured = verdict.about(inventory, facts, proof)
    if not measured:
        return "not proven for these containers: `vlaunch check-nccl`"
    part = (
        ""
        if len(measured) == len(own)
        else f" between {fold([n.name for n in inventory.nodes if n.name in measured])}"
    )
    said = (
        f"{'proven' if proof.get('passed') else 'failed'} {proof.get('taken', '')}{part}:"
        f" {proof.get('summary', '')}"
    )
    apart = [
        each for each in kept.running if each.desired is not None and len(each.desired.places) > 1
    ]
    if inventory.accelerator == "cpu" or not apart:
        return said
    told = [
        f"{each.what}: {text}"
        for each in apart
        if (text := verdict.of_server(proof, each.name, each.id))
    ]
    return "; ".join(
        (said, *(told or ["no server's own logs were looked at, its `vlaunch serve` does"]))
    )


def _node(
    inventory: Inventory,
    node: Node,
    facts: HostFacts,
    table: Sequence[ray.RayNode],
    kept: Kept,
    ranks: tuple[str, ...],
) -> NodeStatus:
    own = facts.container(containers.name(inventory, node))
    row = next((each for each in table if each.ip == node.ip), None)
    heard = kept.agent if node.head else kept.members.get(node.name, math.inf)
    known = (
        own is not None and own.running and containers.renewed(own) and kept.agent <= servers.SILENT
    )
    return NodeStatus(
        node=node.name,
        role="head" if node.head else "worker",
        ip=node.ip,
        container=own.status if own else "absent",
        image=own.image if own else "",
        ray=(
            "-"
            if inventory.ray.off
            else "alive"
            if row and row.alive
            else "dead"
            if row
            else "absent"
        ),
        agent="" if not known else "connected" if heard <= servers.SILENT else "lost",
        gpus=(
            str(node.gpus)
            if inventory.ray.off
            else f"{row.gpus:g}/{node.gpus}"
            if row
            else f"-/{node.gpus}"
        ),
        ranks=ranks,
        drift=drift(inventory, node, facts),
        trouble=facts.said.get("docker", "") if facts.docker_version is None else "",
    )


def _held(kept: Kept, node: Node, actors: Sequence[str]) -> tuple[str, ...]:
    """Return the ranks on a node: of servers, with several of them each with its name, then those
    of other actors of Ray's.
    """
    found = [
        (each.name, rank)
        for each in kept.running
        if each.observed is not None
        for rank in each.observed.ranks.get(node.name, ())
    ]
    others, known = list(actors), [rank for _, rank in found]
    for rank in known:
        if rank in others:
            others.remove(rank)
    return (
        *(rank if len(kept.running) == 1 else f"{name}: {rank}" for name, rank in found),
        *others,
    )


def _servers(
    inventory: Inventory, facts: Mapping[str, HostFacts], said: Said, kept: Kept
) -> tuple[ServerStatus, ...]:
    """Return each server that is wanted or being ended; where nobody can tell, one without a name
    that says why.
    """
    if why := _unknown(inventory, facts, said):
        return (ServerStatus(name="", state="unknown", detail=why),)
    return tuple(
        _server(
            inventory,
            each,
            kept.agent,
            said.abouts.get(each.name, {}),
            said.completions.get(each.name, {}),
        )
        for each in kept.servers
        if each.state != "stopped"
    )


def _unknown(inventory: Inventory, facts: Mapping[str, HostFacts], said: Said) -> str:
    """Return why nobody knows which servers there are; empty when somebody does, or when there can
    be none.
    """
    head = inventory.head
    if head.name not in facts:
        return "the head cannot be reached"
    there = facts[head.name].container(containers.name(inventory, head))
    if there is None:
        return ""
    if not there.running:
        return f"the head's container is {there.status}: `vlaunch up` starts it"
    if not containers.renewed(there):
        what = running.older(inventory, facts, said.head)
        return (
            f"{f'{what} runs in ' if what else ''}containers of an earlier vlaunch: `vlaunch up`"
            " renews them"
        )
    if "servers" in said.head:
        return ""
    return str(said.head.get("error") or "the head does not tell of servers")[:200]


def _places(wanted: Desired | None, seen: Observed | None) -> Collection[str]:
    """Return the nodes that hold a server: where its ranks were seen (Ray chooses), else where they
    are expected.
    """
    return (seen.ranks if seen else None) or (wanted.places if wanted else ())


def _server(
    inventory: Inventory,
    server: Server,
    agent: float,
    about: Mapping[str, Any],
    completion: Mapping[str, Any],
) -> ServerStatus:
    wanted, seen = (
        server.desired,
        servers.named(inventory, server.observed) if server.observed else None,
    )
    state, detail = _state(server, seen, agent, completion)
    capacity = about.get("capacity") or {}
    answered = state == "answering"
    here = wanted is not None and any(node.name == wanted.api_node for node in inventory.nodes)
    stale = f"{_unheard(agent)}, so that nobody keeps it" if agent > servers.SILENT else ""
    counted = seen.load if seen and server.age < _STILL else None
    return ServerStatus(
        name=server.name,
        state=state,
        backend=wanted.backend if wanted else "",
        model=str((completion.get("model") if answered else "") or server.model),
        nodes=tuple(node.name for node in inventory.nodes if node.name in _places(wanted, seen)),
        endpoint=(
            endpoint(inventory, wanted.host, wanted.port, wanted.api_node)
            if wanted and here
            else ""
        ),
        detail=detail,
        warning=(stale or (seen.warning if seen else "")) if state in ("answering", "busy") else "",
        fingerprint=str(completion.get("system_fingerprint", "")) if answered else "",
        seconds=float(completion.get("seconds", 0)) if answered else 0.0,
        kv_tokens=_number(capacity.get("kv_cache_size_tokens"), int),
        concurrency=_number(capacity.get("kv_cache_max_concurrency"), float),
        load=_load(completion.get("load")) or counted or _load(about.get("load")),
        observed=seen,
        age=server.age if seen else None,
    )


def _state(
    server: Server, seen: Observed | None, agent: float, completion: Mapping[str, Any]
) -> tuple[ServerState, str]:
    """Judge a server by what just came back from it, and else by what its keeper says; with the
    reason.
    """
    said = server.state
    if said in ("failed", "gave-up"):
        return ("failed" if said == "failed" else "gave-up"), seen.doing if seen else ""
    mute = _mute(completion)
    if completion.get("status") == 200 and not mute:
        return "answering", ""
    if completion.get("moved") is True:
        return "busy", ""
    if agent > servers.SILENT:
        return "unknown", _unheard(agent)
    if server.desired is None:
        return "stopping", seen.doing if seen else ""
    if seen is None:
        return "waiting", "its keeper has not begun with it"
    if said != "ready":
        before: dict[str, ServerState] = {"starting": "starting", "stopping": "stopping"}
        return "recovering" if seen.fault_count else before.get(said, "waiting"), seen.doing
    if not completion:
        return "unknown", "the node that has its API was not asked"
    # Its own canary is on its way too, or refused while other requests are answered; CPU and GPU
    # time count as movement.
    if seen.still < _STILL and server.age < _STILL and (seen.asking > 0 or seen.warning):
        return "busy", "; ".join(mute)
    why = (
        "; ".join(mute)
        or f"no completion: {str(completion.get('error') or 'no reason given')[:200]}"
    )
    why += f"; nothing has moved for {seen.still:.0f} s" if seen.still >= _STILL else ""
    return "silent", f"{why}; its keeper: {seen.doing}" if seen.doing else why


def _unheard(agent: float) -> str:
    return (
        f"the head's agent has said nothing for {agent:.0f} s"
        if math.isfinite(agent)
        else "the head's agent says nothing"
    )


def _mute(completion: Mapping[str, Any]) -> list[str]:
    """Say which replicas of a data-parallel server gave no answer, where each was asked: half of
    the requests hang then.
    """
    asked = completion.get("replicas") or ()
    return [
        f"replica {number} of {len(asked)} gave no"
        f" completion{': ' + str(each['error'])[:200] if each.get('error') else ''}"
        for number, each in enumerate(asked)
        if not each.get("answered")
    ]


def _load(said: Any) -> Load | None:
    counts = said if isinstance(said, Mapping) else {}
    runs, waiting = _number(counts.get("running"), int), _number(counts.get("waiting"), int)
    if runs is None or waiting is None:
        return None
    return Load(
        running=runs,
        waiting=waiting,
        tokens_per_s=_number(counts.get("tokens_per_s"), float) or 0.0,
    )


def _number(text: Any, kind: type[Any]) -> Any:
    try:
        return kind(float(text)) if abs(float(text)) < 1e15 else None
    except (TypeError, ValueError, OverflowError):
        return None
