"""`vlaunch doctor`: after a failure, the known causes that the logs of all nodes show, the most
likely first.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import click

from launcher.cli import duration, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.checks.doctor import Diagnosis
    from launcher.cli.session import Session
    from launcher.model import Node


@click.command()
@options.reaching
@options.as_json
@click.option(
    "--since",
    callback=duration.seconds,
    metavar="DURATION",
    help="Look only this far back: 30m, 2h, 1d.",
)
@click.argument("names", metavar="[NODE]...", nargs=-1)
def doctor(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    since: float | None,
    names: tuple[str, ...],
) -> int:
    """Say what most likely went wrong: the logs of all nodes against the known failures, each with
    its cause and fix.

    Read are the ends of the logs of containers, of servers' engines, of Ray's jobs and workers,
    what Docker and the kernel say, and what the keeper of servers wrote down. Nothing is changed.
    The exit code is 1 when something is found that stands in the way.
    """
    from launcher.cli import session
    from launcher.cli.choose import chosen
    from launcher.ui import doctor as ui
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    nodes = chosen(wanted, names)
    with (
        printer(quiet=as_json) as to,
        session.reach(
            wanted,
            to,
            accept_new_host_keys=accept_new_host_keys,
            verbose=verbose,
            nodes=nodes,
            partial=True,
        ) as reached,
    ):
        found = examine(reached, nodes, since=since)
    ui.show(found, as_json=as_json)
    return 1 if found.found else 0


def examine(session: Session, nodes: Sequence[Node], *, since: float | None = None) -> Diagnosis:
    """Ask the nodes that were reached, and judge what all of them told."""
    from launcher.checks.doctor import diagnose
    from launcher.events import Event
    from launcher.plan import doctor as plan

    inventory, mark = session.inventory, f"@@{secrets.token_hex(12)}"
    there = [node for node in nodes if node.name not in session.missing]
    session.to.show(
        Event(kind="wait", stage="doctor", text="reading the logs of all nodes", state="running")
    )
    told, silent = plan.parse(
        session.transport.run(plan.query(inventory, there, mark, since)), mark
    )
    unreached = {
        name: "; ".join(
            part
            for part in (error.message.removeprefix(f"{name}: "), *error.evidence.splitlines()[-1:])
            if part
        )
        for name, error in session.missing.items()
    }
    missing = unreached | silent
    return diagnose(
        {node.name: told[node.name] for node in nodes if node.name in told},
        {node.name: missing[node.name] for node in nodes if node.name in missing},
        rdma=inventory.fabric != "ethernet",
        now=time.time(),
        since=since,
    )
