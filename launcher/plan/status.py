"""What is there, compared with what was asked for: one question a node, one more to the head, and nothing assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launcher.checks.ray import read_payload
from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Inventory, Node, Secret
from launcher.plan import batches, containers, engine_log, running, supervised, verdict
from launcher.plan.batch import ask_list
from launcher.plan.batches import BatchStatus
from launcher.plan.running import Running
from launcher.plan.supervised import Supervision
from launcher.plan.watched import endpoint
from launcher.tools import docker, payload, ray
from launcher.tools.desk import Entry, parse_list
from launcher.tools.host import HostFacts
from launcher.transport import Command

ServerState = Literal["answering", "silent", "starting", "recovering", "gave-up", "failed", "none", "unknown"]
_RED = ("silent", "recovering", "gave-up", "failed")
_MARK = "vlaunch.secrets"  # the label with the fingerprint of a container's secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node. `drift` says how its containers differ from the inventory; `trouble` why it could not be looked at."""

    node: str
    role: str
    ip: str
    container: str
    image: str = ""
    ray: str = ""
    gpus: str = ""
    ranks: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The server. It is `answering` only when a completion has just come back; `supervision` is what its supervisor says."""

    state: ServerState
    backend: str = ""
    model: str = ""
    detail: str = ""
    fingerprint: str = ""
    seconds: float = 0.0
    kv_tokens: int | None = None
    concurrency: float | None = None
    supervision: Supervision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Everything that `status` shows. It is `whole` when every node is in Ray (or holds a rank), nothing has drifted, and no
    server is dead that should run."""

    cluster: str
    nodes: tuple[NodeStatus, ...]
    server: ServerStatus
    endpoint: str
    network: str = ""
    batches: tuple[BatchStatus, ...] = ()

    @property
    def whole(self) -> bool:
        """True when every container runs as the inventory says, every node is in the cluster, and no server is dead."""
        dead = self.server.state in _RED
        good = (n.container == "running" and n.ray in ("alive", "-") and not n.drift and not n.trouble for n in self.nodes)
        return not dead and all(good)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the head answered: about Ray and its jobs, the last verdict on the network, the server, and batch jobs; `error`
    where it could not answer."""

    ray: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    completion: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[Entry, ...] = ()


def ask_ray(inventory: Inventory, facts: Mapping[str, HostFacts]) -> list[Command]:
    """Return what to ask the head about Ray and its jobs, and about the network: nothing when its container does not run."""
    if inventory.head.name not in facts or not running.head_runs(inventory, facts):
        return []
    peers = tuple(f"{node.ip}:{inventory.ports.node_manager}" for node in inventory.nodes)
    return [
        running.ask_jobs(inventory, inventory.serve.bind, inventory.ports.api, peers=peers),
        verdict.ask_record(inventory, facts),
    ]


def ask_server(inventory: Inventory, server: Running) -> list[Command]:
    """Return what to ask a server: what it says of itself, and a completion, the only proof that it answers."""
    head = inventory.head
    ports, host = replace(inventory.ports, api=server.port), payload.api_host(server.host)
    inside = containers.name(inventory, head) if server.backend == "ray" else containers.rank_name(inventory, head)
    verbs = (payload.server(ports, host), payload.complete(ports, host, "Say hello.", 1, 20, server.replicas))
    return [Command(node=head.name, argv=docker.exec_(head.docker, inside, *verb), timeout=40) for verb in verbs]


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
    """Read one answer of the head; what cannot be read is an `error` like any other."""
    try:
        return read_payload(answer)
    except UnreadableAnswer as error:
        return {"error": error.message or "no answer"}


def read(inventory: Inventory, facts: Mapping[str, HostFacts], said: Said, missing: Mapping[str, str]) -> ClusterStatus:
    """Put the answers together; `missing` has, for each node that could not be reached, why."""
    listed = ray.parse_nodes(said.ray["nodes"]) if said.ray.get("nodes") else ()
    ranks = ray.parse_ranks(said.ray["actors"], listed) if said.ray.get("actors") else {}
    closed = said.ray.get("unreachable") or ()
    # Ray misses a node some seconds after its port is closed.
    table = [replace(row, alive=row.alive and f"{row.ip}:{inventory.ports.node_manager}" not in closed) for row in listed]
    nodes = tuple(
        NodeStatus(
            node=node.name, role="head" if node.head else "worker", ip=node.ip, container="unknown",
            trouble=missing[node.name],
        )
        if node.name in missing
        else _node(inventory, node, facts[node.name], table, ranks.get(node.ip, ()))
        for node in inventory.nodes
    )  # fmt: skip
    server = next(iter(running.find(inventory, facts, said.ray)), None)
    return ClusterStatus(
        cluster=inventory.cluster,
        nodes=nodes,
        server=_server(inventory, facts, said, server),
        endpoint=endpoint(inventory, server.host, server.port)
        if server
        else endpoint(inventory, inventory.serve.bind, inventory.ports.api),
        network=_network(inventory, facts, said.network, server),
        batches=tuple(each for each in batches.read(inventory, said.batches, said.ray) if each.runs),
    )


def drift(inventory: Inventory, node: Node, facts: HostFacts) -> tuple[str, ...]:
    """Say how a node's containers differ from the inventory: Ray's, and that of the `mp` backend.

    `status` fetches no secrets, so that a new value of one goes unseen where the fingerprint is made of values.
    """
    own = facts.container(containers.name(inventory, node))
    rank = facts.container(containers.rank_name(inventory, node))
    of_ray = _ray_drift(inventory, node, facts, own) if own is not None else []
    of_rank = _rank_drift(inventory, node, facts, rank) if rank is not None else []
    return (*of_ray, *(each if own is None else f"rank: {each}" for each in of_rank))


def _ray_drift(inventory: Inventory, node: Node, facts: HostFacts, there: docker.Container) -> list[str]:
    base, image = facts.images.get(inventory.image), facts.images.get(there.image)
    made_from = image.labels.get("vlaunch.base") if image else None
    spec = containers.ray_spec(
        inventory, node, facts, there.image if made_from else inventory.image, _secrets(inventory),
        fingerprinted=_fingerprint(inventory, there),
    )  # fmt: skip
    said = _differences(there, [spec], image)
    if made_from and (base is None or made_from != base.identity):
        said.insert(0, f"{there.image} was not made from the present {inventory.image}")
    return said


def _rank_drift(inventory: Inventory, node: Node, facts: HostFacts, there: docker.Container) -> list[str]:
    """Compare all but what `serve` was asked for, which nobody knows here: the command, its labels, whether it restarts."""
    asked_for = {name: there.labels[name] for name in running.LABELS if name in there.labels}
    mark = _fingerprint(inventory, there)
    specs = [
        containers.rank_spec(
            inventory, node, facts, inventory.image, _secrets(inventory), argv=there.argv[1:], labels=asked_for,
            env=engine_log.variables(inventory), restart=restart,
        )
        for restart in ("unless-stopped", "no")
    ]  # fmt: skip
    specs = [replace(spec, labels={**spec.labels, **({_MARK: mark} if mark else {})}) for spec in specs]
    return _differences(there, specs, facts.images.get(there.image))


def _differences(there: docker.Container, specs: Sequence[docker.ContainerSpec], image: docker.Image | None) -> list[str]:
    """Say how a container differs from what it should be, when it is none of `specs`."""
    if there.spec in [spec.hash for spec in specs]:
        return []
    # Of an image that was not looked at nobody knows which variables it brings: those that nobody sets are taken for its own.
    brought = image.env if image else {name: value for name, value in there.env.items() if name not in specs[0].env}
    return docker.differences(there, specs[0], brought)


def _secrets(inventory: Inventory) -> dict[str, Secret]:
    """Return the secrets that containers get, without their values."""
    return dict.fromkeys([*inventory.secrets, *([ray.TOKEN] if inventory.ray.token_auth else [])], Secret(""))


def _fingerprint(inventory: Inventory, there: docker.Container) -> str | None:
    """Return what stands in for the fingerprint of secrets: the container's own, unless it follows from names alone."""
    return there.labels.get(_MARK) if inventory.ray.token_auth else None


