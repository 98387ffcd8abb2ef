"""State of a cluster compared with its inventory, from one query per node and one to the head's
agent, whose verdict on servers is shown unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from launcher.agent.observed import FirstAnswer, Load, Observed
from launcher.app.registry import Job
from launcher.core.domain import Node
from launcher.core.transport import Command
from launcher.front.state import FrontState, front_state
from launcher.serving import endpoints
from launcher.serving.endpoints import Endpoint
from launcher.tools import containers, docker, ray
from launcher.tools.containers import find_drift
from launcher.tools.host import UnfinishedModel
from launcher.tools.shipped import certificates, node_files
from launcher.tools.site import Site, network_verdict, servers, serving_judges
from launcher.tools.site.servers import BAD, Server, ServersState
from launcher.tools.site.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node.

    `drift` lists differences between its container and the inventory; `trouble` is the reason if it
    could not be queried.

    `agent` is `connected` or `lost` as the head's agent reports, empty if unknown; an `old_agent`
    runs another version of vlaunch than this one. `privileged`
    means that its container has all of root's rights, `compiled` is the size of its compile cache
    in bytes if known, and `unfinished` lists models with an incomplete copy or download.
    """

    node: str
    role: str
    ip: str
    container: str
    image: str = ""
    ray: str = ""
    agent: str = ""
    old_agent: bool = False
    gpus: str = ""
    ranks: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()
    trouble: str = ""
    privileged: bool = False
    compiled: int | None = None
    unfinished: tuple[UnfinishedModel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server.

    `state` is the supervisor's verdict and `detail` its reason; `unknown` if the head's agent does
    not answer. `endpoint` is the first of `endpoints`, for older consumers of the JSON.

    `observed` is the supervisor's record, `age` seconds old, with node names in place of addresses.
    `seconds` is the duration of its last own request, and `came` the kind of answer from a model
    that does not generate text. An empty name stands for servers that could not be queried.
    """

    name: str
    state: str
    backend: str = ""
    model: str = ""
    nodes: tuple[str, ...] = ()
    endpoint: str = ""
    endpoints: tuple[Endpoint, ...] = ()
    detail: str = ""
    warning: str = ""
    fingerprint: str = ""
    came: str = ""
    seconds: float = 0.0
    kv_tokens: int | None = None
    concurrency: float | None = None
    load: Load | None = None
    observed: Observed | None = None
    age: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """All data that `status` shows. `servers` are those with a spec or still stopping,
    `certificates` a warning before the agents' certificates expire.
    """

    cluster: str
    nodes: tuple[NodeStatus, ...]
    servers: tuple[ServerStatus, ...] = ()
    endpoint: str
    network: str = ""
    certificates: str = ""
    front: FrontState | None = None
    batches: tuple[Job, ...] = ()

    @property
    def whole(self) -> bool:
        """True if all containers match the inventory, all nodes joined, and no server failed."""
        good = (
            n.container == "running"
            and n.ray in ("alive", "-")
            and n.agent != "lost"
            and not n.drift
            and not n.trouble
            for n in self.nodes
        )
        front = self.front is None or self.front.whole
        return all(good) and front and not any(server.state in BAD for server in self.servers)

    def as_json(self) -> dict[str, Any]:
        """Return the status ready for JSON.

        `server` is the first of `servers`, for older consumers.
        """
        data = asdict(self)
        first = data["servers"][0] if self.servers else {"state": "none"}
        batch_jobs = [job.as_json() for job in self.batches]
        return {**data, "server": first, "batches": batch_jobs, "whole": self.whole}


def query_head(site: Site) -> list[Command]:
    """Return the queries to the head; none if its container does not run."""
    if not site.head_runs:
        return []
    port = site.inventory.ports.node_manager
    peers = tuple(f"{node.ip}:{port}" for node in site.nodes)
    return [serving_judges.query_jobs(site, peers), network_verdict.query_record(site)]


def build_status(
    snapshot: ClusterSnapshot, missing: Mapping[str, str], jobs: tuple[Job, ...] = ()
) -> ClusterStatus:
    """Build the status from the answers; `missing` has the reasons of unreachable nodes."""
    site, inventory, head_state = snapshot.site, snapshot.site.inventory, snapshot.servers_state
    now = datetime.now(timezone.utc)
    nodes = _node_statuses(site, snapshot.payload, head_state, missing)
    server_rows = tuple(
        _server_status(site, server, head_state.agent)
        for server in head_state.servers
        if server.state != "stopped"
    )
    if reason := _unknown_reason(site, snapshot.payload):
        server_rows = (ServerStatus(name="", state="unknown", detail=reason),)
    first = next((server.endpoint for server in server_rows if server.endpoint), "")
    return ClusterStatus(
        cluster=inventory.cluster,
        nodes=nodes,
        servers=server_rows,
        endpoint=first or endpoints.default_url(inventory),
        network=network_verdict.describe_network(site, snapshot.network, head_state),
        certificates=certificates.expiry_warning(
            (facts.certificates for facts in site.facts.values()), now
        ),
        front=front_state(site, now),
        batches=jobs,
    )


def _node_statuses(
    site: Site, head: Mapping[str, Any], head_state: ServersState, missing: Mapping[str, str]
) -> tuple[NodeStatus, ...]:
    listed = ray.parse_nodes(head["nodes"]) if head.get("nodes") else ()
    ranks = ray.parse_ranks(head["actors"], listed) if head.get("actors") else {}
    closed, port = head.get("unreachable") or (), site.inventory.ports.node_manager
    # Ray notices a lost node some seconds after its port has closed.
    table = [replace(row, alive=row.alive and f"{row.ip}:{port}" not in closed) for row in listed]
    rows = {row.ip: row for row in reversed(table)}
    head_facts = site.facts_of(site.head)
    head_down = head_facts is not None and head_facts.docker_version and not site.head_runs
    without_row = "absent" if table or head_down else "unknown"
    return tuple(
        _node_status(
            site,
            node,
            missing.get(node.name),
            rows.get(node.ip),
            without_row,
            head_state,
            ranks.get(node.ip, ()),
        )
        for node in site.nodes
    )


def _node_status(
    site: Site,
    node: Node,
    missing: str | None,
    row: ray.RayNode | None,
    without_row: str,
    head_state: ServersState,
    actors: Sequence[str],
) -> NodeStatus:
    status = NodeStatus(node=node.name, role=containers.role(node), ip=node.ip, container="unknown")
    if missing is not None:
        return replace(status, trouble=missing)
    container, facts, off = site.container(node), site.facts[node.name], site.inventory.ray.off
    without_container = "absent" if facts.docker_version is not None else "unknown"
    in_ray = without_row if row is None else "alive" if row.alive else "dead"
    ray_gpus = f"{row.gpus:g}" if row else "-"
    return replace(
        status,
        container=container.status if container else without_container,
        image=container.image if container else "",
        ray="-" if off else in_ray,
        agent=_agent_state(node, container, head_state),
        old_agent=head_state.programs.get(node.name, "") not in ("", node_files.agent_digest()),
        gpus=str(node.gpus) if off else f"{ray_gpus}/{node.gpus}",
        ranks=servers.ranks_on(node.name, head_state, actors),
        drift=find_drift(site, node),
        trouble=facts.part_errors.get("docker", "") if facts.docker_version is None else "",
        privileged=container is not None and container.privileged,
        compiled=facts.compile_cache.size if facts.compile_cache else None,
        unfinished=facts.unfinished,
    )


def _agent_state(node: Node, container: docker.Container | None, head_state: ServersState) -> str:
    """Return `connected` or `lost` for a node's agent; empty if unknown."""
    if container is None or not container.running or head_state.agent > serving_judges.SILENT:
        return ""
    age = head_state.agent if node.head else head_state.members.get(node.name, math.inf)
    return "connected" if age <= serving_judges.SILENT else "lost"


def _unknown_reason(site: Site, answer: Mapping[str, Any]) -> str:
    """Return the reason why the servers are unknown; empty if there is none."""
    facts = site.facts_of(site.head)
    if facts is None:
        return "the head is unreachable"
    if facts.docker_version is None:
        return "Docker on the head does not answer"
    container = site.container(site.head)
    if container is None:
        return ""
    if not container.running:
        return f"the head's container is {container.status}: `vlaunch up` starts it"
    if "servers" in answer:
        return ""
    return str(answer.get("error") or "the head's agent does not answer")[:200]


def _server_status(site: Site, server: Server, agent: float) -> ServerStatus:
    spec = server.desired
    server = servers.with_node_names(site.nodes, server)
    record = server.observed
    state, detail = servers.server_health(server, agent)
    apis = endpoints.endpoints_with_health(site.inventory, server, state, detail)
    answer = record.first_answer if record is not None and state in servers.READY else None
    model = "" if server.unreadable else server.model
    first = answer if isinstance(answer, FirstAnswer) else FirstAnswer(model=model)
    capacity = endpoints.total_capacity(record.held.values() if record and answer else ())
    return ServerStatus(
        name=server.name,
        state=state,
        backend=spec.backend if spec else "",
        model=first.model,
        nodes=tuple(node.name for node in site.nodes if node.name in server.nodes),
        endpoint=apis[0].url if apis else "",
        endpoints=apis,
        detail=detail,
        warning=record.warning if record and state in servers.READY else "",
        fingerprint=first.fingerprint,
        came=first.came,
        seconds=max((api.seconds for api in apis), default=0.0),
        kv_tokens=capacity.tokens,
        concurrency=capacity.concurrency,
        load=record.load if record is not None else None,
        observed=record,
        age=server.age if record else None,
    )
