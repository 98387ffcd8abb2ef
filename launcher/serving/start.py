"""Start a server and wait for its first answer, for `serve` and `rollback`."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from launcher.agent.desired import Policy
from launcher.agent.task import named
from launcher.app import options
from launcher.app.command import Call
from launcher.app.session import Session
from launcher.core import untrusted
from launcher.core.domain import Inventory, Node, ServeDefaults, ServerSpec
from launcher.core.errors import RequestError
from launcher.core.plan import Plan
from launcher.distribute import model_fetch
from launcher.serving import balancing, endpoints
from launcher.serving.endpoints import url
from launcher.serving.serve_plan import Start, plan_serve
from launcher.serving.serve_request import Request
from launcher.serving.watch import Served, summary, watch
from launcher.tools import placement, vllm
from launcher.tools.placement import narrow
from launcher.tools.snapshot import ClusterSnapshot

if TYPE_CHECKING:
    from launcher.serving.serve_forecast import ServePlan

F = TypeVar("F", bound=Callable[..., Any])


def flags(function: F) -> F:
    """Add the flags of every command that starts a server."""
    for option in (
        click.option("--no-wait", is_flag=True, help="Start it and return at once."),
        options.key(ServeDefaults, "timeout", default="the inventory's"),
        click.option(
            "--skip-network-check", is_flag=True, help="Start on a network that nobody has proven."
        ),
    ):
        function = option(function)
    return function


class Begun(NamedTuple):
    """A start that is under way; `fetched` is the seconds for which its model was copied."""

    snapshot: ClusterSnapshot
    request: Request
    start: Start
    plan: ServePlan | None
    fetched: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec(ServerSpec):
    """A server's spec, its supervision, and the options of one start."""

    policy: Policy
    replace_other: bool = False
    skip_network_check: bool = False
    pair_timeout: float = 20.0
    fetch: bool = False
    no_wait: bool = False
    unsupervised: bool = False  # because of a flag, not of the inventory
    planned: bool = False  # the plan chooses the split
    notes: tuple[str, ...] = ()  # on the recipe or the pasted command

    def about(self, inventory: Inventory) -> dict[str, str]:
        """Return what hooks are told of the server."""
        api = narrow(inventory, self.nodes).head.name
        return {"model": self.model, "endpoint": url(inventory, self.host, self.port, api)}

    def request(self, inventory: Inventory, config: Mapping[str, Any] | None) -> Request:
        """Place the model, whose `config.json` may not be known; raises RequestError and
        PlacementError.
        """
        self._refuse(inventory)
        here = placement.narrow(inventory, self.nodes, self.gpus)
        sizes, serve = (self.tp, self.pp, self.dp), inventory.serve
        if sizes == (None, None, None):  # half of a split from each source would be nobody's choice
            sizes = (serve.tp, serve.pp, serve.dp)
        tp, pp, dp = sizes
        pcp = vllm.prefill_context_parallel(self.args)
        split = placement.choose(here, tp, pp, config, dp=dp, pcp=pcp, backend=self.backend)
        request = Request(**self.spec_fields(), placement=split)
        balancing.refuse(request, here)
        return request

    def fixed(self, inventory: Inventory) -> bool:
        """True when the command line or the inventory names a split."""
        serve = inventory.serve
        sizes = (self.tp, self.pp, self.dp, serve.tp, serve.pp)
        return serve.dp > 1 or any(size is not None for size in sizes)

    def _refuse(self, inventory: Inventory) -> None:
        """Raise RequestError for what Ray cannot do: to be where there is none, and to keep to
        places.
        """
        if self.backend != "ray":
            return
        if inventory.ray.off:
            raise RequestError(
                "the cluster has no Ray (`ray: none` in the inventory)",
                hint="use `--backend mp`, or give `ray:` a version there and run `vlaunch up`",
            )
        nodes, hint = inventory.nodes, "place them yourself with `--backend mp`"
        if set(self.nodes) not in (set(), {node.name for node in nodes}):
            flag = "--nodes"
        elif self.gpus and len(nodes) > 1 and any(self.gpus < node.gpus for node in nodes):
            flag = "--gpus"
            hint += "\nfewer GPUs in all, wherever they are: `--tp` and `--pp`"
        else:
            return
        raise RequestError(
            f"Ray places ranks wherever GPUs are free, so that {flag} cannot be kept to", hint=hint
        )

    def plan(self, inventory: Inventory, snapshot: ClusterSnapshot) -> tuple[Request, Start]:
        """Place the model and plan its start; raises RequestError and PlacementError."""
        from launcher.serving import network_gate

        request = self.request(inventory, snapshot.config)
        prove, known = (
            ((), ())
            if self.skip_network_check
            else network_gate.prove(inventory, snapshot, request, pair_timeout=self.pair_timeout)
        )
        start = plan_serve(
            snapshot,
            request,
            asked=time.time(),
            policy=self.policy,
            prove=prove,
            notes=(*self.notes, *known),
            replace_other=self.replace_other,
            insist=self.unsupervised,
        )
        return request, start


