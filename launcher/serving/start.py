"""Start of a server up to its first answer, for `serve` and `rollback`."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import click

from launcher.agent.desired import Policy
from launcher.agent.task import task_named
from launcher.app import options
from launcher.app.command import CommandContext
from launcher.app.session import Session
from launcher.core import untrusted
from launcher.core.domain import Inventory, Node, ServerSpec
from launcher.core.errors import RequestError
from launcher.core.plan import Plan, Stage
from launcher.core.sizes import format_count
from launcher.distribute import model_fetch
from launcher.serving import endpoints, load_balancing
from launcher.serving.endpoints import endpoint_url
from launcher.serving.serve_plan import StartPlan, plan_serve
from launcher.serving.serve_request import ServeRequest
from launcher.serving.watch import ReadyServer, summary_json, watch_start
from launcher.tools import placement, vllm
from launcher.tools.placement import narrow_inventory
from launcher.tools.snapshot import ClusterSnapshot

if TYPE_CHECKING:
    from launcher.serving.serve_forecast import ServePlan

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


class PendingStart(NamedTuple):
    """A start in progress; `fetch_seconds` is the time spent copying its model."""

    snapshot: ClusterSnapshot
    request: ServeRequest
    start: StartPlan
    plan: ServePlan | None
    fetch_seconds: float


class PendingGroup(Protocol):
    """A start of several replicas in progress."""

    def finish(self, session: Session) -> tuple[int, list[str]]:
        """Do what is left, and return what `start_server` returns."""


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
        api = narrow_inventory(inventory, self.nodes).head.name
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
        sizes, serve = (self.tp, self.pp, self.dp), inventory.serve
        if sizes == (None, None, None):  # sizes from two sources must not mix
            sizes = (serve.tp, serve.pp, serve.dp)
        tp, pp, dp = sizes
        pcp = vllm.prefill_context_parallel(self.args)
        chosen = placement.choose_placement(
            narrowed,
            tp,
            pp,
            config,
            dp=dp,
            pcp=pcp,
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

    def plan_start(
        self, inventory: Inventory, snapshot: ClusterSnapshot
    ) -> tuple[ServeRequest, StartPlan]:
        """Place the model and plan its start. Raises RequestError and PlacementError."""
        from launcher.serving import network_gate

        request = self.build_request(inventory, snapshot.config)
        stages: tuple[Stage, ...] = ()
        notes: tuple[str, ...] = ()
        if not self.skip_network_check:
            stages, notes = network_gate.plan_network_check(
                inventory, snapshot, request, pair_timeout=self.pair_timeout
            )
        start = plan_serve(
            snapshot,
            request,
            requested_at=time.time(),
            policy=self.policy,
            check_stages=stages,
            notes=(*self.notes, *notes),
            replace_other=self.replace_other,
            require_unsupervised=self.unsupervised,
            check_flags=self.check_flags,
        )
        return request, start


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


def start_server(call: CommandContext, session: Session, spec: StartSpec) -> tuple[int, list[str]]:
    """Check the network, start the server and wait for its first answer; print the script instead
    for a dry run.

    Returns the exit code and the rows to print after the progress display has closed. Raises
    VlaunchError.
    """
    # The lock is released before the wait: a model may load for long.
    with call.locked(session) as locked:
        pending = begin_start(call, locked, spec)
    return finish_start(session, spec, pending)


def begin_start(
    call: CommandContext, session: Session, spec: StartSpec
) -> PendingStart | PendingGroup | None:
    """Update the node programs, copy the model if required, and start the server or its replicas,
    in a session that holds the cluster's lock; print the script instead for a dry run.
    """
    from launcher.app import servers
    from launcher.front.update import follow_servers
    from launcher.serving import serve_forecast
    from launcher.serving.replicas import list_members

    inventory, dry_run = session.inventory, call.dry_run
    session.hooks.run_pre(session.printer, **spec.hook_variables(inventory))
    snapshot, files = servers.update_and_query(
        session, verb="serve", dry_run=dry_run, model=spec.model, planning=True
    )
    if not dry_run:
        servers.require_servers(session, snapshot)
    if spec.replicas or (not spec.partial and len(list_members(snapshot, spec.name)) > 1):
        from launcher.serving.start_replicas import begin_replicas

        return begin_replicas(call, session, spec, snapshot, files)
    spec, snapshot, fetched = _fetch_model(session, spec, snapshot, dry_run=dry_run)
    if spec.planned:
        spec = serve_forecast.apply_planned_layout(spec, snapshot)
    request, start = spec.plan_start(inventory, snapshot)
    plan = serve_forecast.plan_memory(snapshot, request)
    if plan is not None and not start.attached:
        serve_forecast.report_plan(session, plan, fixed=spec.has_fixed_layout(inventory))
    if dry_run:
        call.print_script([files, start.plan])
        return None
    announce(session, request, start, skipped=spec.skip_network_check)
    session.apply(start.plan)
    follow_servers(session, verb="serve")
    return PendingStart(snapshot, request, start, plan, fetched)


def finish_start(
    session: Session, spec: StartSpec, pending: PendingStart | PendingGroup | None
) -> tuple[int, list[str]]:
    """Wait for the server's first answer; return what `start_server` returns."""
    if pending is None:
        return 0, []
    code, rows = (
        _wait_for_answer(session, pending, spec)
        if isinstance(pending, PendingStart)
        else pending.finish(session)
    )
    if code == 0 and not spec.no_wait and not spec.partial:
        session.hooks.run_post(session.printer, **spec.hook_variables(session.inventory))
    return code, rows


