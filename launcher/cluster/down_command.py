"""`vlaunch down`: remove the cluster from every node, and verify that it is gone."""

from collections.abc import Mapping

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.registry import workloads
from launcher.app.session import Session
from launcher.cluster.down_plan import plan_down
from launcher.core import sizes
from launcher.core.domain import fold
from launcher.core.errors import (
    ConnectError,
    GateError,
    LockError,
    NodeError,
    VlaunchError,
    combine_errors,
)
from launcher.core.plan import Plan
from launcher.tools.host import HostFacts
from launcher.tools.host.node_probes import parse_answers, probe_commands
from launcher.tools.site import Site
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.serving_judges import query_jobs, running_work


@command(
    path=True,
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.NO_HOOKS, options.YES, options.JSON],
)
@click.option("--purge", is_flag=True, help="Remove the compile cache too.")
def down(call: CommandContext, purge: bool) -> None:
    """Remove the cluster's containers, node programs and secrets from every node, and verify that
    they are gone.

    Servers and batch jobs stop, after a confirmation. It is safe to run at any time and repeatedly.
    An unreachable node is named, the others are cleaned, and the exit code is 1. Images, models,
    batch results, the audit trail and, without --purge, the compile cache stay.
    """
    with call.session(hooks_of="down", partial=True) as session:
        with call.locked(session, skip=not session.reached, required=False) as locked:
            if not (call.yes or call.dry_run):
                _confirm(call, locked, purge=purge)
            locked.hooks.run_pre(locked.printer)
            _remove_cluster(call, locked, purge=purge)
        session.hooks.run_post(session.printer)


def _confirm(call: CommandContext, session: Session, *, purge: bool) -> None:
    """Ask for confirmation if servers or batch jobs run, or the compile cache is removed.

    A head that does not respond runs nothing that would be lost.
    """
    inventory = session.inventory
    queries = probe_commands(inventory, (), session.reached_of([inventory.head]))
    site = Site(inventory, parse_answers(session.transport.run(queries))[0])
    answers = session.transport.run([query_jobs(site)] if site.head_runs else [])
    work = [name for answer in answers for name in running_work(try_payload(answer))]
    losses = [f"stop {', '.join(work)}"] if work else []
    losses += ["delete the compile cache"] if purge else []
    if losses:
        parts = [f"Remove cluster {inventory.cluster}", *losses]
        call.confirm(session, f"{', '.join(parts[:-1])} and {parts[-1]}?")


def _remove_cluster(call: CommandContext, session: Session, *, purge: bool) -> None:
    """Query, remove and verify. Raises NodeError or GateError for all nodes with remains."""
    images = (session.inventory.image,) if purge else ()
    queries = probe_commands(session.inventory, images, session.reached, compiled=True)
    facts, errors = parse_answers(session.transport.run(queries))
    errors |= _docker_errors(facts) | session.missing
    facts = {name: facts[name] for name in facts if name not in errors}
    plan = plan_down(Site(session.inventory, facts), purge=purge)
    if call.dry_run:
        call.print_script([plan])
    else:
        _apply_plan(session, plan, errors)
    if errors:
        error = combine_errors(list(errors.values()))
        again = "once reachable, run `vlaunch down` again to remove its containers and secrets"
        if isinstance(error, ConnectError):
            error.hint = "\n".join(filter(None, (error.hint, again)))
        raise error
    if not call.dry_run:
        _report_result(session, plan, facts, purged=purge)


def _docker_errors(facts: Mapping[str, HostFacts]) -> dict[str, NodeError]:
    """Return an error for each node whose containers could not be listed."""

    return {
        name: NodeError(
            name,
            "Docker does not respond; its containers were not checked",
            evidence=node_facts.part_errors.get("docker", ""),
            hint="start Docker, then run `vlaunch down` again",
        )
        for name, node_facts in facts.items()
        if node_facts.docker_version is None
    }


def _apply_plan(session: Session, plan: Plan, errors: Mapping[str, NodeError]) -> None:
    """Remove and verify; an error also covers the nodes that failed earlier."""

    try:
        session.apply(plan)
    except VlaunchError as error:
        if not errors or isinstance(error, LockError):
            raise
        earlier = combine_errors(list(errors.values()))
        raise GateError(
            error.message,
            evidence=[error.evidence, earlier.message, earlier.evidence],
            hint="\n".join(filter(None, (error.hint, earlier.hint))),
        ) from None


def _report_result(
    session: Session, plan: Plan, facts: Mapping[str, HostFacts], *, purged: bool
) -> None:
    """Report that the cluster is down, and the data that stays on its nodes."""
    inventory = session.inventory
    if plan.steps and inventory.head.name in facts:
        state = inventory.head.state_dir or f"{facts[inventory.head.name].home}/.vlaunch"
        path = f"{state}/audit/{inventory.cluster}.ndjson"
        audit_text = f"the audit trail stays on each node: {path} (`vlaunch audit`)"
        session.note("audit", audit_text)
    caches = [node_facts.compile_cache for node_facts in facts.values()]
    cache_bytes = sum(cache.size or 0 for cache in caches if cache)
    if cache_bytes >= sizes.MIB and not purged:
        note = (
            f"the compile cache stays on the nodes, {sizes.format_size(cache_bytes)} in total"
            " (`vlaunch down --purge` removes it)"
        )
        session.note("compiled", note, data={"bytes": cache_bytes})
    if inventory.head.name in facts:
        for workload in workloads():
            workload.report_remains(session)
    # in the inventory's order, not that of the answers
    names = [node.name for node in inventory.nodes if node.name in facts]
    text = f"cluster {inventory.cluster} is down on {fold(names)}"
    if not plan.steps:
        text += "; there was nothing to remove"
    session.done(text, data={"changed": len(plan.steps)})
