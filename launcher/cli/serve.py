"""`vlaunch serve`: start the server, and wait until it has answered."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.cli.session import Session
    from launcher.model import Backend, Inventory
    from launcher.plan.serve import Request, Seen, Start
    from launcher.plan.shape import Plan
    from launcher.plan.watched import Watched
    from launcher.watch import Served


class _Command(click.Command):
    """Says where vLLM's own options belong when one stands among ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()}\nvLLM's own options go after `--`", ctx) from None


@click.command(cls=_Command)
@options.reaching
@options.as_json
@click.option("--model", metavar="MODEL", help="Name on Hugging Face, or a path that every node has.")
@click.option("--tp", type=click.IntRange(1), help="Tensor parallel size (default: GPUs per node).")
@click.option("--pp", type=click.IntRange(1), help="Pipeline parallel size (default: nodes).")
@click.option("--data-parallel-size", "--dp", "dp", type=click.IntRange(1), help="Replicas behind one endpoint (default: 1).")
@click.option("--backend", type=click.Choice(["ray", "mp"]), help="Ray (default), or vLLM's own multi-node mode.")
@click.option("--port", type=click.IntRange(1, 65535), help="The API's port (default: the inventory's).")
@click.option("--bind", metavar="IP", help="The API's address on the head (default: the inventory's).")
@click.option("--skip-network-check", is_flag=True, help="Start on a network that nobody has proven.")
@click.option("--replace", "replace_other", is_flag=True, help="Stop another server that runs, and take its place.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds to wait for the first answer.")
@click.option("--no-wait", is_flag=True, help="Start it and return at once.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be sent; change nothing.")
@click.option("--offline", is_flag=True, help="With --dry-run: touch no node, and assume that nothing is there yet.")
@click.argument("args", metavar="[-- VLLM ARGS]", nargs=-1, type=click.UNPROCESSED)
def serve(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    model: str | None,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    backend: Backend | None,
    port: int | None,
    bind: str | None,
    skip_network_check: bool,
    replace_other: bool,
    timeout: float,
    no_wait: bool,
    dry_run: bool,
    offline: bool,
    args: tuple[str, ...],
) -> int:
    """Prove the network, start the server, wait for a completion, and print where it is and how much it holds.

    Everything after `--` goes to `vllm serve`. Ctrl-C stops the watching, never the server; the same command watches it again.
    """
    from launcher.cli import session
    from launcher.errors import RequestError
    from launcher.plan.script import script
    from launcher.plan.serve import Seen
    from launcher.ui.progress import printer

    if offline and not dry_run:
        raise click.UsageError("--offline goes with --dry-run: no server starts without its nodes")
    if args and not args[0].startswith("-"):
        raise click.UsageError(f"`{args[0]}` is no argument of `vllm serve`; the inventory is named with -i")
    wanted = session.read(None, inventory)
    name = model or wanted.serve.model
    if name is None:
        raise RequestError("no model is named", hint="add `--model MODEL`, or `serve: {model: …}` in the inventory")
    asked = _Asked(
        model=name, tp=tp, pp=pp, dp=dp, backend=backend or wanted.serve.backend, host=_address(bind or wanted.serve.bind),
        port=port or wanted.ports.api, args=_arguments(wanted, args), replace_other=replace_other,
        skip_network_check=skip_network_check, dry_run=dry_run,
    )  # fmt: skip
    if offline:
        click.echo(script(wanted, [asked.plan(wanted, Seen())[1].plan]), nl=False)
        return 0
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose) as reached,
    ):
        first, seen, request, start = _prepare(reached, asked, dry_run=dry_run)
        if dry_run:
            click.echo(script(wanted, [*first, start.plan]), nl=False)
            return 0
        _apply(reached, request, start, skipped=skip_network_check)
        code, rows = _wait(reached, seen, request, start, timeout=timeout, no_wait=no_wait, allow=skip_network_check)
    if not as_json:
        for row in rows:
            click.echo(row)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The command line, put together with the inventory."""

    model: str
    tp: int | None
    pp: int | None
    dp: int | None
    backend: Backend
    host: str
    port: int
    args: tuple[str, ...]
    replace_other: bool
    skip_network_check: bool = False
    dry_run: bool = False

    def plan(self, inventory: Inventory, seen: Seen) -> tuple[Request, Start]:
        """Place the model and plan its start; raises RequestError and PlacementError."""
        from launcher import placement
        from launcher.cli import network_gate, prepare
        from launcher.model import Secret
        from launcher.plan.ranks import plan_ranks
        from launcher.plan.serve import Request, plan_serve
        from launcher.remote.secrets import resolve

        # Half of a split from the command line and half from the inventory would be nobody's wish.
        flags, defaults = (self.tp, self.pp, self.dp), inventory.serve
        tp, pp, dp = flags if any(each is not None for each in flags) else (defaults.tp, defaults.pp, defaults.dp)
        request = Request(
            model=self.model, placement=placement.choose(inventory, tp, pp, seen.config, dp=dp, backend=self.backend),
            backend=self.backend, host=self.host, port=self.port, args=self.args,
        )  # fmt: skip
        prove, known = ((), ()) if self.skip_network_check else network_gate.prove(inventory, seen, request)
        if self.backend == "ray":
            start = plan_serve(inventory, seen, request, prove=prove, replace_other=self.replace_other)
            return request, network_gate.noted(start, known)
        unseen = dict.fromkeys(inventory.secrets, Secret(""))
        given_secrets = resolve(inventory.secrets, inventory.path.parent) if seen.facts else unseen
        secrets = prepare.with_token(inventory, seen.facts, given_secrets, make=not self.dry_run)
        start = plan_ranks(inventory, seen, request, secrets, prove=prove, replace_other=self.replace_other)
        return request, network_gate.noted(start, known)


def _arguments(inventory: Inventory, args: Sequence[str]) -> tuple[str, ...]:
    from launcher.errors import RequestError
    from launcher.inventory.rules import SECRET_VALUE
    from launcher.tools import vllm

    for where, words in (("serve: args: in the inventory", inventory.serve.args), ("the arguments after `--`", args)):
        if said := vllm.collisions(words):
            raise RequestError(f"{where} set what vlaunch sets itself", evidence=said)
    for at, word in enumerate(args, start=1):
        if SECRET_VALUE.search(word):
            raise RequestError(
                f"argument {at} after `--` looks like a secret, which `ps` would show on the nodes",
                hint="name where it comes from under `secrets:` in the inventory",
            )
    return (*inventory.serve.args, *args)


def _prepare(session: Session, asked: _Asked, *, dry_run: bool) -> tuple[list[Plan], Seen, Request, Start]:
    """Look, and plan. What must be there to be asked (helper files; for `mp` the image) is brought up to date before."""
    from launcher.apply import apply
    from launcher.cli.server import look
    from launcher.plan.serve import plan_files
    from launcher.plan.up import plan_image
    from launcher.ui.progress import show_all

    inventory = session.inventory
    seen = look(session, model=asked.model, host=asked.host, port=asked.port)
    first = [plan_files(inventory, seen.facts)]
    if asked.backend == "mp":
        first.append(plan_image(inventory, seen.facts, ports=False))
    if not dry_run:
        for plan in first:
            show_all(apply(plan, session.transport), session.to)
        if any(plan.steps for plan in first):
            seen = look(session, model=asked.model, host=asked.host, port=asked.port)
    request, start = asked.plan(inventory, seen)
    return first, seen, request, start


def _apply(session: Session, request: Request, start: Start, *, skipped: bool) -> None:
    from launcher.apply import apply
    from launcher.events import Event
    from launcher.ui.progress import show_all

    for note in start.plan.notes:
        session.to.show(Event(kind="note", stage="placement", text=note))
    if skipped and not start.attached and request.placement.networked:
        text = "THE NETWORK BETWEEN THE NODES IS NOT PROVEN, as asked: it may be slow TCP, or hang (`vlaunch check-nccl`)"
        session.to.show(Event(kind="warning", stage="network", text=text, state="warn"))
    if start.attached:
        what = f" as Ray job {start.job}" if start.job else ""
        text = f"this server runs already{what}; watching it"
        session.to.show(Event(kind="note", stage="serve", text=text, state="unchanged"))
    elif "VLLM_API_KEY" not in session.inventory.secrets and not ipaddress.ip_address(request.host).is_loopback:
        text = f"whoever can reach port {request.port} may use the model: give VLLM_API_KEY under `secrets:` to ask for a key"
        session.to.show(Event(kind="warning", stage="serve", text=text, state="warn"))
    show_all(apply(start.plan, session.transport), session.to)


def _address(bind: str) -> str:
    try:
        return str(ipaddress.ip_address(bind))
    except ValueError:
        raise click.UsageError(
            f"--bind should be an IP address of the head, or 0.0.0.0 for all of them, not `{bind}`"
        ) from None


def _wait(
    session: Session, seen: Seen, request: Request, start: Start, *, timeout: float, no_wait: bool, allow: bool
) -> tuple[int, list[str]]:
    """Return the exit code, and what to print when the display of progress has been put away."""
    from launcher.events import Event
    from launcher.plan import watched as ways

    inventory = session.inventory
    ray = request.backend == "ray"
    watched = ways.as_job(inventory, request, start.job) if ray else ways.as_ranks(inventory, request)
    if no_wait:
        again = "" if start.attached else ", and watch it with the same command without --no-wait"
        text = f"{watched.what} {'runs' if start.attached else 'starts'}; see `vlaunch status`{again}"
        session.to.show(Event(kind="done", stage="serve", text=text, state="ok", data={"endpoint": watched.endpoint}))
        return 0, [watched.endpoint]
    session.to.show(Event(kind="stage", stage="serve", text="Wait for the first answer", state="running"))
    try:
        served = _watch(session, watched, start, timeout)
    except KeyboardInterrupt:
        text = f"stopped watching; {watched.what} goes on. Watch it again with the same command, or end it with `vlaunch stop`"
        session.to.show(Event(kind="warning", stage="serve", text=text, state="warn"))
        return 130, []
    from launcher.cli import network_gate
    from launcher.watch import summary

    network = network_gate.confirm(session, seen, request, start, allow=allow)
    text = f"{served.model} answers at {served.endpoint}; talk to it with `vlaunch chat`"
    session.to.show(
        Event(
            kind="done",
            stage="serve",
            text=text,
            state="ok",
            seconds=served.seconds,
            data={**summary(served), "network": network},
        )
    )
    return 0, _rows(served, network)


def _watch(session: Session, watched: Watched, start: Start, timeout: float) -> Served:
    from launcher.watch import watch

    events = watch(watched, session.transport, timeout=timeout, attached=start.attached)
    while True:
        try:
            session.to.show(next(events))
        except StopIteration as over:
            served: Served = over.value
            return served


def _rows(served: Served, network: str) -> list[str]:
    from launcher.tools import symptoms

    ranks = "; ".join(f"{node}: {', '.join(names)}" for node, names in served.ranks.items())
    answered = ", ".join(f"DP{number} in {seconds:.1f}s" for number, seconds in enumerate(served.replicas))
    tokens, times = served.capacity.tokens, served.capacity.concurrency
    holds = "not known" if tokens is None else f"{tokens:,} tokens"
    rows = {
        "endpoint": served.endpoint,
        "model": served.model,
        "placement": ranks or "not known",
        **({"replicas": f"all {len(served.replicas)} have answered: {answered}"} if answered else {}),
        **({"network": network} if network else {}),
        "KV cache": holds + (f", {times:g} requests of full length at once" if times else ""),
        "fingerprint": served.fingerprint or "none given",
        "ready after": f"{served.seconds:.1f}s, of which {served.answer_seconds:.1f}s for the first answer",
    }
    return [f"{label:<12} {symptoms.plain(value)}" for label, value in rows.items()]
