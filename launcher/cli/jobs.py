"""`vlaunch jobs`: the cluster's batch jobs, how far they are, and how to be rid of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.ui import json_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.cli.session import Session
    from launcher.plan.batches import BatchStatus
    from launcher.plan.request import ClusterSnapshot


@click.command()
@options.reaching
@options.as_json
@click.option(
    "--remove",
    "names",
    metavar="NAME",
    multiple=True,
    help="Remove a job that is over, and its output on the head.",
)
@options.lock_wait
def jobs(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    names: tuple[str, ...],
    lock_wait: int,
) -> None:
    """Show the batch jobs that the head knows: those that run, and those that are over.

    A job is `interrupted` when its driver ended without a word; the same `vlaunch batch` goes on
    with it.
    """
    from launcher.cli import session
    from launcher.cli.locked import locked
    from launcher.ui.progress import printer

    if lock_wait and not names:
        raise click.UsageError("--lock-wait goes with --remove: to look takes no lock")
    wanted = session.read(None, inventory)
    with (
        printer(as_json=as_json and bool(names), quiet=not names) as to,
        session.reach(
            wanted,
            to,
            accept_new_host_keys=accept_new_host_keys,
            verbose=verbose,
            nodes=[wanted.head],
        ) as reached,
        locked(reached, wait=lock_wait, unless=not names) as ours,
    ):
        seen, found = look(ours, update=bool(names))
        if names:
            _remove(ours, found, names)
            return
    if as_json:
        click.echo(
            json_line.dumps({"cluster": wanted.cluster, "jobs": [each.as_json() for each in found]})
        )
        return
    _print(seen, found)


def look(
    session: Session, *, update: bool = False
) -> tuple[ClusterSnapshot, tuple[BatchStatus, ...]]:
    """Ask the head for its batch jobs; with `update`, for which the lock is held, its helper
    program is brought up to date.

    Raises:
        NodeError: the head has no container that runs, or no helper program, or cannot say which
            jobs there are.
    """
    from dataclasses import replace

    from launcher.apply import apply
    from launcher.cli import server
    from launcher.errors import NodeError
    from launcher.plan import batches, running
    from launcher.plan.batch import query_list
    from launcher.plan.serve import plan_files
    from launcher.tools import job_store
    from launcher.ui.progress import show_all

    inventory = session.inventory
    seen = server.look(session, head_only=True)
    if not running.head_runs(inventory, seen.facts):
        raise NodeError(inventory.head.name, "its container does not run", hint="run `vlaunch up`")
    if update:
        only = replace(inventory, nodes=(inventory.head,))
        show_all(apply(plan_files(only, seen.facts), session.transport), session.to)
    elif not seen.facts[inventory.head.name].files.get("payload/desk.py"):
        text = "has no helper program that knows its batch jobs"
        raise NodeError(
            inventory.head.name, text, hint="run `vlaunch up`, which brings it up to date"
        )
    (answer,) = session.transport.run([query_list(inventory)])
    return seen, batches.read(inventory, job_store.parse_list(answer), seen.said)


def _print(seen: ClusterSnapshot, found: Sequence[BatchStatus]) -> None:
    from launcher.plan import servers
    from launcher.ui import jobs as ui
    from launcher.ui.status import console

    remarks = [
        f"{each.what} with {each.model} runs beside them"
        for each in servers.read(seen.said).running
    ]
    if "error" in seen.said:
        remarks.append(f"Ray does not say which jobs run: {seen.said['error']}")
    if not found:
        click.echo("no batch job is known on this cluster", err=True)
        return
    console().print(ui.render(found, remarks))


def _remove(session: Session, found: Sequence[BatchStatus], names: Sequence[str]) -> None:
    from launcher.apply import apply
    from launcher.cli import server
    from launcher.errors import RequestError
    from launcher.events import Event
    from launcher.plan.batches import plan_remove
    from launcher.ui.progress import show_all

    chosen = [server.the_batch(found, name) for name in dict.fromkeys(names)]
    if runs := [each.name for each in chosen if each.runs]:
        raise RequestError(
            f"batch job `{runs[0]}` runs", hint=f"stop it first: `vlaunch stop {runs[0]}`"
        )
    show_all(apply(plan_remove(session.inventory, chosen), session.transport), session.to)
    said = ", ".join(each.name for each in chosen)
    session.to.show(
        Event(
            kind="done",
            text=f"removed {said}",
            state="ok",
            data={"removed": [each.name for each in chosen]},
        )
    )
