"""`vlaunch status`: what is there, observed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.ui import json_line

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.plan.status import ClusterStatus

_EVERY = 2.0  # seconds between two looks


@click.command()
@click.argument("path", metavar="[INVENTORY]", required=False)
@options.reaching
@options.as_json
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
def status(
    path: str | None, inventory: str | None, accept_new_host_keys: bool, verbose: bool, as_json: bool, watch: bool
) -> int:
    """Show nodes, containers, Ray, GPUs, ranks, the server, batch jobs that run, and how all that differs from the inventory.

    The server is `answering` only when a completion has just come back. The exit code is 1 when the cluster is not whole.
    """
    from launcher.cli import session
    from launcher.ui.progress import printer

    wanted = session.read(path, inventory)
    with (
        printer(quiet=True) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose, partial=True) as reached,
    ):
        if watch:
            _watch(reached, as_json)
        seen = look(reached)
        _print(seen, as_json)
        return 0 if seen.whole else 1


def look(session: Session) -> ClusterStatus:
    """Observe the cluster once."""
    from launcher.plan import status as plan
    from launcher.plan.observe import commands, read
    from launcher.plan.running import find
    from launcher.plan.verdict import parse_record

    inventory = session.inventory
    nodes = [node for node in inventory.nodes if node.name not in session.missing]
    facts, silent = read(session.transport.run(commands(inventory, [inventory.image], nodes)))
    said = plan.Said()
    if asked := plan.ask_ray(inventory, facts):
        about_ray, kept = session.transport.run(asked)
        said = plan.Said(ray=plan.hear(about_ray), network=parse_record(kept))
    for server in find(inventory, facts, said.ray)[:1]:
        about, completion = session.transport.run(plan.ask_server(inventory, server))
        said = replace(said, server=plan.hear(about), completion=plan.hear(completion))
    if asked := plan.ask_batches(inventory, said.ray):
        (about,) = session.transport.run(asked)
        said = replace(said, batches=plan.hear_batches(about))
    return plan.read(
        inventory,
        facts,
        said,
        {name: error.message.removeprefix(f"{name}: ") for name, error in (session.missing | silent).items()},
    )


def _print(seen: ClusterStatus, as_json: bool) -> None:
    if as_json:
        click.echo(json_line.dumps({**asdict(seen), "batches": [each.as_json() for each in seen.batches], "whole": seen.whole}))
        return
    from launcher.ui.status import console, render

    console().print(render(seen))


def _watch(session: Session, as_json: bool) -> None:
    """Show look after look; Ctrl-C ends it."""
    if as_json:
        for seen in _looks(session):
            _print(seen, as_json)
    from rich.live import Live

    from launcher.ui.status import console, render

    with Live(console=console(), auto_refresh=False) as live:
        for seen in _looks(session):
            live.update(render(seen), refresh=True)


def _looks(session: Session) -> Iterator[ClusterStatus]:
    """Look again and again, each time also for the nodes that could not be reached: they may be on their way up."""
    while True:
        yield look(session)
        time.sleep(_EVERY)
        if session.missing:
            session = replace(session, missing=session.fleet.connect(session.missing))
