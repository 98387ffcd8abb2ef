"""What is there, compared with what was asked for: one question a node, one more to the head, and nothing assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.checks.ray import read_payload
from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Inventory, Node, Secret
from launcher.plan import containers
from launcher.tools import docker, payload, ray
from launcher.tools.host import HostFacts
from launcher.transport import Command

ServerState = Literal["answering", "silent", "starting", "failed", "none", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node. `drift` says how its container differs from the inventory; `trouble` why it could not be looked at."""

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
    """The server. It is `answering` only when a completion has just come back."""

    state: ServerState
    backend: str = ""
    model: str = ""
    detail: str = ""
    fingerprint: str = ""
    seconds: float = 0.0
    kv_tokens: int | None = None
    concurrency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Everything that `status` shows. It is `whole` when every node is in Ray (or holds a rank) and nothing has drifted."""

    cluster: str
    nodes: tuple[NodeStatus, ...]
    server: ServerStatus
    endpoint: str

    @property
    def whole(self) -> bool:
        """True when every container runs as the inventory says and every node is in the cluster."""
        return all(n.container == "running" and n.ray in ("alive", "-") and not n.drift and not n.trouble for n in self.nodes)


def questions(inventory: Inventory, facts: Mapping[str, HostFacts]) -> list[Command]:
    """Return what to ask besides the probe: the head's Ray container, or else rank 0's, about jobs and the server."""
    head = inventory.head
    if head.name not in facts:
        return []
    host = payload.api_host(inventory.serve.bind)
    name, verb = containers.name(inventory, head), payload.jobs(inventory.ports, host)
    rank = facts[head.name].container(containers.rank_name(inventory, head))
    if rank is not None and rank.running:
        asked = [(name, verb)] if _runs(facts[head.name], name) else []
        asked.append((rank.name, payload.server(inventory.ports, host)))
    elif _runs(facts[head.name], name):
        asked = [(name, verb)]
    else:
        return []
    asked.append((asked[-1][0], payload.complete(inventory.ports, host, "Say hello.", 1, 20)))
    return [Command(node=head.name, argv=docker.exec_(head.docker, where, *words), timeout=40) for where, words in asked]


def read(
    inventory: Inventory, facts: Mapping[str, HostFacts], answers: Sequence[Answer], missing: Mapping[str, str]
) -> ClusterStatus:
    """Put the answers together; `missing` has, for each node that could not be reached, why."""
    said = [_said(answer) for answer in answers]
    completion = said.pop() if said else {}
    ray_said = next((each for each in said if "jobs" in each), said[0] if said else {})
    server_said = said[-1] if said else {}
    table = ray.parse_nodes(ray_said["nodes"]) if ray_said.get("nodes") else ()
    ranks = ray.parse_ranks(ray_said["actors"], table) if ray_said.get("actors") else {}
    nodes = tuple(
        NodeStatus(
            node=node.name, role="head" if node.head else "worker", ip=node.ip, container="unknown",
            trouble=missing[node.name],
        )
        if node.name in missing
        else _node(inventory, node, facts[node.name], table, ranks.get(node.ip, ()))
        for node in inventory.nodes
    )  # fmt: skip
    return ClusterStatus(
        cluster=inventory.cluster,
        nodes=nodes,
        server=_server(inventory, facts, ray_said, server_said, completion),
        endpoint=f"http://{inventory.head.ip}:{inventory.ports.api}/v1",
    )


def drift(inventory: Inventory, node: Node, facts: HostFacts) -> tuple[str, ...]:
    """Say how a node's Ray container differs from the inventory; values of secrets are not compared, only their names."""
    there = facts.container(containers.name(inventory, node))
    if there is None:
        return ()
    base, own = facts.images.get(inventory.image), facts.images.get(there.image)
    made_from = own.labels.get("vlaunch.base") if own else None
    names = [*inventory.secrets, *([ray.TOKEN] if inventory.ray.token_auth else [])]
    spec = containers.ray_spec(
        inventory, node, facts, there.image if made_from else inventory.image, dict.fromkeys(names, Secret("")),
        fingerprinted=there.labels.get("vlaunch.secrets"),
    )  # fmt: skip
    said = [] if spec.hash == there.spec else docker.differences(there, spec, own.env if own else {})
    if made_from and (base is None or made_from != base.identity):
        said.insert(0, f"{there.image} was not made from the present {inventory.image}")
    return tuple(said)


def _runs(facts: HostFacts, name: str) -> bool:
    container = facts.container(name)
    return container is not None and container.running


def _said(answer: Answer) -> dict[str, Any]:
    try:
        return read_payload(answer)
    except UnreadableAnswer as error:
        return {"error": error.message or "no answer"}


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


def _server(
    inventory: Inventory,
    facts: Mapping[str, HostFacts],
    ray_said: Mapping[str, Any],
    said: Mapping[str, Any],
    completion: Mapping[str, Any],
) -> ServerStatus:
    head = facts.get(inventory.head.name)
    if head is None:
        return ServerStatus(state="unknown", detail="the head cannot be reached")
    rank = head.container(containers.rank_name(inventory, inventory.head))
    jobs = [job for job in ray_said.get("jobs", ()) if (job.get("metadata") or {}).get("vlaunch.model")]
    running = [job for job in jobs if job.get("status") in ("RUNNING", "PENDING")]
    backend = "mp" if rank is not None else "ray" if jobs else ""
    model = rank.labels.get("vlaunch.model", "") if rank is not None else ""
    if running or (jobs and rank is None):
        model = (running or jobs)[-1]["metadata"]["vlaunch.model"]
    capacity = said.get("capacity") or {}
    if completion.get("status") == 200:
        return ServerStatus(
            state="answering", backend=backend, model=completion.get("model") or model,
            fingerprint=str(completion.get("system_fingerprint", "")), seconds=float(completion.get("seconds", 0)),
            kv_tokens=_number(capacity.get("kv_cache_size_tokens"), int),
            concurrency=_number(capacity.get("kv_cache_max_concurrency"), float),
        )  # fmt: skip
    if said.get("health") == 200:
        why = str(completion.get("error", ""))[:200]
        return ServerStatus(state="silent", backend=backend, model=model, detail=f"/health says 200, no completion: {why}")
    if running or (rank is not None and rank.running):
        return ServerStatus(state="starting", backend=backend, model=model)
    if rank is not None:
        return ServerStatus(state="failed", backend="mp", model=model, detail=f"rank 0 ended with exit code {rank.exit_code}")
    last = max(jobs, key=lambda job: job.get("end_time") or 0, default=None)
    if last is not None and last.get("status") == "FAILED":
        return ServerStatus(state="failed", backend="ray", model=model, detail=str(last.get("message", ""))[:200])
    if ray_said.get("error"):
        return ServerStatus(state="unknown", detail=str(ray_said["error"])[:200])
    return ServerStatus(state="none")


def _number(text: Any, kind: type[Any]) -> Any:
    try:
        return kind(float(text))
    except (TypeError, ValueError):
        return None
