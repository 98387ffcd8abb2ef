"""`vlaunch stop`: end the server; the cluster stays."""

from __future__ import annotations

import time

import click

from launcher.cli import options


@click.command()
@options.reaching
@options.as_json
@click.option("--grace", type=click.FloatRange(0), default=15.0, show_default=True, help="Seconds to end politely.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be sent; change nothing.")
def stop(inventory: str | None, accept_new_host_keys: bool, verbose: bool, as_json: bool, grace: float, dry_run: bool) -> None:
    """Stop the server, and verify that its processes are gone, its GPUs free and its port closed. The cluster stays."""
    from launcher.apply import apply
    from launcher.cli import server, session
    from launcher.events import Event
    from launcher.plan import running
    from launcher.plan.script import script
    from launcher.plan.serve import plan_files
    from launcher.plan.stop import plan_stop
    from launcher.ui.progress import printer, show_all

    wanted = session.read(None, inventory)
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose) as reached,
    ):
        began = time.monotonic()
        seen = server.look(reached)
        found = running.find(wanted, seen.facts, seen.said)
        plans = [plan_files(wanted, seen.facts), plan_stop(wanted, seen.facts, found, grace)]
        if "error" in seen.said:
            if not plans[1].steps:
                raise server.silent(reached, seen)
            text = f"Ray does not say which jobs run ({seen.said['error']}); only rank containers are stopped"
            to.show(Event(kind="warning", stage="stop", node=wanted.head.name, text=text, state="warn"))
        if dry_run:
            click.echo(script(wanted, plans), nl=False)
            return
        if not plans[1].steps:
            to.show(Event(kind="done", text="no server runs; nothing was stopped", state="unchanged", data={"stopped": []}))
            return
        for plan in plans:
            show_all(apply(plan, reached.transport), to)
        what = [f"{each.model} ({each.what})" for each in found] or ["what was left of a server"]
        to.show(
            Event(
                kind="done", text=f"stopped {' and '.join(what)}", state="ok", seconds=time.monotonic() - began,
                data={"stopped": [each.id or "ranks" for each in found]},
            )
        )  # fmt: skip
