"""`vlaunch down`: remove everything from every node, and prove it."""

from __future__ import annotations

from collections.abc import Mapping

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.registry import workloads
from launcher.app.session import Session
from launcher.cluster.down_plan import plan_down
from launcher.core import sizes
from launcher.core.domain import fold
from launcher.core.errors import GateError, LockError, NodeError, VlaunchError, together
from launcher.core.plan import Plan
from launcher.tools.host import HostFacts
from launcher.tools.observe import commands, read
from launcher.tools.site import Site


@command(path=True, flags=[options.DRY_RUN, options.LOCK_WAIT, options.NO_HOOKS, options.JSON])
@click.option("--purge", is_flag=True, help="Remove what engines compiled, too.")
def down(call: Call, purge: bool) -> None:
    """Remove the cluster's containers, helper files and secrets from every node, and verify that
    they are gone.

    Safe at any moment and as often as wanted. A node that cannot be reached is named, the others
    are cleaned all the same, and the exit code is 1. Images and models stay, what batch jobs did,
    the lines of `vlaunch audit`, and, without --purge, what engines compiled.
    """
    with call.session(hooks_of="down", partial=True) as session:
        with call.locked(session, unless=not session.reached, needed=False) as ours:
            ours.hooks.pre(ours.to)
            _remove(call, ours, purge=purge)
        session.hooks.post(session.to)


def _remove(call: Call, session: Session, *, purge: bool) -> None:
    """Look, remove, and verify; raises NodeError or GateError with the story of every node that is
    not clean.
    """
    images = (session.inventory.image,) if purge else ()
    asked = commands(session.inventory, images, session.reached, compiled=True)
    facts, failed = read(session.transport.run(asked))
    failed |= _without_docker(facts) | session.missing
    facts = {name: each for name, each in facts.items() if name not in failed}
    plan = plan_down(Site(session.inventory, facts), purge=purge)
    if call.dry_run:
        call.print_script([plan])
    else:
        _apply(session, plan, failed)
    if failed:
        raise together(list(failed.values()))
    if not call.dry_run:
        _tell(session, plan, facts, purged=purge)


def _without_docker(facts: Mapping[str, HostFacts]) -> dict[str, NodeError]:
    """Return the nodes whose containers could not be looked for, each with its error."""

    return {
        name: NodeError(
            name,
            "Docker does not answer, so its containers could not be looked for",
            evidence=each.said.get("docker", ""),
            hint="run `vlaunch down` again when it does",
        )
        for name, each in facts.items()
        if each.docker_version is None
    }


def _apply(session: Session, plan: Plan, failed: Mapping[str, NodeError]) -> None:
    """Remove, and verify; an error of that also tells of the nodes that failed before."""

    try:
        session.apply(plan)
    except VlaunchError as error:
        if not failed or isinstance(error, LockError):
            raise
        rest = together(list(failed.values()))
        raise GateError(
            error.message,
            evidence=[error.evidence, rest.message, rest.evidence],
            hint="\n".join(filter(None, (error.hint, rest.hint))),
        ) from None


def _tell(session: Session, plan: Plan, facts: Mapping[str, HostFacts], *, purged: bool) -> None:
    """Tell that the cluster is down, and what stays on its nodes."""
    wanted = session.inventory
    if plan.steps and wanted.head.name in facts:
        state = Site(wanted, facts).state_dir(wanted.head)
        trail = (
            "who changed what stays on each node:"
            f" {state.rpartition('/')[0]}/audit/{wanted.cluster}.ndjson (`vlaunch audit`)"
        )
        session.note("audit", trail)
    compiled = sum(each.compiled.size or 0 for each in facts.values() if each.compiled)
    if compiled >= sizes.MIB and not purged:
        note = (
            f"what engines compiled stays on the nodes, {sizes.told(compiled)} in all"
            " (`vlaunch down --purge` removes it)"
        )
        session.note("compiled", note, data={"bytes": compiled})
    if wanted.head.name in facts:
        for workload in workloads():
            workload.report_remains(session)
    # in the inventory's order, not that of the answers
    names = [node.name for node in wanted.nodes if node.name in facts]
    text = f"cluster {wanted.cluster} is down on {fold(names)}"
    if not plan.steps:
        text += "; there was nothing to remove"
    session.done(text, data={"changed": len(plan.steps)})