def _fetch_model(
    session: Session, spec: StartSpec, snapshot: ClusterSnapshot, *, dry_run: bool
) -> tuple[StartSpec, ClusterSnapshot, float]:
    """Copy a server's model to its nodes if required, and query them again; a dry run only notes
    it. Also returns the seconds spent. Raises the errors of `ensure_model`.
    """
    from launcher.app import servers

    inventory = session.inventory
    # A running server has its model.
    running = [server.name for server in snapshot.servers_state.running]
    is_running = spec.name in running and not spec.replace_other
    if is_running or not (spec.fetch or inventory.models.spread == "auto"):
        return spec, snapshot, 0.0
    nodes: Sequence[Node] = inventory.nodes
    if spec.backend == "mp":
        nodes = (
            narrow_inventory(inventory, spec.nodes).nodes
            if spec.planned
            else spec.build_request(inventory, snapshot.config).rank_nodes(inventory)
        )
    if dry_run:
        notes = (*spec.notes, *model_fetch.dry_run_notes(snapshot, spec.model, nodes))
        return replace(spec, notes=notes), snapshot, 0.0
    plan = partial(_early_plan, inventory, spec, snapshot)
    seconds = model_fetch.ensure_model(session, snapshot, spec.model, nodes, plan)
    if seconds:
        snapshot = servers.query_cluster(session, model=spec.model, planning=True)
    return spec, snapshot, seconds


def _early_plan(inventory: Inventory, spec: StartSpec, snapshot: ClusterSnapshot) -> Plan:
    """Return the plan of a server before its model is stored. If the planner is to choose the
    layout of a model that no node has yet, the server needs at least a GPU and a port. Raises
    RequestError.
    """
    from launcher.serving import serve_forecast

    if spec.planned and (snapshot.config is None or not snapshot.weight_bytes):
        spec = replace(spec, planned=False, tp=1, pp=1, dp=1)
    elif spec.planned:
        spec = serve_forecast.apply_planned_layout(spec, snapshot)
    return spec.plan_start(inventory, snapshot)[1].plan


def announce(session: Session, request: ServeRequest, start: StartPlan, *, skipped: bool) -> None:
    """Show the notes and warnings on a start."""
    if start.attached:
        text = f"already running as server `{start.spec.name}`; watching it"
        for note in (text, *start.plan.notes):
            session.note("serve", note, state="unchanged")
        return
    for note in start.plan.notes:
        session.note("placement", note)
    if skipped and request.placement.networked:
        text = (
            "NETWORK CHECK SKIPPED: traffic between the nodes may use slow TCP, or hang"
            " (`vlaunch check-nccl`)"
        )
        session.warn("network", text)
    local = bool(request.host) and ipaddress.ip_address(request.host).is_loopback
    if "VLLM_API_KEY" not in session.inventory.secrets and not local:
        text = (
            f"the API on port {request.port} needs no key; set VLLM_API_KEY under"
            " `secrets:` to require one"
        )
        session.warn("serve", text)


