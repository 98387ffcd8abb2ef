"""`vlaunch lock`: the lock's owner, and the removal of a stale lock."""

from dataclasses import asdict

import click

from launcher.app import lock as cluster_lock
from launcher.app import options
from launcher.app.command import CommandContext, DefaultGroup, command
from launcher.app.lock import Owner
from launcher.app.session import Session
from launcher.app.terminal import dump_json, say
from launcher.core import untrusted
from launcher.core.errors import LockError, NodeError
from launcher.core.transport import Command


@click.group(cls=DefaultGroup)
def lock() -> None:
    """Show the owner of the cluster lock, or break the lock. Without COMMAND: `show`.

    Commands that change the cluster hold the lock while they run, and release it even if they fail.
    """


@command(under=lock, shows="none", flags=[options.JSON], short_help="Show the lock's owner")
def show(call: CommandContext) -> None:
    """Show the owner of the cluster lock."""
    with call.session(nodes=[call.inventory.head]) as session:
        owner = query_owner(session)
    _print_owner(call, owner)


@command(
    "break",
    under=lock,
    shows="none",
    flags=[options.YES, options.JSON],
    short_help="Stop the process that holds the lock, and release it",
)
def break_(call: CommandContext) -> None:
    """Stop the process that holds the lock, and release it.

    A stale lock remains only if the head lost its connection to the owner's machine. The owner is
    shown, and, after a confirmation, its process on the head is stopped. A command that still runs
    stops before its next step.
    """
    with call.session(nodes=[call.inventory.head]) as session:
        owner = query_owner(session)
        freed = False
        if owner is not None:
            _confirm_break(call, session, owner)
            freed = _break(session, owner)
    _print_owner(call, owner, freed=freed)


def query_owner(session: Session) -> Owner | None:
    """Query the head for the lock's owner."""
    head = session.inventory.head
    argv = cluster_lock.status_argv(head.state_dir or "", session.inventory.cluster)
    (answer,) = session.transport.run([Command(node=head.name, argv=argv, timeout=20)])
    return cluster_lock.parse_status(answer)


def _confirm_break(call: CommandContext, session: Session, owner: Owner) -> None:
    """Show the lock's owner, and ask for confirmation."""
    head, cluster = session.inventory.head.name, session.inventory.cluster
    if not owner.pid:
        folder = session.inventory.head.state_dir or "~/.vlaunch"
        raise NodeError(
            head,
            f"cannot find the process that holds the lock of cluster {cluster}",
            hint=f"on {head}: `fuser -v {folder}/{cluster_lock.FILE}/{cluster}`",
        )
    say(untrusted.single_line(f"held by {owner.description}, process {owner.pid} on {head}"))
    call.confirm(session, "Break the lock? The command that holds it stops before its next step")


def _break(session: Session, owner: Owner) -> bool:
    """End the lock's process; return whether that was needed. An audit line records it."""
    head = session.inventory.head
    record = session.transport.record(
        "lock", {head.name: (f"breaking the lock of {owner.who}@{owner.host}",)}
    )
    command = cluster_lock.break_command(session, owner, record[head.name])
    (answer,) = session.transport.run([command])
    result = answer.out.strip()
    if answer.ok and result in ("freed", "free"):
        return result == "freed"
    if answer.ok and result in ("changed", "stranger"):
        changed = "another operator has taken the lock since"
        text = changed if result == "changed" else f"process {owner.pid} does not hold the lock"
        raise LockError(head.name, text, hint="run `vlaunch lock` again")
    raise LockError(
        head.name,
        f"cannot kill process {owner.pid}, which holds the lock",
        evidence=answer.tail,
        hint=f"on {head.name}, as its user or root: `kill {owner.pid}`",
    )


def _print_owner(call: CommandContext, owner: Owner | None, *, freed: bool = False) -> None:
    cluster = call.inventory.cluster
    if call.as_json:
        fields = (
            {}
            if owner is None
            else {key: value for key, value in asdict(owner).items() if key != "raw"}
        )
        locked = owner is not None and not freed
        click.echo(
            dump_json({"cluster": cluster, "held": locked, "broken": freed, "owner": fields})
        )
    elif owner is None:
        say(f"{cluster}: the lock is free", err=False)
    elif freed:
        text = f"{cluster}: lock released; it was held by {owner.description}"
        say(untrusted.single_line(text), err=False)
    else:
        say(untrusted.single_line(f"{cluster}: held by {owner.description}"), err=False)
