"""`vlaunch status`: what is there, observed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.registry import workloads
from launcher.app.session import Session
from launcher.app.terminal import dump_json, show, show_live
from launcher.tools.network_verdict import parse_record
from launcher.tools.observe import commands, read
from launcher.tools.ray_judges import try_payload
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot

if TYPE_CHECKING:
    from launcher.serving.status import ClusterStatus

_EVERY = 2.0  # seconds between two looks


@command(path=True, shows="none", flags=[options.JSON])
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
def status(call: Call, watch: bool) -> int:
    """Show nodes, containers, Ray, GPUs, ranks, servers, batch jobs that run, and how all that
    differs from the inventory.

    The head's agent judges servers by requests of its own: `answering`, `busy` (requests wait, and
    steps end), `quiet` (a warning: no step has ended for long), `suspect` (its ranks do not move).
    The exit code is 1 when the cluster is not whole, or its agent does not answer.
    """
    from launcher.serving.status_view import render

    with call.session(partial=True) as session:
        looks = _looks(session)
        if watch and not call.as_json:
            show_live(map(render, looks))
        for cluster in looks:
            if call.as_json:
                click.echo(dump_json(cluster.as_json()))
            else:
                show(render(cluster))
            if not watch:
                return 0 if cluster.whole else 1
    return 0


def look(session: Session) -> ClusterStatus:
    """Observe the cluster once."""
    from launcher.serving import status

    inventory = session.inventory
    asked = commands(inventory, [inventory.image], session.reached, compiled=True, models=True)
    facts, silent = read(session.transport.run(asked))
    snapshot = ClusterSnapshot(site=Site(inventory, facts))
    if questions := status.query_head(snapshot.site):
        head, record = session.transport.run(questions)
        snapshot = replace(snapshot, said=try_payload(head), network=parse_record(record))
    jobs = tuple(job for kind in workloads() for job in kind.running(session, snapshot))
    missing = {name: error.reason for name, error in (session.missing | silent).items()}
    return status.read(snapshot, missing, jobs)


def _looks(session: Session) -> Iterator[ClusterStatus]:
    """Look again and again, each time also for the nodes that could not be reached: they may be on
    their way up.
    """
    while True:
        yield look(session)
        time.sleep(_EVERY)
        if session.missing:
            session = replace(session, missing=session.fleet.connect(session.missing))
