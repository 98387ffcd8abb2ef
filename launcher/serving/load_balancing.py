"""Load balancing between the replicas of a server, as far as vLLM 0.32 supports it.

Internal (default): one API for all replicas. Hybrid: one API per node, for that node's replicas.
External: one API per replica. In the last two modes, a load balancer outside vLLM chooses the API.
"""

import ipaddress
from collections.abc import Iterator

from launcher.core.domain import Inventory, fold
from launcher.core.errors import RequestError
from launcher.serving.serve_request import ServeRequest
from launcher.tools import vllm

_HYBRID = "`-- --data-parallel-hybrid-lb`: each node's API hands requests to the node's replicas"


def check_balancing(request: ServeRequest, inventory: Inventory) -> None:
    """Raise RequestError, with every problem, for a mode that the nodes cannot run."""
    if not vllm.balancing_modes(request.args):
        return
    problems = [*_flag_problems(request), *_placement_problems(request, inventory)]
    problems += _model_problems(request)
    if not problems:
        return
    texts = [text for text, _ in problems]
    raise RequestError(
        texts[0] if len(problems) == 1 else "this load-balancing mode is unavailable here",
        evidence=texts if len(problems) > 1 else (),
        hint="\n".join(dict.fromkeys(hint for _, hint in problems)),
    )


def _flag_problems(request: ServeRequest) -> Iterator[tuple[str, str]]:
    if len(vllm.balancing_modes(request.args)) > 1:
        yield (
            "--data-parallel-hybrid-lb and --data-parallel-external-lb cannot be combined",
            "remove one of the two",
        )
    if request.backend == "ray":
        yield (
            "with Ray, one process starts all replicas and serves the only API",
            "use `--backend mp`: it runs one process per node",
        )
    if request.placement.dp == 1:
        yield (
            "there is only one replica to balance",
            "set the number of replicas: `--data-parallel-size N`",
        )


def _placement_problems(request: ServeRequest, inventory: Inventory) -> Iterator[tuple[str, str]]:
    placement = request.placement
    crowded = {name: count for name, count in placement.replicas if count > 1}
    if request.balancing == "external" and crowded:
        single_hint = f"\none replica on each node: `--gpus {placement.replica_size}`"
        yield (
            "external load balancing needs one replica per node:"
            f" {', '.join(f'{name} would have {count}' for name, count in crowded.items())}",
            f"use {_HYBRID}{single_hint if len(inventory.nodes) >= placement.dp else ''}",
        )
    address = ipaddress.ip_address(request.host) if request.host else None
    one_node = address and not (address.is_unspecified or address.is_loopback)
    if one_node and len(placement.nodes) > 1:
        yield (
            f"{request.host} is the address of one node, but every node would serve an API",
            "bind all addresses on each node: `--bind 0.0.0.0`",
        )


def _model_problems(request: ServeRequest) -> Iterator[tuple[str, str]]:
    """Yield the problem of single replicas of a dense model, with its hint.

    vLLM refuses them (`create_engine_config` in vllm/engine/arg_utils.py). It takes hybrid load
    balancing on a node with one replica for external without repeating that check, and its API
    server then exits with an AssertionError (`_ensure_stats_update_task` in
    vllm/v1/engine/core_client.py).
    """
    placement = request.placement
    single = [name for name, count in placement.replicas if count == 1]
    if placement.experts != 0 or not single or (placement.dp > 1 and len(placement.nodes) == 1):
        return
    first, *_ = single
    yield (
        "vLLM serves no separate API for a single replica of a dense model:"
        f" {fold(single)} would have one replica",
        f"start one server per node: `vlaunch serve --model {request.model} --backend mp"
        f" --tp {placement.tp} --name one --nodes {first}`, and so on",
    )
