"""`vlaunch stop`: end the server, or batch jobs; the cluster stays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.cli.session import Session


@click.command()
@options.reaching
@options.as_json
@click.option("--grace", type=click.FloatRange(0), default=15.0, show_default=True, help="Seconds to end politely.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be sent; change nothing.")
@options.lock_wait
@click.argument("names", metavar="[JOB]...", nargs=-1)
def stop(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    grace: float,
    dry_run: bool,
    lock_wait: int,
    names: tuple[str, ...],
) -> None:
    """Stop the server, or the batch JOBs that are named, and verify that nothing of them is left. The cluster stays.

    For the server: its processes are gone, its GPUs free and its port closed; one that does not run, and would come back with
    the head, is forgotten. What a batch job has done stays, and the same `vlaunch batch` goes on with it.
    """
    from launcher.cli import session
    from launcher.cli.locked import locked
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        session.reach(
            wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose, nodes=[wanted.head] if names else None
        ) as reached,
        locked(reached, wait=lock_wait, unless=dry_run) as ours,
    ):
        if names:
            _batches(ours, names, grace, dry_run=dry_run)
        else:
            _server(ours, grace, dry_run=dry_run)


def _server(session: Session, grace: float, *, dry_run: bool) -> None:
    from launcher.apply import apply
    from launcher.cli import server
    from launcher.events import Event
    from launcher.plan import running, supervised
    from launcher.plan.script import script
    from launcher.plan.serve import plan_files
    from launcher.plan.stop import plan_forget, plan_stop
    from launcher.ui.progress import show_all

    wanted, to, began = session.inventory, session.to, time.monotonic()
    seen = server.look(session)
    found = running.find(wanted, seen.facts, seen.said)
    stops = plan_stop(wanted, seen.facts, found, grace)
    kept = supervised.read(wanted, seen.said.get("supervised"))
    gave_up = kept is not None and kept.state == "gave-up"
    forget = plan_forget(wanted, seen.facts, stops, gave_up=gave_up)
    plans = [forget, *([plan_files(wanted, seen.facts, verb="stop"), stops] if stops.steps else [])]
    if "error" in seen.said and not stops.steps:
        if forget.steps and not dry_run:
            show_all(apply(forget, session.transport), to)
        raise server.silent(session, seen, forgotten=bool(forget.steps) and not dry_run)
    if "error" in seen.said:
        text = f"Ray does not say which jobs run ({seen.said['error']}); only rank containers are stopped"
        to.show(Event(kind="warning", stage="stop", node=wanted.head.name, text=text, state="warn"))
    if dry_run:
        click.echo(script(wanted, plans), nl=False)
        return
    for each in running.batches(seen.said):
        text = f"batch job `{each.name}` runs and goes on; end it with `vlaunch stop {each.name}`"
        to.show(Event(kind="note", stage="stop", text=text))
    for plan in plans:
        show_all(apply(plan, session.transport), to)
    if forget.steps and not stops.steps:
        which = "that had given up" if gave_up else "that would have come back with the head"
        text = f"no server runs; the one {which} is forgotten"
        to.show(Event(kind="done", text=text, state="ok", data={"stopped": [], "forgotten": True}))
        return
    if not stops.steps:
        to.show(Event(kind="done", text="no server runs; nothing was stopped", state="unchanged", data={"stopped": []}))
        return
    what = [f"{each.model} ({each.what})" for each in found] or ["what was left of a server"]
    to.show(
        Event(
            kind="done", text=f"stopped {' and '.join(what)}", state="ok", seconds=time.monotonic() - began,
            data={"stopped": [each.id or "ranks" for each in found]},
        )
    )  # fmt: skip


def _batches(session: Session, names: Sequence[str], grace: float, *, dry_run: bool) -> None:
    from launcher.apply import apply
    from launcher.cli import jobs, server
    from launcher.errors import NodeError
    from launcher.events import Event
    from launcher.plan import running
    from launcher.plan.script import script
    from launcher.plan.stop import plan_stop_batches
    from launcher.ui.progress import show_all

    wanted, to, began = session.inventory, session.to, time.monotonic()
    seen, found = jobs.look(session)
    if "error" in seen.said:
        raise server.silent(session, seen)
    chosen = [server.the_batch(found, name) for name in dict.fromkeys(names)]
    runs = [each for each in running.batches(seen.said) if each.name in names]
    plan = plan_stop_batches(wanted, runs, grace)
    if dry_run:
        click.echo(script(wanted, [plan]), nl=False)
        return
    others = [each for each in chosen if each.name not in {one.name for one in runs}]
    for each in others:
        if not each.runs:
            text = f"{each.name} does not run; it is {each.state}"
            to.show(Event(kind="note", stage="stop", text=text, state="unchanged"))
    show_all(apply(plan, session.transport), to)
    if left := [each.name for each in others if each.runs]:
        raise NodeError(
            wanted.head.name, f"the driver of batch job `{left[0]}` lives, and Ray does not know its job any more",
            hint="it may just be ending: look at `vlaunch jobs`; `vlaunch down` ends everything",
        )  # fmt: skip
    said = (
        f"stopped {', '.join(each.name for each in runs)}; the same `vlaunch batch` goes on" if runs else "nothing was stopped"
    )
    to.show(
        Event(
            kind="done", text=said, state="ok" if runs else "unchanged", seconds=time.monotonic() - began,
            data={"stopped": [each.id for each in runs]},
        )
    )  # fmt: skip