def _network(inventory: Inventory, facts: Mapping[str, HostFacts], kept: Mapping[str, Any], server: Running | None) -> str:
    """Say what is proven of the network between these very containers, and what a server's own logs say of it.

    Empty where there is no network, or nobody to ask.
    """
    if len(inventory.nodes) == 1 or not verdict.incarnation(inventory, facts):
        return ""
    if kept.get("incarnation") != verdict.incarnation(inventory, facts):
        return "not proven for these containers: `vlaunch check-nccl`"
    said = f"{'proven' if kept.get('passed') else 'failed'} {kept.get('taken', '')}: {kept.get('summary', '')}"
    if server is None or inventory.accelerator == "cpu":
        return said
    own = kept.get("said") if kept.get("server") == server.id else ""
    return f"{said}; the server: {own or 'its own logs were not looked at, the same `vlaunch serve` does'}"


def _node(
    inventory: Inventory, node: Node, facts: HostFacts, table: Sequence[ray.RayNode], ranks: tuple[str, ...]
) -> NodeStatus:
    own = facts.container(containers.name(inventory, node))
    rank = facts.container(containers.rank_name(inventory, node))
    row = next((each for each in table if each.ip == node.ip), None)
    shown = own or rank
    if rank is not None:
        ranks = (*ranks, f"mp rank ({rank.status})")
    return NodeStatus(
        node=node.name,
        role="head" if node.head else "worker",
        ip=node.ip,
        container=shown.status if shown else "absent",
        image=shown.image if shown else "",
        ray="-" if own is None and rank is not None else "alive" if row and row.alive else "dead" if row else "absent",
        gpus=f"{row.gpus:g}/{node.gpus}" if row else f"-/{node.gpus}",
        ranks=ranks,
        drift=drift(inventory, node, facts),
        trouble=facts.said.get("docker", "") if facts.docker_version is None else "",
    )


