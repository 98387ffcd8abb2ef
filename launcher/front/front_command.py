"""`vlaunch front`: the address in front of all servers, and the keys of its users."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from typing import Any

import click

from launcher.agent import state
from launcher.app import options
from launcher.app.command import CommandContext, DefaultGroup, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, make_table, plain_text, show
from launcher.core.domain import Inventory, fold
from launcher.core.errors import LockError, NodeError, RequestError, combine_errors
from launcher.core.plan import Plan, Stage, Step
from launcher.core.sizes import format_duration
from launcher.core.transport import Command
from launcher.front.certificates import load_certificate
from launcher.front.front_plan import (
    container_name,
    find_drift,
    front_container,
    node_command,
    uses_tls,
)
from launcher.front.keys import NAME, Key, make_key
from launcher.front.status import FrontStatus, parse_status
from launcher.front.traffic import MAX_LINES, Traffic, parse_traffic
from launcher.front.update import read_files, update_front
from launcher.tools import docker
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site


@click.group(cls=DefaultGroup)
def front() -> None:
    """Show or reload the address in front of all servers, and manage keys. Without COMMAND:
    `status`.
    """


@command(
    "status",
    under=front,
    shows="none",
    flags=[options.JSON],
    short_help="Show the front's address and the replicas behind it",
)
@click.option(
    "--since",
    type=options.Duration("1s", "7d"),
    default="15m",
    show_default=True,
    help="Period of the requests by user.",
)
def front_status(call: CommandContext, since: float) -> int:
    """Show the front's address, the state and requests of the replicas behind it, and the requests
    of each user.

    Users' requests are from the access log, at most the last 20,000 of each front: errors are 5xx
    and cut answers, times are those of answered requests. The exit code is 1 when a front does not
    run, its certificate has expired, or it differs from the inventory, from the certificate's files
    on this machine, or from the servers.
    """
    from launcher.tools.shipped.certificates import front_warning

    inventory = _require_front(call.inventory)
    with call.session() as session:
        site = Site(inventory, probe_nodes(inventory, session.transport, [inventory.image]))
        statuses = _query_statuses(session)
        traffic = _query_traffic(session, since)
        certificate = None
        with suppress(RequestError):  # its files may be on another machine
            certificate = load_certificate(inventory)
        update = partial(update_front, session, site, certificate=certificate)
        outdated = bool(update(verb="front", start=True, dry_run=True).steps)
    warning = front_warning(inventory, site.facts, datetime.now(timezone.utc))
    good = not outdated and " expired " not in warning
    whole = good and all(status.digest for status in statuses.values())
    if call.as_json:
        nodes = {node: _status_json(status) for node, status in statuses.items()}
        data = {"url": inventory.front_url, "whole": whole, "outdated": outdated, "nodes": nodes}
        data["certificate"] = warning
        data["traffic"] = [asdict(item) for item in traffic]
        click.echo(dump_json(data))
    else:
        _print_status(inventory, statuses, outdated=outdated)
        if warning:
            show(plain_text(f"  {warning}", "yellow"))
        _print_traffic(traffic, since)
    return 0 if whole else 1


@command(under=front, shows="none", short_help="Print the front's certificate (PEM)")
def certificate(call: CommandContext) -> None:
    """Print the front's certificate (PEM), read over SSH, for clients that do not trust it yet."""
    inventory = _require_front(call.inventory)
    if not uses_tls(inventory):
        raise RequestError("the front has no certificate: `front: {tls: off}`")
    with call.session() as session:
        files = read_files(session, Site(inventory, probe_nodes(inventory, session.transport, [])))
    # Where nodes differ, a client that trusts all of them can use each.
    pems = dict.fromkeys(node.certificate for node in files.values() if node.certificate)
    if not pems:
        raise RequestError("the front has no certificate yet", hint="run `vlaunch up`")
    click.echo("\n".join(pems))


@command(under=front, flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON])
def reload(call: CommandContext) -> None:
    """Apply changes of `front:`, of its certificate and of the servers, without closing a
    connection. HAProxy validates them first; after a mistake it keeps its old configuration.
    """
    inventory = _require_front(call.inventory)
    certificate = load_certificate(inventory)
    with call.session() as session, call.locked(session) as locked:
        site = Site(inventory, probe_nodes(inventory, locked.transport, [inventory.image]))
        if not any(front_container(site, node) for node in site.nodes):
            raise RequestError("the front does not run", hint="start it: `vlaunch up`")
        if drift := [text for node in site.nodes for text in find_drift(site, node)]:
            text = "the front needs a new container, which closes connections"
            raise RequestError(text, evidence=drift, hint="run `vlaunch up`")
        plan = update_front(
            locked, site, verb="front", certificate=certificate, dry_run=call.dry_run
        )
        if call.dry_run:
            call.print_script([plan])
            return
        text = "reloaded the front" if plan.steps else "the front is up to date"
        locked.done(text, data={"changed": len(plan.steps)})


