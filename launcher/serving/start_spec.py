"""Request to start a server: its spec, its supervision, and the options of the start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from launcher.agent.desired import Policy
from launcher.app import options
from launcher.core.domain import Inventory, ServerSpec
from launcher.core.errors import RequestError
from launcher.serving import load_balancing
from launcher.serving.endpoints import endpoint_url
from launcher.serving.replicas import requested_sizes
from launcher.serving.serve_request import ServeRequest
from launcher.tools import vllm
from launcher.tools.site import placement

F = TypeVar("F", bound=Callable[..., Any])


def start_options(function: F) -> F:
    """Add the options of every command that starts a server."""
    for option in (
        options.NO_WAIT,
        options.START_TIMEOUT,
        click.option("--skip-network-check", is_flag=True, help="Skip the network check."),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec(ServerSpec):
    """A server's spec, its supervision, and the options of one start."""

    policy: Policy
    replace_other: bool = False
    skip_network_check: bool = False
    pair_timeout: float = 20.0
    fetch: bool = False
    no_wait: bool = False
    unsupervised: bool = False  # by a flag, not by the inventory
    planned: bool = False  # the planner chooses the layout
    replicas: int | None = None  # number of copies; None: as many as run
    check_flags: bool = True  # with vLLM's own parser
    partial: bool = False  # one of several copies; the command reports the result of all
    notes: tuple[str, ...] = ()  # on the recipe or the pasted command

    @property
    def label(self) -> str:
        """Name for display."""
        return f"server `{self.name}`"

    def hook_variables(self, inventory: Inventory) -> dict[str, str]:
        """Return the facts about the server that hooks receive."""
        api = placement.narrow_inventory(inventory, self.nodes).head.name
        url = (
            inventory.server_url(self.name)
            if inventory.front
            else endpoint_url(inventory, self.host, self.port, api)
        )
        return {"model": self.model, "endpoint": url}

    def build_request(self, inventory: Inventory, config: Mapping[str, Any] | None) -> ServeRequest:
        """Place the model. Raises RequestError and PlacementError."""
        self._check_ray(inventory)
        narrowed = placement.narrow_inventory(inventory, self.nodes, self.gpus)
        tp, pp, dp = requested_sizes(self, inventory)
        chosen = placement.choose_placement(
            narrowed,
            tp,
            pp,
            config,
            dp=dp,
            pcp=vllm.prefill_context_parallel(self.args),
            backend=self.backend,
            alone=not self.partial,
        )
        request = ServeRequest(**self.spec_fields(), placement=chosen)
        if not self.host:
            host = inventory.api_bind(request.api_nodes(inventory))
            request = replace(request, host=host, default_host=True)
        load_balancing.check_balancing(request, narrowed)
        return request

    def has_fixed_layout(self, inventory: Inventory) -> bool:
        """True if the command line or the inventory sets a layout."""
        serve = inventory.serve
        sizes = (self.tp, self.pp, self.dp, serve.tp, serve.pp)
        return serve.dp > 1 or any(size is not None for size in sizes)

    def _check_ray(self, inventory: Inventory) -> None:
        """Raise RequestError for the Ray backend without Ray, or with a placement it ignores."""
        if self.backend != "ray":
            return
        if inventory.ray.off:
            raise RequestError(
                "the cluster has no Ray (`ray: none` in the inventory)",
                hint="use `--backend mp`; or set a version under `ray:` and run `vlaunch up`",
            )
        nodes, hint = inventory.nodes, "choose the placement yourself: `--backend mp`"
        if set(self.nodes) not in (set(), {node.name for node in nodes}):
            flag = "--nodes"
        elif self.gpus and len(nodes) > 1 and any(self.gpus < node.gpus for node in nodes):
            flag = "--gpus"
            hint += "\nuse fewer GPUs in total, on any node: `--tp` and `--pp`"
        else:
            return
        raise RequestError(
            f"{flag} has no effect with Ray, which places ranks on any free GPUs", hint=hint
        )


def supervision_policy(
    inventory: Inventory, timeout: float | None, *, supervise: bool = True
) -> Policy:
    """Return a server's supervision policy; without `supervise` it never restarts. `timeout` is the
    limit of a start in seconds (None: the inventory's).
    """
    serve = inventory.serve
    restarts = serve.restarts if supervise and serve.supervise else 0
    limit = serve.timeout if timeout is None else timeout
    return Policy(canary=serve.canary, stuck=serve.stuck, restarts=restarts, start_timeout=limit)
