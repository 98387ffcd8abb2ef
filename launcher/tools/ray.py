"""Command lines of Ray (2.60), and parsers for its state.

The head's agent queries the dashboard's HTTP API; the text of `ray status` is parsed as well,
because operators will compare it with vlaunch's own status.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher import upstream
from launcher.agent.processes.rank_name import rank_name
from launcher.core import untrusted
from launcher.core.domain import Argv, Inventory, Node, long_options
from launcher.core.errors import UnreadableAnswer

_AMOUNT = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the file's name


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """Row of Ray's node table; `gpus` is the node's contribution."""

    id: str
    ip: str
    alive: bool
    gpus: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStatus:
    """Contents of `ray status`: active nodes, including idle ones, and used and total GPUs, `None`
    if there are none.
    """

    active: int
    gpus_used: float | None
    gpus_total: float | None


def start_head(node: Node, inventory: Inventory) -> Argv:
    """Start the head in the foreground with fixed ports (`ray start --head --block`)."""
    ports = inventory.ports
    options = long_options(
        node_ip_address=node.ip,
        port=ports.gcs,
        dashboard_host="127.0.0.1",
        dashboard_port=ports.dashboard,
        ray_client_server_port=ports.client,
    )
    return ("ray", "start", "--head", "--block", *options, *_common_options(node, inventory))


def start_worker(node: Node, inventory: Inventory) -> Argv:
    """Join the head in the foreground (`ray start --address --block`)."""
    address = f"{inventory.head.ip}:{inventory.ports.gcs}"
    options = long_options(address=address, node_ip_address=node.ip)
    return ("ray", "start", "--block", *options, *_common_options(node, inventory))


def _common_options(node: Node, inventory: Inventory) -> Argv:
    ports, store = inventory.ports, inventory.ray.object_store
    pinned = long_options(
        node_manager_port=ports.node_manager,
        object_manager_port=ports.object_manager,
        runtime_env_agent_port=ports.runtime_env_agent,
        dashboard_agent_grpc_port=ports.dashboard_agent_grpc,
        dashboard_agent_listen_port=ports.dashboard_agent_http,
        metrics_export_port=ports.metrics_export,
        min_worker_port=ports.worker_min,
        max_worker_port=ports.worker_max,
    )
    memory = {} if store is None else {"object_store_memory": store}
    return (*long_options(num_gpus=node.gpus, **memory), *pinned, "--disable-usage-stats")


def parse_nodes(rows: Any) -> tuple[RayNode, ...]:
    """Parse Ray's node table; drops the dead rows of nodes that have rejoined."""
    try:
        nodes = [
            RayNode(
                id=_text(row["node_id"]),
                ip=_text(row["node_ip"]),
                alive=row["state"] == "ALIVE",
                gpus=float((row.get("resources_total") or {}).get("GPU", 0)),
                message=_text(row.get("state_message") or ""),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableAnswer("Ray's node table cannot be read", evidence=repr(error)) from None
    living = {node.ip for node in nodes if node.alive}
    return tuple(node for node in nodes if node.alive or node.ip not in living)


def parse_status(text: str) -> RayStatus:
    """Parse `ray status`; raises UnreadableAnswer when sections are missing."""
    sections = _split_sections(untrusted.truncate(text))
    if upstream.text("ray.status-active") not in sections:
        raise UnreadableAnswer(
            "`ray status` printed no `Active:` section", evidence=untrusted.excerpt(text, last=True)
        )
    usage = sections.get(upstream.text("ray.status-usage"), sections.get("Usage", []))
    gpu = next((m for line in usage if (m := re.match(rf"{_AMOUNT}/{_AMOUNT} GPU\b", line))), None)
    idle = sections.get(upstream.text("ray.status-idle"), [])
    lines = [*sections[upstream.text("ray.status-active")], *idle]
    counts = [match[1] for line in lines if (match := re.match(r"([0-9]{1,9}) \S+", line))]
    if len(counts) < len(lines):
        raise UnreadableAnswer(
            "`ray status` names a node in a form that cannot be read", evidence=lines
        )
    return RayStatus(
        active=sum(map(int, counts)),
        gpus_used=float(gpu[1]) if gpu else None,
        gpus_total=float(gpu[2]) if gpu else None,
    )


def _split_sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each section by title; `(no …)` marks an empty one."""
    sections: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][A-Za-z_ ]*(?: [a-z_]+)?:", line.rstrip()):
            current = line.strip().rstrip(":")
            sections[current] = []
        elif current and line.startswith(" ") and not line.strip().startswith("(no "):
            sections[current].append(line.strip())
        elif not line.strip():
            current = ""
    return sections


def parse_ranks(
    actors: Iterable[Mapping[str, Any]], nodes: tuple[RayNode, ...]
) -> Mapping[str, tuple[str, ...]]:
    """Return the ranks by address, from the names of living actors."""
    by_id = {node.id: node.ip for node in nodes}
    ranks: dict[str, list[str]] = {}
    try:
        living = [
            (rank_name(_text(row.get("name") or "")[:200]), _text(row.get("node_id") or ""))
            for row in actors
            if row.get("state") == "ALIVE"
        ]
    except (TypeError, AttributeError) as error:
        raise UnreadableAnswer(
            "Ray's list of actors cannot be read", evidence=repr(error)
        ) from None
    for name, node_id in living:
        if name:
            ranks.setdefault(by_id.get(node_id, "?"), []).append(name)
    return {ip: tuple(sorted(names)) for ip, names in sorted(ranks.items())}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r:.80}")
    return value
