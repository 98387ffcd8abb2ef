"""`vlaunch status`: the observed state of nodes, servers and jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.registry import workloads
from launcher.app.session import Session
from launcher.app.terminal import dump_json, show, show_live
from launcher.tools.host.node_probes import parse_answers, probe_commands
from launcher.tools.site import Site
from launcher.tools.site.network_verdict import parse_record
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.snapshot import ClusterSnapshot

if TYPE_CHECKING:
    from launcher.serving.status import ClusterStatus

_INTERVAL = 2.0  # seconds between two queries


@command(shows="none", flags=[options.JSON])
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
def status(call: CommandContext, watch: bool) -> int:
    """Show nodes, containers, Ray, GPUs, ranks, servers, running batch jobs, and drift from the
    inventory.

    The head's agent checks servers with its own requests: `ready`, `busy` (requests wait, and steps
    finish), `quiet` (a warning: no step has finished for long), `suspect` (its ranks do not move).
    The exit code is 1 when the cluster is not healthy, or its agent does not respond.
    """
    from launcher.serving.status_view import render_status

    with call.session(partial=True) as session:
        statuses = _poll_status(session)
        if watch and not call.as_json:
            show_live(map(render_status, statuses))
        for cluster_status in statuses:
            if call.as_json:
                click.echo(dump_json(cluster_status.as_json()))
            else:
                show(render_status(cluster_status))
            if not watch:
                return 0 if cluster_status.whole else 1
    return 0


def observe_cluster(session: Session) -> ClusterStatus:
    """Query the cluster once."""
    from launcher.serving import status

    inventory = session.inventory
    queries = probe_commands(
        inventory, [inventory.image], session.reached, compiled=True, models=True
    )
    facts, failed = parse_answers(session.transport.run(queries))
    snapshot = ClusterSnapshot(site=Site(inventory, facts))
    if head_queries := status.query_head(snapshot.site):
        head, record = session.transport.run(head_queries)
        snapshot = replace(snapshot, payload=try_payload(head), network=parse_record(record))
    jobs = tuple(job for kind in workloads() for job in kind.running(session, snapshot))
    missing = {name: error.reason for name, error in (session.missing | failed).items()}
    return status.build_status(snapshot, missing, jobs)


def _poll_status(session: Session) -> Iterator[ClusterStatus]:
    """Query the cluster repeatedly, with unreachable nodes: they may be booting."""
    while True:
        yield observe_cluster(session)
        time.sleep(_INTERVAL)
        if session.missing:
            session = replace(session, missing=session.fleet.connect(session.missing))