def _server(inventory: Inventory, facts: Mapping[str, HostFacts], said: Said, server: Running | None) -> ServerStatus:
    if inventory.head.name not in facts:
        return ServerStatus(state="unknown", detail="the head cannot be reached")
    if server is None:
        return _no_server(inventory, facts[inventory.head.name], said)
    capacity = said.server.get("capacity") or {}
    kept = supervised.read(inventory, said.server.get("supervised") or said.ray.get("supervised"))
    kept = kept if kept is not None and kept.id == server.digest else None
    if said.completion.get("status") == 200 and (mute := _mute(said.completion)):
        why = "; ".join(mute)
        return ServerStatus(state="silent", backend=server.backend, model=server.model, detail=why, supervision=kept)
    if said.completion.get("status") == 200:
        return ServerStatus(
            state="answering", backend=server.backend, model=said.completion.get("model") or server.model,
            fingerprint=str(said.completion.get("system_fingerprint", "")),
            seconds=float(said.completion.get("seconds", 0)),
            kv_tokens=_number(capacity.get("kv_cache_size_tokens"), int),
            concurrency=_number(capacity.get("kv_cache_max_concurrency"), float), supervision=kept,
        )  # fmt: skip
    if kept is not None and kept.state in ("recovering", "gave-up"):
        state: ServerState = "recovering" if kept.state == "recovering" else "gave-up"
        return ServerStatus(state=state, backend=server.backend, model=server.model, detail=kept.doing, supervision=kept)
    doubt = f"; its supervisor: {kept.doing}" if kept is not None and kept.doing else ""
    if said.server.get("health") == 200:
        why = f"/health says 200, no completion: {str(said.completion.get('error', ''))[:200]}{doubt}"
        return ServerStatus(state="silent", backend=server.backend, model=server.model, detail=why, supervision=kept)
    if kept is not None and kept.state == "ready":
        why = f"it has answered, and does not now: {str(said.completion.get('error', ''))[:200]}{doubt}"
        return ServerStatus(state="silent", backend=server.backend, model=server.model, detail=why, supervision=kept)
    return ServerStatus(state="starting", backend=server.backend, model=server.model, supervision=kept)


def _mute(completion: Mapping[str, Any]) -> list[str]:
    """Say which replicas of a data-parallel server gave no answer, where each was asked: half of the requests hang then."""
    asked = completion.get("replicas") or ()
    return [
        f"replica {number} of {len(asked)} gave no completion{': ' + str(each['error'])[:200] if each.get('error') else ''}"
        for number, each in enumerate(asked)
        if not each.get("answered")
    ]


def _no_server(inventory: Inventory, head: HostFacts, said: Said) -> ServerStatus:
    """Say why none runs: none was started, the last one failed, or nobody could tell."""
    rank = head.container(containers.rank_name(inventory, inventory.head))
    if rank is not None:
        why = f"rank 0 ended with exit code {rank.exit_code}"
        return ServerStatus(state="failed", backend="mp", model=rank.labels.get(running.MODEL, ""), detail=why)
    if said.ray.get("error"):
        return ServerStatus(state="unknown", detail=str(said.ray["error"])[:200])
    jobs = [job for job in said.ray.get("jobs", ()) if running.MODEL in (job.get("metadata") or {})]
    last = max(jobs, key=lambda job: job.get("end_time") or 0, default=None)
    kept = supervised.read(inventory, said.ray.get("supervised"))
    if kept is not None and kept.state == "gave-up":
        return ServerStatus(state="gave-up", backend="ray", model=kept.model, detail=kept.doing, supervision=kept)
    if last is not None and last.get("status") == "FAILED":
        why = str(last.get("message", ""))[:200]
        return ServerStatus(state="failed", backend="ray", model=last["metadata"][running.MODEL], detail=why)
    return ServerStatus(state="none")


def _number(text: Any, kind: type[Any]) -> Any:
    try:
        return kind(float(text)) if abs(float(text)) < 1e15 else None
    except (TypeError, ValueError, OverflowError):
        return None