def policy(inventory: Inventory, timeout: float | None, *, supervise: bool = True) -> Policy:
    """Return the supervision of a server, which without it never starts again; `timeout` is the
    seconds that a start may take (None: as the inventory says).
    """
    serve = inventory.serve
    restarts = serve.restarts if supervise and serve.supervise else 0
    limit = serve.timeout if timeout is None else timeout
    return Policy(canary=serve.canary, stuck=serve.stuck, restarts=restarts, start_timeout=limit)


def start(call: Call, session: Session, spec: StartSpec) -> tuple[int, list[str]]:
    """Prove the network, start the server and wait until it has answered; print the script instead
    for a dry run.

    Returns the exit code, and what to print when the display of progress has been put away. Raises
    VlaunchError.
    """
    # Released before the wait: others may work on the cluster while a model loads.
    with call.locked(session) as ours:
        begun = begin(call, ours, spec)
    return finish(session, spec, begun)


def begin(call: Call, session: Session, spec: StartSpec) -> Begun | None:
    """Update the node programs, which are queried, copy the model if required, and start the
    server, in a session that holds the cluster's lock; print the script instead for a dry run.
    """
    from launcher.app import servers
    from launcher.serving import serve_forecast

    inventory, dry_run = session.inventory, call.dry_run
    session.hooks.pre(session.to, **spec.about(inventory))
    snapshot, files = servers.look_updated(
        session, verb="serve", dry_run=dry_run, model=spec.model, planning=True
    )
    if not dry_run:
        servers.require_servers(session, snapshot)
    spec, snapshot, fetched = _fetch(session, spec, snapshot, dry_run=dry_run)
    if spec.planned:
        spec = serve_forecast.settled(spec, snapshot)
    request, start = spec.plan(inventory, snapshot)
    plan = serve_forecast.plan_of(snapshot, request)
    if plan is not None and not start.attached:
        serve_forecast.tell(session, plan, fixed=spec.fixed(inventory))
    if dry_run:
        call.print_script([files, start.plan])
        return None
    _apply(session, request, start, skipped=spec.skip_network_check)
    return Begun(snapshot, request, start, plan, fetched)


def finish(session: Session, spec: StartSpec, begun: Begun | None) -> tuple[int, list[str]]:
    """Wait until the server has answered; returns what `start` does."""
    if begun is None:
        return 0, []
    code, rows = _wait(session, begun, spec)
    if code == 0 and not spec.no_wait:
        session.hooks.post(session.to, **spec.about(session.inventory))
    return code, rows


def _fetch(
    session: Session, spec: StartSpec, snapshot: ClusterSnapshot, *, dry_run: bool
) -> tuple[StartSpec, ClusterSnapshot, float]:
    """Bring a server's model to its nodes where it is asked for, and look again; a dry run only
    notes it. Also returns the seconds that it took; raises what `ensure_model` does.
    """
    from launcher.app import servers

    inventory = session.inventory
    # One that runs has its model, and is watched, refused or, with --replace, made room for.
    running = [known.name for known in snapshot.kept.running]
    runs = spec.name in running and not spec.replace_other
    if runs or not (spec.fetch or inventory.models.spread == "auto"):
        return spec, snapshot, 0.0
    nodes: Sequence[Node] = inventory.nodes
    if spec.backend == "mp":
        nodes = (
            narrow(inventory, spec.nodes).nodes
            if spec.planned
            else spec.request(inventory, snapshot.config).nodes_with_ranks(inventory)
        )
    if dry_run:
        notes = (*spec.notes, *model_fetch.notes(snapshot, spec.model, nodes))
        return replace(spec, notes=notes), snapshot, 0.0
    plan = partial(_early_plan, inventory, spec, snapshot)
    seconds = model_fetch.ensure_model(session, snapshot, spec.model, nodes, plan)
    if seconds:
        snapshot = servers.look(session, model=spec.model, planning=True)
    return spec, snapshot, seconds


def _early_plan(inventory: Inventory, spec: StartSpec, snapshot: ClusterSnapshot) -> Plan:
    """Return the plan of a server before its model is there. Where the planner is to choose the
    split of a model that no node has yet, a server takes at least a GPU and a port. Raises
    RequestError.
    """
    from launcher.serving import serve_forecast

    if spec.planned and (snapshot.config is None or not snapshot.weight_bytes):
        spec = replace(spec, planned=False, tp=1, pp=1, dp=1)
    elif spec.planned:
        spec = serve_forecast.settled(spec, snapshot)
    return spec.plan(inventory, snapshot)[1].plan


