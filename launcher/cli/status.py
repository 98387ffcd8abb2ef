"""`vlaunch status`: what is there, observed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.cli.command import Call, command
from launcher.cli.session import Session
from launcher.model import Answer
from launcher.transport import Command
from launcher.ui import json_line
from launcher.ui.terminal import console, show

if TYPE_CHECKING:
    from launcher.site import Site
    from launcher.state.status import ClusterStatus, Said

# looks at what the keeper says, a second apart, until it is clear whether a server is busy or
# silent
_AGAIN = 6
_EVERY = 2.0  # seconds between two looks


@command(path=True, shows="none", flags=[options.JSON])
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
def status(call: Call, watch: bool) -> int:
    """Show nodes, containers, Ray, GPUs, ranks, servers, batch jobs that run, and how all that
    differs from the inventory.

    A server is `answering` only when a completion (or what else its model gives) has just come
    back, `busy` when it has too much to do for that and other requests go on, and `silent` when
    nothing of it moves. The exit code is 1 when the cluster is not whole.
    """
    with call.session(partial=True) as session:
        if watch:
            _watch(session, call.as_json)
        seen = look(session)
        _print(seen, call.as_json)
        return 0 if seen.whole else 1


def look(session: Session) -> ClusterStatus:
    """Observe the cluster once."""
    from launcher.site import Site
    from launcher.state import status as plan
    from launcher.state.observe import commands, read
    from launcher.state.verdict import parse_record

    inventory = session.inventory
    asked = commands(inventory, [inventory.image], session.reached, compiled=True, models=True)
    facts, silent = read(session.transport.run(asked))
    site, said = Site(inventory, facts), plan.Said()
    if questions := plan.query_head(site):
        about, proof = session.transport.run(questions)
        said = plan.Said(head=plan.parse_answer(about), network=parse_record(proof))
    said = _ask_servers(session, site, said)
    if questions := plan.query_batches(site, said.head):
        (about,) = session.transport.run(questions)
        said = replace(said, batches=plan.parse_batches(about))
    missing = {name: error.reason for name, error in (session.missing | silent).items()}
    return plan.read(site, said, missing)


def _ask_servers(session: Session, site: Site, said: Said) -> Said:
    """Add what the APIs of the servers say."""
    from launcher.state import endpoints
    from launcher.state import status as plan
    from launcher.state.endpoints import Heard

    questions = {
        (each.name, node): commands
        for each in said.kept.running
        for node, commands in endpoints.query(site, each).items()
    }
    heard: dict[str, dict[str, Heard]] = {}
    for (name, node), answers in _at_once(session, questions).items():
        about, completion = map(plan.parse_answer, answers)
        heard.setdefault(name, {})[node] = Heard(about=about, completion=completion)
    said = replace(said, heard=heard)
    everybody = [one for each in heard.values() for one in each.values()]
    if all(one.completion.get("status") == 200 for one in everybody):
        return said
    return _look_again(session, said)


def _look_again(session: Session, said: Said) -> Said:
    """Hear the keeper until it is clear which servers move: that is what tells a busy one from a
    dead one.
    """
    from launcher.state import endpoints, servers
    from launcher.state import status as plan

    for _ in range(_AGAIN):
        (about,) = session.transport.run([servers.ask(session.site)])
        again = plan.parse_answer(about)
        if "servers" in again:
            said = replace(said, head={**said.head, **again})
        if not endpoints.undecided(said.kept, said.heard):
            break
        time.sleep(1)
    return said


def _at_once(
    session: Session, asked: dict[tuple[str, str], list[Command]]
) -> dict[tuple[str, str], list[Answer]]:
    """Ask all servers at the same time, those on one node as well: a busy one makes nobody else
    wait.
    """
    pool = ThreadPoolExecutor(max(1, len(asked)))
    try:
        return dict(
            zip(
                asked,
                pool.map(lambda each: list(session.transport.run(each)), asked.values()),
                strict=True,
            )
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _print(seen: ClusterStatus, as_json: bool) -> None:
    if as_json:
        click.echo(json_line.dumps(seen.as_json()))
        return
    from launcher.ui.status import render

    show(render(seen))


def _watch(session: Session, as_json: bool) -> None:
    """Show look after look; Ctrl-C ends it."""
    if as_json:
        for seen in _looks(session):
            _print(seen, as_json)
    from rich.live import Live

    from launcher.ui.status import render

    with Live(console=console(), auto_refresh=False) as live:
        for seen in _looks(session):
            live.update(render(seen), refresh=True)


def _looks(session: Session) -> Iterator[ClusterStatus]:
    """Look again and again, each time also for the nodes that could not be reached: they may be on
    their way up.
    """
    while True:
        yield look(session)
        time.sleep(_EVERY)
        if session.missing:
            session = replace(session, missing=session.fleet.connect(session.missing))
