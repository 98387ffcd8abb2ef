"""`vlaunch down`: remove everything from every node, and prove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from launcher.cli.session import Session
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
    from launcher.apply import apply
    from launcher.batch.described import jobs_folder
    from launcher.errors import GateError, LockError, NodeError, VlaunchError, together
    from launcher.events import Event
    from launcher.model import fold
    from launcher.plan import containers
    from launcher.plan.down import plan_down
    from launcher.plan.observe import commands, read
    from launcher.plan.script import script
    from launcher.ui.progress import show_all

    wanted, to = reached.inventory, reached.to
    nodes = [node for node in wanted.nodes if node.name not in reached.missing]
    facts, failed = read(reached.transport.run(commands(wanted, (), nodes)))
    failed |= {
        name: NodeError(
            name,
            "Docker does not answer, so its containers could not be looked for",
            evidence=each.said.get("docker", ""),
            hint="run `vlaunch down` again when it does",
        )
        for name, each in facts.items()
        if each.docker_version is None
    }
    failed |= reached.missing
    facts = {name: each for name, each in facts.items() if name not in failed}
    plan = plan_down(wanted, facts)
    if dry_run:
        click.echo(script(wanted, [plan]), nl=False)
    else:
        try:
            show_all(apply(plan, reached.transport), to)
        except VlaunchError as error:
            if not failed or isinstance(error, LockError):
                raise
            rest = together(list(failed.values()))
            raise GateError(
                error.message,
                evidence=[error.evidence, rest.message, rest.evidence],
                hint="\n".join(filter(None, (error.hint, rest.hint))),
            ) from None
    if failed:
        raise together(list(failed.values()))
    if not dry_run:
        # in the inventory's order, not that of the answers
        names = [node.name for node in nodes if node.name in facts]
        text = f"cluster {wanted.cluster} is down on {fold(names)}"
        if not plan.steps:
            text += "; there was nothing to remove"
        if plan.steps and wanted.head.name in facts:
            home = containers.state_dir(wanted, wanted.head, facts[wanted.head.name]).rpartition(
                "/"
            )[0]
            trail = (
                f"who changed what stays on each node: {home}/audit/{wanted.cluster}.ndjson"
                " (`vlaunch audit`)"
            )
            to.show(Event(kind="note", stage="audit", text=trail))
        if left := _left(reached, facts):
            where = f"{jobs_folder(wanted)} on {wanted.head.name}"
            note = (
                f"what batch jobs did stays in {where}:"
                f" {', '.join(left[:5])}{' …' if len(left) > 5 else ''}"
            )
            to.show(Event(kind="note", stage="batch", text=note, data={"jobs": list(left)}))
        to.show(Event(kind="done", text=text, state="ok", data={"changed": len(plan.steps)}))


def _left(session: Session, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Return the batch jobs whose folders stay on the head."""
    from launcher.plan.batches import ask_left, read_left

    if session.inventory.head.name not in facts:
        return ()
    (answer,) = session.transport.run([ask_left(session.inventory)])
    return read_left(answer)
