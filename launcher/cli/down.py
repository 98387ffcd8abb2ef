"""`vlaunch down`: remove everything from every node, and prove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.errors import NodeError
    from launcher.plan.shape import Plan
    from launcher.tools.host import HostFacts


@click.command()
@click.argument("path", metavar="[INVENTORY]", required=False)
@options.reaching
@options.as_json
@click.option(
    "--dry-run", is_flag=True, help="Print the script that would be sent; change nothing."
)
@options.lock_wait
@options.no_hooks
def down(
    path: str | None,
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    dry_run: bool,
    lock_wait: int,
    no_hooks: bool,
) -> None:
    """Remove the cluster's containers, helper files and secrets from every node, and verify that
    they are gone.

    Safe at any moment and as often as wanted. A node that cannot be reached is named, the others
    are cleaned all the same, and the exit code is 1. Images and models stay, what batch jobs did,
    and the lines of `vlaunch audit`.
    """
    from launcher.cli import session
    from launcher.cli.hooks import hooks
    from launcher.cli.locked import locked
    from launcher.ui.progress import printer

    wanted = session.read(path, inventory)
    programs = hooks(wanted, "down", skip=no_hooks, dry_run=dry_run)
    with (
        printer(as_json=as_json, quiet=dry_run) as to,
        programs.watching(to),
        session.reach(
            wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose, partial=True
        ) as reached,
    ):
        with locked(
            reached,
            wait=lock_wait,
            unless=dry_run or len(reached.missing) == len(wanted.nodes),
            needed=False,
        ) as ours:
            programs.pre(to)
            _remove(ours, dry_run=dry_run)
        programs.post(to)


def _remove(reached: Session, *, dry_run: bool) -> None:
    """Look, remove, and verify; raises NodeError or GateError with the story of every node that is
    not clean.
    """
    from launcher.errors import together
    from launcher.plan.down import plan_down
    from launcher.plan.observe import commands, read
    from launcher.plan.script import script

    wanted = reached.inventory
    nodes = [node for node in wanted.nodes if node.name not in reached.missing]
    facts, failed = read(reached.transport.run(commands(wanted, (), nodes)))
    failed |= _without_docker(facts) | reached.missing
    facts = {name: each for name, each in facts.items() if name not in failed}
    plan = plan_down(wanted, facts)
    if dry_run:
        click.echo(script(wanted, [plan]), nl=False)
    else:
        _apply(reached, plan, failed)
    if failed:
        raise together(list(failed.values()))
    if not dry_run:
        _tell(reached, plan, facts)


def _without_docker(facts: Mapping[str, HostFacts]) -> dict[str, NodeError]:
    """Return the nodes whose containers could not be looked for, each with its error."""
    from launcher.errors import NodeError

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


def _apply(reached: Session, plan: Plan, failed: Mapping[str, NodeError]) -> None:
    """Remove, and verify; an error of that also tells of the nodes that failed before."""
    from launcher.apply import apply
    from launcher.errors import GateError, LockError, VlaunchError, together
    from launcher.ui.progress import show_all

    try:
        show_all(apply(plan, reached.transport), reached.to)
    except VlaunchError as error:
        if not failed or isinstance(error, LockError):
            raise
        rest = together(list(failed.values()))
        raise GateError(
            error.message,
            evidence=[error.evidence, rest.message, rest.evidence],
            hint="\n".join(filter(None, (error.hint, rest.hint))),
        ) from None


def _tell(reached: Session, plan: Plan, facts: Mapping[str, HostFacts]) -> None:
    """Tell that the cluster is down, and what stays on its nodes."""
    from launcher.batch.job_spec import jobs_folder
    from launcher.events import Event
    from launcher.model import fold
    from launcher.plan import containers

    wanted, to = reached.inventory, reached.to
    if plan.steps and wanted.head.name in facts:
        state = containers.state_dir(wanted, wanted.head, facts[wanted.head.name])
        trail = (
            "who changed what stays on each node:"
            f" {state.rpartition('/')[0]}/audit/{wanted.cluster}.ndjson (`vlaunch audit`)"
        )
        to.show(Event(kind="note", stage="audit", text=trail))
    if left := _left(reached, facts):
        where = f"{jobs_folder(wanted)} on {wanted.head.name}"
        note = (
            f"what batch jobs did stays in {where}:"
            f" {', '.join(left[:5])}{' …' if len(left) > 5 else ''}"
        )
        to.show(Event(kind="note", stage="batch", text=note, data={"jobs": list(left)}))
    # in the inventory's order, not that of the answers
    names = [node.name for node in wanted.nodes if node.name in facts]
    text = f"cluster {wanted.cluster} is down on {fold(names)}"
    if not plan.steps:
        text += "; there was nothing to remove"
    to.show(Event(kind="done", text=text, state="ok", data={"changed": len(plan.steps)}))


def _left(session: Session, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Return the batch jobs whose folders stay on the head."""
    from launcher.plan.batches import ask_left, read_left

    if session.inventory.head.name not in facts:
        return ()
    (answer,) = session.transport.run([ask_left(session.inventory)])
    return read_left(answer)
