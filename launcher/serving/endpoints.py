"""The endpoints of a server: one, or, behind a load balancer other than vLLM's, one per node;
their health, and the curl line for people to copy.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from launcher.agent.desired import Desired
from launcher.agent.observed import EndpointHealth
from launcher.agent.task import HEALTH, TRANSCRIPTION, ModelTask
from launcher.core.domain import Inventory
from launcher.tools import vllm
from launcher.tools.servers import READY, Server, valid_verdict

_PROMPT = "Say hello."


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One API: its node, its URL between the nodes, and how it is; `seconds` is how long its last
    answer took, 0 where none is known.
    """

    node: str
    endpoint_url: str
    state: str = "unknown"
    detail: str = ""
    seconds: float = 0.0


def endpoint_url(inventory: Inventory, bind: str, port: int, node: str = "") -> str:
    """Return the URL that clients use: the node's address (the head's) between the nodes, or the
    only one it listens on.
    """
    api_node = inventory.node(node) if node else inventory.head
    host = api_node.ip if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def list_endpoints(inventory: Inventory, spec: Desired) -> tuple[Endpoint, ...]:
    """Return where a server answers; without nodes that are none of the inventory's any more."""
    node_names = {node.name for node in inventory.nodes}
    return tuple(
        Endpoint(node=api.node, endpoint_url=endpoint_url(inventory, spec.host, spec.port, api.node))
        for api in spec.apis
        if api.node in node_names
    )


def total_capacity(labels_by_api: Iterable[Mapping[str, str]], log: str = "") -> vllm.Capacity:
    """Return how much all APIs hold together, by what each says of itself, else by an engine's log;
    what one of them does not say is not known.
    """
    capacities = [vllm.parse_capacity(labels, log) for labels in labels_by_api]
    tokens = [part.tokens for part in capacities if part.tokens is not None]
    concurrencies = [part.concurrency for part in capacities if part.concurrency is not None]
    return vllm.Capacity(
        tokens=sum(tokens) if tokens and len(tokens) == len(capacities) else None,
        concurrency=sum(concurrencies)
        if concurrencies and len(concurrencies) == len(capacities)
        else None,
    )


def endpoints_with_health(
    inventory: Inventory, server: Server, state: str, detail: str
) -> tuple[Endpoint, ...]:
    """Return the health of a server's endpoints: that of the server, or, while it is ready, the
    agent's verdict on the endpoint.
    """
    if server.desired is None:
        return ()
    health_by_node = server.observed.endpoints if server.observed and state in READY else {}
    server_health = EndpointHealth(verdict=state, reason=detail)
    return tuple(
        replace(
            endpoint,
            state=valid_verdict(health.verdict),
            detail=health.reason,
            seconds=health.seconds or 0.0,
        )
        for endpoint in list_endpoints(inventory, server.desired)
        for health in [health_by_node.get(endpoint.node, server_health)]
    )


def curl_line(endpoint: str, task: ModelTask, model: str, *, key: bool) -> str:
    """Return the line that asks a server for what its model does.

    Args:
        endpoint: the URL of its API, with `/v1`.
        task: what the model does.
        model: its name.
        key: the server demands one: a shell variable stands for it, as the line may be pasted
            anywhere.
    """
    argv = ["curl", f"{endpoint.removesuffix('/v1')}{task.path}"]
    header = ' -H "Authorization: Bearer $VLLM_API_KEY"' if key else ""
    return f"{shlex.join(argv)}{header}{_curl_body(task, model)}"


def _curl_body(task: ModelTask, model: str) -> str:
    if task is HEALTH:
        return ""
    if task is TRANSCRIPTION:
        return f" -F {shlex.quote(f'model={model}')} -F file=@speech.wav"
    body = json.dumps(task.body(model, _PROMPT, 64))
    return f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