def _apply(session: Session, request: Request, start: Start, *, skipped: bool) -> None:
    """Report the notes and warnings of a start, and run its plan."""
    if start.attached:
        text = f"this server runs already as `{start.desired.name}`; watching it"
        for note in (text, *start.plan.notes):
            session.note("serve", note, state="unchanged")
        return
    for note in start.plan.notes:
        session.note("placement", note)
    if skipped and request.placement.networked:
        text = (
            "THE NETWORK BETWEEN THE NODES IS NOT PROVEN, as asked: it may be slow TCP, or hang"
            " (`vlaunch check-nccl`)"
        )
        session.warn("network", text)
    local = ipaddress.ip_address(request.host).is_loopback
    if "VLLM_API_KEY" not in session.inventory.secrets and not local:
        text = (
            f"whoever can reach port {request.port} may use the model: give VLLM_API_KEY under"
            " `secrets:` to ask for a key"
        )
        session.warn("serve", text)
    session.apply(start.plan)


def _wait(session: Session, begun: Begun, spec: StartSpec) -> tuple[int, list[str]]:
    """Return the exit code, and what to print when the display of progress has been put away."""
    from launcher.serving import network_gate, serve_forecast

    snapshot, request, start, plan, fetched = begun
    name = start.desired.name
    if spec.no_wait:
        again = "" if start.attached else ", and watch it with the same command without --no-wait"
        verb = "runs" if start.attached else "starts"
        text = f"server `{name}` {verb}; see `vlaunch status`{again}"
        urls = [endpoint.url for endpoint in endpoints.of(session.inventory, start.desired)]
        session.done(text, stage="serve", data={"endpoint": urls[0], "endpoints": urls})
        return 0, urls
    session.begin("serve", "Wait for the first answer")
    try:
        served = session.show(
            watch(
                snapshot.site,
                start.desired,
                session.transport,
                timeout=spec.policy.start_timeout,
                attached=start.attached,
            )
        )
    except KeyboardInterrupt:
        text = (
            f"stopped watching; server `{name}` goes on. Watch it again with the same command, or"
            f" end it with `vlaunch stop {name}`"
        )
        session.warn("serve", text)
        return 130, []
    network = network_gate.confirm(session, snapshot, request, start, allow=spec.skip_network_check)
    model, task, ask = served.first.model, named(served.first.task), ""
    if task is not None and not task.generates:
        keyed = "VLLM_API_KEY" in session.inventory.secrets
        ask = f"`{endpoints.curl_line(served.endpoints[0], task, model, key=keyed)}`"
    talk = "ask it with the line below" if ask else "talk to it with `vlaunch chat`"
    url, *more = served.endpoints
    also = f" and {len(more)} more" if more else ""
    text = f"{model} answers at {url}{also}; {talk}"
    data = {**summary(served), "network": network, **serve_forecast.as_json(plan)}
    if fetched:
        data["fetch_seconds"] = round(fetched, 1)
    session.done(text, stage="serve", seconds=served.seconds + fetched, data=data)
    return 0, _rows(served, network, ask, plan, fetched)


def _rows(
    served: Served, network: str, ask: str, plan: ServePlan | None, fetched: float
) -> list[str]:
    from launcher.serving.serve_forecast import compared, more_by_a_node

    first = served.first
    ranks = "; ".join(f"{node}: {', '.join(names)}" for node, names in served.ranks.items())
    replies = [f"DP{number} in {seconds:.1f}s" for number, seconds in enumerate(first.replicas)]
    tokens, times = served.capacity.tokens, served.capacity.concurrency
    holds = "not known" if tokens is None else f"{tokens:,} tokens"
    copied = f" {fetched:.1f}s for bringing the model to its nodes, and" if fetched else ""
    rows = {
        "model": first.model,
        "placement": ranks or "not known",
        "replicas": replies and f"all {len(replies)} have answered: {', '.join(replies)}",
        "network": network,
        "KV cache": holds
        + compared(plan, tokens)
        + (f", {times:g} requests of full length at once" if times else ""),
        "another node": more_by_a_node(plan, tokens),
        **({"answer": first.came} if ask else {"fingerprint": first.fingerprint or "none given"}),
        "ready after": f"{served.seconds + fetched:.1f}s, of which{copied}"
        f" {first.seconds:.1f}s for the first answer",
        "ask it": ask,
    }
    lines = [*(("endpoint", url) for url in served.endpoints), *rows.items()]
    return [f"{label:<12} {untrusted.plain(value)}" for label, value in lines if value]