@front.group(cls=DefaultGroup)
def keys() -> None:
    """List, add and revoke keys of users. Without COMMAND: `list`."""


@command("list", under=keys, shows="none", flags=[options.JSON], short_help="List users and limits")
def list_(call: CommandContext) -> int:
    """List the users with a key on any node of the front, and their limits. Keys themselves are not
    stored.

    The exit code is 1 when nodes differ, or the keys of one are unknown.
    """
    inventory = _require_front(call.inventory)
    with call.session(nodes=inventory.front_nodes, partial=True) as session:
        statuses = _query_statuses(session)
    nodes: dict[Key, list[str]] = {}
    for node, status in statuses.items():
        for key in status.keys:
            nodes.setdefault(key, []).append(node)
    listed = sorted(nodes, key=lambda key: key.name)
    unknown = [node for node, status in statuses.items() if status.error]
    differ = any(len(holders) + len(unknown) < len(statuses) for holders in nodes.values())
    if call.as_json:
        rows = [{**asdict(k), "digest": k.digest[:12], "nodes": nodes[k]} for k in listed]
        click.echo(dump_json({"keys": rows, "differ": differ, "unknown": unknown}))
    else:
        _print_keys([(key, nodes[key]) for key in listed], statuses, differ=differ)
    return 1 if differ or unknown else 0


_LIMIT = click.IntRange(min=1)


@command(under=keys, shows="people", flags=[options.LOCK_WAIT, options.JSON])
@click.option(
    "--rpm", type=_LIMIT, metavar="N", help="Limit of requests per minute (default: none)."
)
@click.option(
    "--concurrent", type=_LIMIT, metavar="N", help="Limit of requests at once (default: none)."
)
@click.option("--models", metavar="A,B", default="", help="Servers, by name (default: all).")
@click.argument("name")
def add(
    call: CommandContext, name: str, rpm: int | None, concurrent: int | None, models: str
) -> None:
    """Add a key for the user NAME, and print it: it cannot be shown again.

    Limits count on each node of the front.
    """
    names = tuple(dict.fromkeys(model.strip() for model in models.split(",") if model.strip()))
    wrong = [
        f"{model}: is not the name of a server"
        for model in names
        if not state.GROUP.fullmatch(model)
    ]
    wrong += (
        []
        if NAME.fullmatch(name)
        else [f"{name}: is not a name of letters, digits, `.`, `_`, `@` and `-`"]
    )
    if wrong:
        raise RequestError("the key was not added", evidence=wrong, hint="see `vlaunch status`")
    secret, digest = make_key()
    key = Key(name=name, digest=digest, rpm=rpm or 0, concurrent=concurrent or 0, models=names)
    with _session_of_keys(call) as session:
        statuses = _query_statuses(session)
        if holders := [node for node, s in statuses.items() if name in {k.name for k in s.keys}]:
            hint = f"run `vlaunch front keys revoke {name}` first"
            raise RequestError(f"{name} already has a key on {fold(holders)}", hint=hint)
        try:
            _change_keys(session, f"adding a key for {name}", "add", key.digest, key.line)
        except NodeError:
            with suppress(NodeError):
                _change_keys(session, "revoking the key again", "revoke", "", key.digest)
            raise
    click.echo(dump_json({"name": name, "key": secret}) if call.as_json else secret)


@command(under=keys, flags=[options.LOCK_WAIT, options.JSON])
@click.argument("name")
def revoke(call: CommandContext, name: str) -> None:
    """Revoke the key of the user NAME at once, on every node of the front that can be reached.
    Requests that run are finished.
    """
    with _session_of_keys(call, partial=True) as session:
        statuses = _query_statuses(session)
        digests = {k.digest for status in statuses.values() for k in status.keys if k.name == name}
        failed: list[NodeError] = [e for node, e in session.missing.items() if node in statuses]
        if not digests and not any(status.error for status in statuses.values()):
            raise RequestError(f"{name} has no key", hint="see `vlaunch front keys`")
        try:
            words = ("revoke", name, *sorted(digests))
            _change_keys(session, f"revoking the key of {name}", *words)
        except LockError:
            raise
        except NodeError as error:
            failed.append(error)
        if failed:
            nodes = ", ".join(error.node for error in failed)
            text = (
                f"the key of {name} may still be valid on {nodes}; `front reload` revokes it there"
            )
            session.warn("keys", f"{text}, too")
            raise combine_errors(failed, "did not revoke it")


