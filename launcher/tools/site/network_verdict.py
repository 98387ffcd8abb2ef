"""Last verdict on the network, stored on the head for `serve` and `status`."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from launcher.agent import state as agent
from launcher.core import decode
from launcher.core.domain import LEVELS, Answer, Level, fold
from launcher.core.errors import UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools.site import Site
from launcher.tools.site.placement import narrow_inventory
from launcher.tools.site.servers import ServersState

FILE = agent.NETWORK
_Positive = Annotated[float, decode.in_range(1e-9, 1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLinks:
    """Description of the links in the logs of the ranks of the server with this `id`."""

    id: str
    said: decode.Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """Link between nodes for the planner: minimum bandwidth in GB/s, median latency in µs, and
    whether it is TCP.
    """

    gbps: _Positive
    latency_us: _Positive
    tcp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecord:
    """Stored verdict; an empty one verifies nothing.

    `incarnation` and `nodes` identify the containers that were checked; `ranks_per_node` 0 means
    one rank per GPU; `collective` is true if the all_reduce passed.
    """

    incarnation: str = ""
    nodes: tuple[str, ...] = ()
    taken: str = ""
    passed: bool = False
    asked: Level | Literal["auto"] = "auto"
    required: Level = "any"
    ranks_per_node: int = 0
    collective: bool = False
    summary: decode.Text = ""
    servers: Mapping[str, ServerLinks] = field(default_factory=dict)
    link: MeasuredLink | None = None


def narrow_site(site: Site, names: Sequence[str]) -> Site:
    """Restrict a site to some nodes (none named: all)."""
    return replace(site, inventory=narrow_inventory(site.inventory, names))


def incarnation(site: Site) -> str:
    """Return a hash that changes when any node's container is replaced or restarted; empty if one
    does not run.
    """
    containers = [site.running_container(node) for node in site.nodes]
    if None in containers:
        return ""
    identities = sorted(
        (container.id, container.started) for container in containers if container is not None
    )
    return hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:16]


def query_record(site: Site) -> Command:
    """Query the last verdict from the head."""
    path = f"{site.state_dir(site.head)}/{FILE}"
    argv = ("sh", "-c", 'cat "$1" 2>/dev/null', "verdict", path)
    return Command(node=site.head.name, argv=argv, timeout=20)


def parse_record(answer: Answer) -> NetworkRecord:
    """Parse the last verdict; empty if unreadable."""
    try:
        return decode.parse_json(NetworkRecord, answer.out, "the last verdict on the network")
    except UnreadableAnswer:
        return NetworkRecord()


def covered_nodes(site: Site, record: NetworkRecord) -> frozenset[str]:
    """Return the nodes of the verdict; none if any of their containers has changed since."""
    all_names = [node.name for node in site.nodes]
    names = record.nodes or all_names
    current = incarnation(narrow_site(site, names)) if set(names) <= set(all_names) else ""
    return frozenset(names if current and current == record.incarnation else ())


def is_verified(
    site: Site,
    record: NetworkRecord,
    *,
    require: Level | None,
    collective: bool,
    nodes: Sequence[str] = (),
) -> bool:
    """Return True if the verdict is about the current containers of `nodes` (none named: all) and
    covers the requirements.
    """
    covered = [site.inventory.node(name) for name in nodes] or site.nodes
    return (
        record.passed
        and (not collective or record.collective)
        and _covers_level(record, require or site.inventory.require)
        # with fewer ranks, some GPUs and their network cards were not tested
        and (record.ranks_per_node or math.inf) >= min(node.gpus for node in covered)
        and {node.name for node in covered} <= covered_nodes(site, record)
    )


def _covers_level(record: NetworkRecord, level: Level | Literal["auto"]) -> bool:
    """Return True if the verdict's required level is at least `level`.

    The meaning of `auto` depends on the nodes: only a verdict on `auto` or on the highest level
    covers it.
    """
    if level == "auto":
        return record.asked == "auto" or record.required == LEVELS[-1]
    return LEVELS.index(record.required) >= LEVELS.index(level)


def describe_network(site: Site, record: NetworkRecord, state: ServersState) -> str:
    """Describe the verdict for the current containers, and the links in servers' logs; empty for a
    single node, or if a container does not run.
    """
    containers = [site.running_container(node) for node in site.nodes]
    if len(containers) == 1 or None in containers:
        return ""
    measured = covered_nodes(site, record)
    if not measured:
        return "not checked for these containers: run `vlaunch check-nccl`"
    names = [node.name for node in site.nodes if node.name in measured]
    scope = "" if len(names) == len(containers) else f" between {fold(names)}"
    text = f"{'verified' if record.passed else 'failed'} {record.taken}{scope}: {record.summary}"
    if site.inventory.accelerator == "cpu":
        return text
    distributed = [
        server
        for server in state.running
        if server.desired is not None and len(server.desired.places) > 1
    ]
    links = [
        f"{server.label}: {link.said}"
        for server in distributed
        if (link := record.servers.get(server.name)) is not None and link.id == server.id
    ]
    if distributed and not links:
        links = ["transport in use not confirmed; `vlaunch serve` confirms it"]
    return "; ".join((text, *links))
