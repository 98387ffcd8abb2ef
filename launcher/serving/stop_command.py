"""`vlaunch stop`: stop servers or batch jobs; the cluster stays."""

import time
from collections.abc import Sequence

import click

from launcher.agent import state
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.registry import workloads
from launcher.app.session import Session
from launcher.core.errors import RequestError
from launcher.serving.stop_plan import plan_forget, plan_stop
from launcher.tools.site import history, serving_judges
from launcher.tools.site.servers import Server, shown_state
from launcher.tools.site.snapshot import ClusterSnapshot


@command(flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON])
@click.option("--all", "everyone", is_flag=True, help="Stop all servers; batch jobs keep running.")
@click.option(
    "--grace",
    type=options.Duration(),
    default="15s",
    show_default=True,
    help="Time to wait before SIGKILL.",
)
@options.SERVER_OR_NAME
@click.argument("names", metavar="[NAME]...", nargs=-1)
def stop(
    call: CommandContext,
    everyone: bool,
    grace: float,
    server: str | None,
    names: tuple[str, ...],
) -> None:
    """Stop the server, or the named servers and batch jobs, and verify that nothing of them is
    left. The name of a server includes its replicas; `NAME.2` is one of them.

    A server's processes are gone, its GPUs free and its port closed; the record of a failed server
    is removed. A batch job keeps its results, and the same `vlaunch batch` resumes it. The cluster
    stays.
    """
    from launcher.app.servers import update_and_query

    names = options.merge_names(server, names)
    if everyone and names:
        raise click.UsageError("--all cannot be combined with names")
    others = [node for node in call.inventory.front_nodes if not node.head]
    with (
        call.session(nodes=[call.inventory.head, *others]) as session,
        call.locked(session) as locked,
    ):
        snapshot, _ = update_and_query(locked, verb="stop", dry_run=call.dry_run, head_only=True)
        servers = _list_servers(locked, snapshot)
        chosen = [s for s in servers if not names or not {s.name, s.group}.isdisjoint(names)]
        if not names and not everyone:
            _require_one_server(chosen)
        if chosen or not names:
            _stop_servers(call, locked, snapshot, chosen, grace)
        server_names = {name for server in servers for name in (server.name, server.group)}
        if jobs := [name for name in names if name not in server_names]:
            if server or session.inventory.ray.off:  # the other workloads need Ray
                raise RequestError(f"no server `{jobs[0]}` is running", hint="see `vlaunch status`")
            for workload in workloads():
                workload.stop(call, locked, jobs, grace)


def _list_servers(session: Session, snapshot: ClusterSnapshot) -> list[Server]:
    """Return the servers with a spec or still running; without a container, from files."""
    from launcher.app.servers import require_servers

    if not snapshot.site.head_runs:
        names = history.servers_with_file(snapshot.site, state.DESIRED)
        return [Server(name=name) for name in names]
    require_servers(session, snapshot)
    return [server for server in snapshot.servers_state.servers if server.state != "stopped"]


def _require_one_server(chosen: Sequence[Server]) -> None:
    """Raise RequestError if several servers run, not counting replicas."""
    if len({server.group for server in chosen}) > 1:
        listed = ", ".join(f"`{s.name}` ({s.model}, {shown_state(s.state)})" for s in chosen)
        commands = f"`vlaunch stop {chosen[0].name}`; all of them: `vlaunch stop --all`"
        text = f"there are {len(chosen)} servers: {listed}"
        raise RequestError(text, hint=f"name one: {commands}")


def _stop_servers(
    call: CommandContext,
    session: Session,
    snapshot: ClusterSnapshot,
    chosen: Sequence[Server],
    grace: float,
) -> None:
    """Stop running servers and remove the records of failed ones."""
    from launcher.front.update import follow_servers

    began, site = time.monotonic(), snapshot.site
    reachable = site.head_runs
    live = [server for server in chosen if server.runs or not reachable]
    over = [server for server in chosen if server not in live]
    plans = [plan_forget(site, [server.name for server in over]), plan_stop(site, live, grace)]
    if call.dry_run:
        call.print_script(plans)
        return
    for job in serving_judges.active_batches(snapshot.payload):
        text = f"batch job `{job.name}` keeps running; stop it: `vlaunch stop {job.name}`"
        session.note("stop", text)
    for plan in plans:
        session.apply(plan)
    if reachable:
        follow_servers(session, verb="stop")
    if live and not reachable:
        text = (
            "its processes on other nodes keep running until the head's container starts;"
            " `vlaunch down` stops everything"
        )
        session.warn("stop", text)
    results = _describe_results(live, over, reachable=reachable)
    data = {
        "stopped": [server.name for server in live],
        "forgotten": [server.name for server in over],
    }
    session.done(
        "; ".join(results) or "no server is running; nothing was stopped",
        state="ok" if results else "unchanged",
        seconds=time.monotonic() - began if results else 0.0,
        data=data,
    )


def _describe_results(
    live: Sequence[Server], over: Sequence[Server], *, reachable: bool
) -> list[str]:
    results = [
        f"removed the record of {server.label} ({shown_state(server.state)})" for server in over
    ]
    if live and reachable:
        stopped = " and ".join(f"{server.model} ({server.label})" for server in live)
        results.append(f"stopped {stopped}")
    elif live:
        names = ", ".join(server.label for server in live)
        results.append(f"the head's container is not running: {names} will not start with it")
    return results