def _wait_for_answer(
    session: Session, pending: PendingStart, spec: StartSpec
) -> tuple[int, list[str]]:
    """Return the exit code and the rows to print after the progress display has closed."""
    from launcher.serving import network_gate, serve_forecast

    snapshot, request, start, plan, fetch_seconds = pending
    name = start.spec.name
    if spec.no_wait:
        hint = "" if start.attached else "; watch it with the same command without --no-wait"
        verb = "is running" if start.attached else "is starting"
        text = f"server `{name}` {verb}; see `vlaunch status`{hint}"
        urls = list(endpoints.client_urls(session.inventory, start.spec))
        _report(session, spec, text, data={"endpoint": urls[0], "endpoints": urls})
        return 0, urls
    of_server = f" of {spec.label}" if spec.partial else ""
    session.begin("serve", f"Wait for the first answer{of_server}")
    try:
        served = session.show(
            watch_start(
                snapshot.site,
                start.spec,
                session.transport,
                timeout=spec.policy.start_timeout,
                attached=start.attached,
            )
        )
    except KeyboardInterrupt:
        text = (
            f"stopped watching; server `{name}` keeps running. Watch it again with the same"
            f" command, or stop it: `vlaunch stop {name}`"
        )
        session.warn("serve", text)
        return 130, []
    network = network_gate.confirm_transport(
        session, snapshot, request, start, allow=spec.skip_network_check
    )
    model, task, curl_line = served.first.model, task_named(served.first.task), ""
    if task is not None and not task.generates:
        line = endpoints.client_curl_line(session.inventory, start.spec, task, model)
        curl_line = f"`{line}`"
    next_step = "try it with the line below" if curl_line else "try it with `vlaunch chat`"
    url, *other_urls = served.endpoints
    others = f" and {len(other_urls)} more" if other_urls else ""
    text = f"{model} is ready at {url}{others}; {next_step}"
    data = {**summary_json(served), "network": network, **serve_forecast.plan_json(plan)}
    if fetch_seconds:
        data["fetch_seconds"] = round(fetch_seconds, 1)
    _report(session, spec, text, seconds=served.seconds + fetch_seconds, data=data)
    return 0, _summary_rows(served, network, curl_line, plan, fetch_seconds)


def _report(
    session: Session, spec: StartSpec, text: str, *, data: Mapping[str, Any], seconds: float = 0.0
) -> None:
    """Report the result of a start, which is the command's unless there are others."""
    if spec.partial:
        session.note("serve", f"{spec.label}: {text}", state="ok", data=data)
    else:
        session.done(text, stage="serve", seconds=seconds, data=data)


def _summary_rows(
    served: ReadyServer, network: str, curl_line: str, plan: ServePlan | None, fetch_seconds: float
) -> list[str]:
    from launcher.serving.serve_forecast import compare_tokens, describe_extra_node

    first = served.first
    ranks = "; ".join(f"{node}: {', '.join(names)}" for node, names in served.ranks.items())
    replies = [f"DP{number} in {seconds:.1f}s" for number, seconds in enumerate(first.replicas)]
    tokens, concurrency = served.capacity.tokens, served.capacity.concurrency
    cache_text = "unknown" if tokens is None else f"{tokens:,} tokens"
    fetch = f" {fetch_seconds:.1f}s to copy the model to its nodes,"
    rows = {
        "model": first.model,
        "placement": ranks or "unknown",
        "replicas": replies and f"all {len(replies)} answered: {', '.join(replies)}",
        "network": network,
        "KV cache": cache_text
        + compare_tokens(plan, tokens)
        + (
            f", {format_count(concurrency, 'request')} of full length at once"
            if concurrency
            else ""
        ),
        "another node": describe_extra_node(plan, tokens),
        **({"answer": first.came} if curl_line else {"fingerprint": first.fingerprint or "none"}),
        "ready after": f"{served.seconds + fetch_seconds:.1f}s, of which"
        f"{fetch if fetch_seconds else ''} {first.seconds:.1f}s until the first answer",
        "try it": curl_line,
    }
    lines = [*(("endpoint", url) for url in served.endpoints), *rows.items()]
    return [f"{label:<12} {untrusted.sanitize(value)}" for label, value in lines if value]