@contextmanager
def _session_of_keys(call: CommandContext, *, partial: bool = False) -> Iterator[Session]:
    """Connect to the front's nodes and the head, which has the lock, and hold it."""
    inventory = _require_front(call.inventory)
    nodes = [inventory.head, *(node for node in inventory.front_nodes if not node.head)]
    with (
        call.session(nodes=nodes, partial=partial) as session,
        call.locked(session, required=not partial) as locked,
    ):
        yield locked


def _change_keys(session: Session, title: str, *arguments: str) -> None:
    steps = tuple(
        Step(title=title, command=node_command(session.site, node, *arguments))
        for node in session.reached_of(session.inventory.front_nodes)
    )
    session.apply(Plan(verb="front", stages=(Stage(id="keys", title="Change keys", steps=steps),)))


def _query_statuses(session: Session) -> dict[str, FrontStatus]:
    """Query the fronts by node, in the inventory's order; those of missing nodes are unknown."""
    nodes = session.inventory.front_nodes
    queries = [node_command(session.site, node, "status") for node in session.reached_of(nodes)]
    answers = {answer.node: parse_status(answer) for answer in session.transport.run(queries)}
    return {
        node.name: answers.get(node.name) or FrontStatus(error=session.missing[node.name].reason)
        for node in nodes
    }


def _query_traffic(session: Session, seconds: float) -> tuple[Traffic, ...]:
    """Query the access logs; a log driver may not be readable."""
    queries = [
        Command(
            node=node.name,
            argv=docker.logs(
                node.docker,
                container_name(session.site, node),
                tail=MAX_LINES,
                since=f"{seconds:.0f}s",
            ),
            timeout=60,
        )
        for node in session.inventory.front_nodes
    ]
    answers = session.transport.run(queries)
    return parse_traffic([answer.out for answer in answers if answer.ok])


def _print_traffic(traffic: Sequence[Traffic], seconds: float) -> None:
    if not traffic:
        return
    columns = ("USER", "SERVER", "REQUESTS", "ERRORS", "REJECTED")
    table = make_table(*columns, "FIRST BYTE p50", "p99", "TOTAL p50", "p99")
    for item in traffic:
        user, server, *counts = list(asdict(item).values())[:5]
        times = (item.first_byte_p50, item.first_byte_p99, item.total_p50, item.total_p99)
        cells = (
            user,
            server,
            *map(str, counts),
            *("-" if t is None else f"{t:.2f}s" for t in times),
        )
        table.add_row(*map(plain_text, cells))
    show(plain_text(f"requests of the last {format_duration(seconds)}", "bold"))
    show(table)


def _print_keys(
    rows: Sequence[tuple[Key, list[str]]], statuses: Mapping[str, FrontStatus], *, differ: bool
) -> None:
    table = make_table("NAME", "RPM", "CONCURRENT", "MODELS", "SHA-256", *["NODES"][:differ])
    for key, nodes in rows:
        limits = (str(limit or "-") for limit in (key.rpm, key.concurrent))
        cells = (key.name, *limits, ", ".join(key.models) or "all", key.digest[:12])
        table.add_row(*map(plain_text, (*cells, *[fold(nodes)][:differ])))
    show(table)
    if differ:
        text = "  nodes have different keys: run `vlaunch front reload`; revoked keys stay revoked"
        show(plain_text(text, "yellow"))
    _print_unknown(statuses)


def _print_unknown(statuses: Mapping[str, FrontStatus]) -> None:
    for node, status in statuses.items():
        if status.error:
            show(plain_text(f"  {node}: the front cannot be queried: {status.error}", "red"))


def _status_json(status: FrontStatus) -> dict[str, Any]:
    replicas = [asdict(replica) for replica in status.replicas]
    runs = None if status.error else bool(status.digest)
    return {"runs": runs, "held": status.held, "replicas": replicas}


def _print_status(
    inventory: Inventory, statuses: dict[str, FrontStatus], *, outdated: bool
) -> None:
    table = make_table("NODE", "SERVER", "REPLICA", "STATE", "REQUESTS", "TOTAL", "ERRORS")
    for node, status in statuses.items():
        for replica in status.replicas:
            table.add_row(node, *(plain_text(str(value)) for value in asdict(replica).values()))
    show(plain_text(f"front {inventory.front_url}/NAME/v1", "bold"))
    show(table)
    _print_unknown(statuses)
    for node, status in statuses.items():
        if not status.digest and not status.error:
            show(plain_text(f"  {node}: the front does not run: `vlaunch up` starts it", "red"))
        if status.held:
            show(plain_text(f"  {node}: requests waiting for a replica: {status.held}", "yellow"))
    if outdated:
        text = "  the front differs from the inventory and the servers: run `vlaunch front reload`"
        show(plain_text(text, "yellow"))


def _require_front(inventory: Inventory) -> Inventory:
    if inventory.front is None:
        raise RequestError(
            "the inventory has no front",
            hint="add `front: {tls: self-signed}` to it, then run `vlaunch up`",
        )
    return inventory
