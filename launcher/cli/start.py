"""From a server that is asked for to one that has answered: what `serve` and `rollback` share."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher import placement
from launcher.cli.command import Call
from launcher.cli.session import Session
from launcher.errors import RequestError
from launcher.model import Backend, Inventory
from launcher.payload.agent.desired import Policy
from launcher.payload.agent.task import named
from launcher.placement import narrow
from launcher.tools import curl, untrusted, vllm

if TYPE_CHECKING:
    from launcher.cli.serve_plan import ServePlan
    from launcher.plan.request import Request
    from launcher.plan.serve import Start
    from launcher.plan.shape import Plan
    from launcher.state.snapshot import ClusterSnapshot
    from launcher.watch import Served

    # ... and the seconds in which the model was brought to the nodes
    Begun = tuple[ClusterSnapshot, Request, Start, float]

F = TypeVar("F", bound=Callable[..., Any])


def flags(function: F) -> F:
    """Add the flags of every command that starts a server."""
    for option in (
        click.option("--no-wait", is_flag=True, help="Start it and return at once."),
        click.option(
            "--timeout",
            type=float,
            help=(
                "Seconds to wait for the first answer (default: `serve: {timeout: …}` of the"
                " inventory, else 1800)."
            ),
        ),
        click.option(
            "--skip-network-check", is_flag=True, help="Start on a network that nobody has proven."
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, put together with the inventory. `policy` is how the server is to be
    kept.
    """

    name: str
    model: str
    tp: int | None
    pp: int | None
    dp: int | None
    backend: Backend
    host: str
    port: int
    args: tuple[str, ...]
    replace_other: bool
    policy: Policy
    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    skip_network_check: bool = False
    pair_timeout: float = 20.0
    fetch: bool = False
    no_wait: bool = False
    unsupervised: bool = False  # because of a flag, not of the inventory
    planned: bool = False  # the plan chooses the split
    env: Mapping[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()  # notes on the recipe or the pasted command

    def about(self, inventory: Inventory) -> dict[str, str]:
        """Return what hooks are told of the server."""
        from launcher.state.endpoints import url

        api = narrow(inventory, self.nodes).head.name
        return {"model": self.model, "endpoint": url(inventory, self.host, self.port, api)}

    def request(self, inventory: Inventory, config: Mapping[str, Any] | None) -> Request:
        """Place the model, whose `config.json` may not be known; raises RequestError and
        PlacementError.
        """
        from launcher.plan import balancing
        from launcher.plan.request import Request

        self._refuse(inventory)
        here = placement.narrow(inventory, self.nodes, self.gpus)

        # Half of a split from the command line and half from the inventory would be nobody's wish.
        flags, defaults = (self.tp, self.pp, self.dp), inventory.serve
        tp, pp, dp = (
            flags
            if any(each is not None for each in flags)
            else (defaults.tp, defaults.pp, defaults.dp)
        )
        request = Request(
            name=self.name,
            model=self.model,
            placement=placement.choose(
                here,
                tp,
                pp,
                config,
                dp=dp,
                pcp=vllm.prefill_context_parallel(self.args),
                backend=self.backend,
            ),
            backend=self.backend,
            host=self.host,
            port=self.port,
            args=self.args,
            nodes=self.nodes,
            gpus=self.gpus,
            env=self.env,
        )
        balancing.refuse(request, here)
        return request

    def fixed(self, inventory: Inventory) -> bool:
        """Tell whether somebody has named the split, here or in the inventory."""
        given, defaults = (self.tp, self.pp, self.dp), inventory.serve
        return any(each is not None for each in (*given, defaults.tp, defaults.pp)) or (
            defaults.dp > 1
        )

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
        if flag := self._confining(inventory):
            hint = "place them yourself with `--backend mp`"
            if flag == "--gpus":
                hint += "\nfewer GPUs in all, wherever they are: `--tp` and `--pp`"
            raise RequestError(
                f"Ray places ranks wherever GPUs are free, so that {flag} cannot be kept to",
                hint=hint,
            )

    def _confining(self, inventory: Inventory) -> str:
        """Return the flag that leaves out nodes, or GPUs of several nodes; empty when none does."""
        if set(self.nodes) not in (set(), {node.name for node in inventory.nodes}):
            return "--nodes"
        if self.gpus is None or len(inventory.nodes) == 1:
            return ""
        return "--gpus" if any(self.gpus < node.gpus for node in inventory.nodes) else ""

    def plan(self, inventory: Inventory, seen: ClusterSnapshot) -> tuple[Request, Start]:
        """Place the model and plan its start; raises RequestError and PlacementError."""
        from launcher.cli import network_gate
        from launcher.plan.serve import plan_serve

        request = self.request(inventory, seen.config)
        prove, known = (
            ((), ())
            if self.skip_network_check
            else network_gate.prove(inventory, seen, request, pair_timeout=self.pair_timeout)
        )
        start = plan_serve(
            seen,
            request,
            asked=time.time(),
            policy=self.policy,
            prove=prove,
            replace_other=self.replace_other,
            insist=self.unsupervised,
        )
        return request, network_gate.noted(start, (*self.told, *known))


def policy(inventory: Inventory, timeout: float, *, supervise: bool = True) -> Policy:
    """Return how the inventory wants servers kept; a start may take `timeout` seconds.

    Unsupervised ones never start again.
    """
    asked = inventory.serve
    restarts = asked.restarts if supervise and asked.supervise else 0
    return Policy(canary=asked.canary, stuck=asked.stuck, restarts=restarts, start_timeout=timeout)


def start(call: Call, session: Session, asked: Asked) -> tuple[int, list[str]]:
    """Prove the network, start the server and wait until it has answered; print the script instead
    for a dry run.

    Returns the exit code, and what to print when the display of progress has been put away. Raises
    VlaunchError.
    """
    # Held until the server is asked for: others may work on the cluster while a model loads.
    with call.locked(session) as ours:
        begun = begin(call, ours, asked)
    return finish(session, asked, begun)


def begin(call: Call, session: Session, asked: Asked) -> Begun | None:
    """Start the server, in a session that holds the cluster's lock; print the script instead for a
    dry run.
    """
    session.hooks.pre(session.to, **asked.about(session.inventory))
    first, begun = _prepare(session, asked, dry_run=call.dry_run)
    _, request, start, _ = begun
    if call.dry_run:
        call.print_script([*first, start.plan])
        return None
    _apply(session, request, start, skipped=asked.skip_network_check)
    return begun


def finish(session: Session, asked: Asked, begun: Begun | None) -> tuple[int, list[str]]:
    """Wait until the server has answered; returns what `start` does."""
    if begun is None:
        return 0, []
    code, rows = _wait(session, begun, asked)
    if code == 0 and not asked.no_wait:
        session.hooks.post(session.to, **asked.about(session.inventory))
    return code, rows


def _prepare(session: Session, asked: Asked, *, dry_run: bool) -> tuple[list[Plan], Begun]:
    """Look, bring the model where that is wished, and plan. The helper files, which are asked, are
    brought up to date before.
    """
    from launcher.cli import model_fetch, serve_plan, server

    inventory = session.inventory
    seen, first = server.look_updated(
        session, verb="serve", dry_run=dry_run, model=asked.model, planning=True
    )
    if not dry_run:
        server.require_servers(session, seen)
    asked, seen, fetched = model_fetch.for_server(session, asked, seen, dry_run=dry_run)
    if asked.planned:
        asked = serve_plan.settled(asked, seen)
    request, start = asked.plan(inventory, seen)
    plan = None if start.attached else serve_plan.plan_of(seen, request)
    if plan is not None:
        serve_plan.tell(session, plan, fixed=asked.fixed(inventory))
    return [first], (seen, request, start, fetched)


def _apply(session: Session, request: Request, start: Start, *, skipped: bool) -> None:

    if start.attached:
        for text in (
            f"this server runs already as `{start.desired.name}`; watching it",
            *start.plan.notes,
        ):
            session.note("serve", text, state="unchanged")
        return
    for note in start.plan.notes:
        session.note("placement", note)
    if skipped and request.placement.networked:
        text = (
            "THE NETWORK BETWEEN THE NODES IS NOT PROVEN, as asked: it may be slow TCP, or hang"
            " (`vlaunch check-nccl`)"
        )
        session.warn("network", text)
    if (
        "VLLM_API_KEY" not in session.inventory.secrets
        and not ipaddress.ip_address(request.host).is_loopback
    ):
        text = (
            f"whoever can reach port {request.port} may use the model: give VLLM_API_KEY under"
            " `secrets:` to ask for a key"
        )
        session.warn("serve", text)
    session.apply(start.plan)


def _wait(session: Session, begun: Begun, asked: Asked) -> tuple[int, list[str]]:
    """Return the exit code, and what to print when the display of progress has been put away."""
    from launcher.cli import network_gate, serve_plan
    from launcher.state import endpoints
    from launcher.state.servers import Server
    from launcher.watch import summary, watch

    seen, request, start, fetched = begun
    server = Server(name=start.desired.name, desired=start.desired)
    if asked.no_wait:
        again = "" if start.attached else ", and watch it with the same command without --no-wait"
        text = (
            f"{server.what} {'runs' if start.attached else 'starts'}; see `vlaunch status`{again}"
        )
        urls = [each.url for each in endpoints.of(session.inventory, start.desired)]
        session.done(text, stage="serve", data={"endpoint": urls[0], "endpoints": urls})
        return 0, urls
    session.begin("serve", "Wait for the first answer")
    try:
        served = session.show(
            watch(
                seen.site,
                start.desired,
                session.transport,
                timeout=asked.policy.start_timeout,
                attached=start.attached,
            )
        )
    except KeyboardInterrupt:
        end = f"`vlaunch stop {server.name}`"
        text = (
            f"stopped watching; {server.what} goes on. Watch it again with the same command, or"
            f" end it with {end}"
        )
        session.warn("serve", text)
        return 130, []
    network = network_gate.confirm(session, seen, request, start, allow=asked.skip_network_check)
    task, ask = named(served.task), ""
    if task is not None and not task.generates:
        keyed = "VLLM_API_KEY" in session.inventory.secrets
        ask = f"`{curl.line(served.endpoints[0], task, served.model, key=keyed)}`"
    talk = "ask it with the line below" if ask else "talk to it with `vlaunch chat`"
    first, *more = served.endpoints
    also = f" and {len(more)} more" if more else ""
    text = f"{served.model} answers at {first}{also}; {talk}"
    plan = serve_plan.plan_of(seen, request)
    data = {**summary(served), "network": network, **serve_plan.as_json(plan)}
    if fetched:
        data["fetch_seconds"] = round(fetched, 1)
    session.done(text, stage="serve", seconds=served.seconds + fetched, data=data)
    return 0, _rows(served, network, ask, plan, fetched)


def _rows(
    served: Served, network: str, ask: str, plan: ServePlan | None, fetched: float
) -> list[str]:
    from launcher.cli.serve_plan import compared, more_by_a_node

    ranks = "; ".join(f"{node}: {', '.join(names)}" for node, names in served.ranks.items())
    answered = ", ".join(
        f"DP{number} in {seconds:.1f}s" for number, seconds in enumerate(served.replicas)
    )
    tokens, times = served.capacity.tokens, served.capacity.concurrency
    holds = "not known" if tokens is None else f"{tokens:,} tokens"
    holds += compared(plan, tokens)
    more = more_by_a_node(plan, tokens)
    rows = {
        "model": served.model,
        "placement": ranks or "not known",
        **(
            {"replicas": f"all {len(served.replicas)} have answered: {answered}"}
            if answered
            else {}
        ),
        **({"network": network} if network else {}),
        "KV cache": holds + (f", {times:g} requests of full length at once" if times else ""),
        **({"another node": more} if more else {}),
        **({"answer": served.came} if ask else {"fingerprint": served.fingerprint or "none given"}),
        "ready after": (
            f"{served.seconds + fetched:.1f}s, of which"
            + (f" {fetched:.1f}s for bringing the model to its nodes, and" if fetched else "")
            + f" {served.answer_seconds:.1f}s for the first answer"
        ),
        **({"ask it": ask} if ask else {}),
    }
    lines = [*(("endpoint", each) for each in served.endpoints), *rows.items()]
    return [f"{label:<12} {untrusted.plain(value)}" for label, value in lines]
