"""Endpoints of a server (one per node behind an external load balancer), their health, and a curl
line to copy.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from launcher.agent.desired import Desired
from launcher.agent.health.task import HEALTH, TRANSCRIPTION, ModelTask
from launcher.agent.observed import EndpointHealth
from launcher.core.domain import Inventory
from launcher.tools import vllm
from launcher.tools.site.servers import DEFAULT, READY, Server, valid_verdict

_PROMPT = "Say hello."


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One API: its node, its URL between the nodes, and its health. `seconds` is the duration of
    its last answer, 0 if unknown.
    """

    node: str
    url: str
    state: str = "unknown"
    detail: str = ""
    seconds: float = 0.0


def endpoint_url(inventory: Inventory, bind: str, port: int, node: str = "") -> str:
    """Return the URL for clients: the address of the node (default: the head) between the nodes, or
    the address in `bind` if that is the only one the API listens on.
    """
    api_node = inventory.node(node) if node else inventory.head
    host = api_node.ip if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def default_url(inventory: Inventory) -> str:
    """Return the URL for clients of a server with the inventory's settings."""
    if inventory.front is not None:
        return inventory.server_url(DEFAULT)
    bind = inventory.api_bind([inventory.head])
    return endpoint_url(inventory, bind, inventory.ports.api)


def list_endpoints(inventory: Inventory, spec: Desired) -> tuple[Endpoint, ...]:
    """Return the endpoints of a server, except on nodes that have left the inventory."""
    node_names = {node.name for node in inventory.nodes}
    return tuple(
        Endpoint(node=api.node, url=endpoint_url(inventory, spec.host, spec.port, api.node))
        for api in spec.apis
        if api.node in node_names
    )


def client_urls(inventory: Inventory, spec: Desired) -> tuple[str, ...]:
    """Return the URLs of a server for clients: the front's, else those of its endpoints."""
    if inventory.front is not None:
        return (inventory.server_url(spec.name),)
    return tuple(endpoint.url for endpoint in list_endpoints(inventory, spec))


def total_capacity(labels_by_api: Iterable[Mapping[str, str]], log: str = "") -> vllm.Capacity:
    """Return the total capacity, from the APIs' labels or a log; None without all reports."""
    capacities = [vllm.parse_capacity(labels, log) for labels in labels_by_api]
    tokens = [part.tokens for part in capacities if part.tokens is not None]
    times = [part.concurrency for part in capacities if part.concurrency is not None]
    return vllm.Capacity(
        tokens=sum(tokens) if tokens and len(tokens) == len(capacities) else None,
        concurrency=sum(times) if times and len(times) == len(capacities) else None,
    )


def endpoints_with_health(
    inventory: Inventory, server: Server, state: str, detail: str
) -> tuple[Endpoint, ...]:
    """Return a server's endpoints with the agent's verdict on each, else the server's state."""
    if server.desired is None:
        return ()
    health_by_node = server.observed.endpoints if server.observed and state in READY else {}
    server_health = EndpointHealth(verdict=state, reason=detail)
    return tuple(
        replace(
            endpoint,
            url=inventory.server_url(server.name) if inventory.front else endpoint.url,
            state=valid_verdict(health.verdict),
            detail=health.reason,
            seconds=health.seconds or 0.0,
        )
        for endpoint in list_endpoints(inventory, server.desired)
        for health in [health_by_node.get(endpoint.node, server_health)]
    )


def curl_line(endpoint: str, task: ModelTask, model: str, *, key: str = "") -> str:
    """Return a curl command line that uses the served model.

    Args:
        endpoint: the URL of its API, with `/v1`.
        task: the kind of request that the model answers.
        model: its name.
        key: the shell variable with the key; empty without one. The line may be pasted anywhere, so
            it names the variable only.
    """
    argv = ["curl", f"{endpoint.removesuffix('/v1')}{task.path}"]
    header = f' -H "Authorization: Bearer ${key}"' if key else ""
    return f"{shlex.join(argv)}{header}{_curl_body(task, model)}"


def client_curl_line(inventory: Inventory, spec: Desired, task: ModelTask, model: str) -> str:
    """Return a client's curl command line, with a user's key where there is a front."""
    url, *_ = client_urls(inventory, spec)
    own_key = "VLLM_API_KEY" if "VLLM_API_KEY" in inventory.secrets else ""
    return curl_line(url, task, model, key="OPENAI_API_KEY" if inventory.front else own_key)


def _curl_body(task: ModelTask, model: str) -> str:
    if task is HEALTH:
        return ""
    if task is TRANSCRIPTION:
        return f" -F {shlex.quote(f'model={model}')} -F file=@speech.wav"
    body = json.dumps(task.body(model, _PROMPT, 64))
    return f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
