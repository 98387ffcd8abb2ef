"""HAProxy's configuration: rendered from the inventory's `front:` and the cluster's servers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.agent import state
from launcher.agent.desired import Desired
from launcher.agent.front import router_process
from launcher.agent.front.haproxy import STATES
from launcher.core.domain import FrontSettings, Inventory, Node
from launcher.tools import vllm
from launcher.tools.agent_queries import address
from launcher.tools.site.servers import Server

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).with_name("haproxy.cfg.jinja")
LUA = Path(__file__).with_name("front.lua")
# Folders in the front's container: what it reads and its socket, its secrets, its own sockets.
FILES, SECRETS, RUN = "/var/lib/vlaunch-front", "/run/vlaunch/front", "/run"
TARGETS = "targets.json"  # in FILES: what `scrape_targets` returns
# Names of models that need no quotes in HAProxy's rules; requests for others go to the router.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One API of a server, `host:port`, on a node. HAProxy names it like the server, or
    `SERVER:NODE` if the server has several.
    """

    name: str
    address: str
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontServer:
    """A group of servers behind the front, under `/NAME/v1`, and the models of its first one."""

    name: str
    replicas: tuple[Replica, ...]
    models: tuple[str, ...] = ()


def front_servers(inventory: Inventory, servers: Iterable[Server]) -> tuple[FrontServer, ...]:
    """Return the groups of the servers that have a spec, with their APIs on nodes of the
    inventory.
    """
    ips = {node.name: node.ip for node in inventory.nodes}
    groups: dict[str, list[Replica]] = {}
    models: dict[str, tuple[str, ...]] = {}
    for server in sorted(servers, key=lambda server: state.replica_number(server.name)):
        if server.desired is not None and (replicas := _replicas(server.name, server.desired, ips)):
            groups.setdefault(state.group_of(server.name), []).extend(replicas)
            models.setdefault(state.group_of(server.name), served_models(server.desired))
    return tuple(
        FrontServer(name=name, replicas=tuple(groups[name]), models=models[name])
        for name in sorted(groups)
    )


def served_models(spec: Desired) -> tuple[str, ...]:
    """Return the names under which a server's requests select its model and adapters."""
    argv = spec.apis[0].argv
    names = vllm.all_values(argv, "--served-model-name")
    if not names:
        names = [*argv[argv.index("serve") + 1 :][:1]] if "serve" in argv else [spec.model]
    adapters = vllm.all_values(argv, "--lora-modules")
    return tuple(dict.fromkeys((*names, *filter(None, map(_adapter_name, adapters)))))


def _adapter_name(module: str) -> str:
    """Return the name of an adapter: `NAME=PATH`, or a JSON object."""
    if not module.startswith("{"):
        return module.partition("=")[0]
    try:
        return str(json.loads(module).get("name", ""))
    except ValueError:
        return ""


def servers_of_models(servers: Iterable[FrontServer]) -> dict[str, list[str]]:
    """Return the servers of each model."""
    models: dict[str, list[str]] = {}
    for server in servers:
        for model in server.models:
            models.setdefault(model, []).append(server.name)
    return models


def render_table(front: FrontSettings, servers: Iterable[FrontServer]) -> str:
    """Return the models and limits for the router."""
    table = {"max_body": front.max_body, "models": servers_of_models(servers)}
    return json.dumps(table, indent=1)


def _replicas(server: str, spec: Desired, ips: Mapping[str, str]) -> list[Replica]:
    return [
        Replica(
            name=f"{server}:{api.node}" if len(spec.apis) > 1 else server,
            address=address(spec.only_host or ips[api.node], spec.port),
            node=api.node,
        )
        for api in spec.apis
        if api.node in ips
    ]


def render(
    front: FrontSettings,
    servers: Sequence[FrontServer],
    *,
    metrics_address: str,
    server_key: bool = False,
    **folders: str,
) -> str:
    """Return the configuration; `folders` replaces the folders of the container.

    Its `description` is a digest of the rest: `show info` tells which configuration runs.
    """
    folders = {"files": FILES, "secrets": SECRETS, "run": RUN, **folders}
    socket = f"unix@{folders['files']}/{router_process.SOCKET}"
    router = FrontServer(name="ROUTER", replicas=(Replica(name="router", address=socket),))
    values: Mapping[str, Any] = {
        **folders,
        "servers": servers,
        "backends": (*servers, router),
        "bind": f"[{front.bind}]" if ":" in front.bind else front.bind,
        "port": front.port,
        "metrics": front.metrics,
        "metrics_address": f"[{metrics_address}]" if ":" in metrics_address else metrics_address,
        "tls": front.tls.kind != "off",
        "hold": round(front.hold),
        "timeout": round(front.timeout),
        "max_body": front.max_body,
        "server_key": server_key,
        "targets_file": TARGETS,
        "states": STATES,
        "direct_models": [
            (model, names[0])
            for model, names in servers_of_models(servers).items()
            if len(names) == 1 and _PLAIN.fullmatch(model)
        ],
        "servers_socket": router_process.SERVERS,
        "server_header": router_process.SERVER,
        "replica_header": router_process.REPLICA,
        "models_header": router_process.MODELS,
    }
    text = _template().render(values, digest="")
    return _template().render(values, digest=digest(text))


def scrape_targets(inventory: Inventory, node: Node, servers: Sequence[FrontServer]) -> str:
    """Return the servers' metrics behind a node's front, as JSON for Prometheus' `http_sd_configs`.

    An `instance` is the port of the server on its node, as without a front.
    """
    assert inventory.front is not None  # noqa: S101 - it has a node
    ips = {node.name: node.ip for node in inventory.nodes}
    metrics = address(node.ip, inventory.front.metrics)
    replicas = [replica for server in servers for replica in server.replicas]
    return json.dumps(
        [
            {
                "targets": [metrics],
                "labels": {
                    "__metrics_path__": f"/servers/{replica.name}/metrics",
                    "cluster": inventory.cluster,
                    "node": replica.node,
                    "server": replica.name.partition(":")[0],
                    "instance": address(ips[replica.node], int(replica.address.rpartition(":")[2])),
                },
            }
            for replica in replicas
        ]
    )


def digest(text: str) -> str:
    """Return twelve hex digits that identify a configuration."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(  # noqa: S701 - no HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
