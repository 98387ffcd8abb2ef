"""`vlaunch lock`: the lock's owner, and the removal of a stale lock."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial

import click

from launcher.app import lock as tool
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.lock import Owner
from launcher.app.session import Session
from launcher.app.terminal import dump_json, say
from launcher.core import untrusted
from launcher.core.errors import LockError, NodeError, RequestError
from launcher.core.transport import Command


@command(shows="none", flags=[options.JSON])
@click.option("--break", "broken", is_flag=True, help="Take the lock away from whoever holds it.")
@click.option("--yes", is_flag=True, help="With --break: do not ask.")
def lock(call: CommandContext, broken: bool, yes: bool) -> None:
    """Show who holds the cluster's lock.

    Commands that change the cluster take it, and give it back however they end.

    Only a head that has lost its connection to a launcher without a word still holds a lock that is
    nobody's: --break shows whose it is, asks, and ends its process on the head. A launcher that
    still works stops before its next step.
    """

    if yes and not broken:
        raise click.UsageError("--yes goes with --break")
    with call.session(nodes=[call.inventory.head]) as session:
        owner = query_owner(session)
        freed = False
        if broken and owner is not None:
            _confirm_break(session, owner, yes=yes)
            freed = _break(session, owner)
    _print_owner(call.inventory.cluster, owner, freed, as_json=call.as_json)


def query_owner(session: Session) -> Owner | None:
    """Query the head for the lock's owner."""
    head = session.inventory.head
    argv = tool.status_argv(head.state_dir or "", session.inventory.cluster)
    (answer,) = session.transport.run([Command(node=head.name, argv=argv, timeout=20)])
    return tool.parse_status(answer)


def _confirm_break(session: Session, owner: Owner, *, yes: bool) -> None:
    """Show the lock's owner, and ask for confirmation."""
    head, cluster = session.inventory.head.name, session.inventory.cluster
    if not owner.pid:
        folder = session.inventory.head.state_dir or "~/.vlaunch"
        raise NodeError(
            head,
            f"does not say which process holds the lock of cluster {cluster}",
            hint=f"on {head}: `fuser -v {folder}/{tool.FILE}/{cluster}`",
        )
    say(untrusted.single_line(f"held by {owner.description}, process {owner.pid} on {head}"))
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestError(
            "nobody can be asked whether the lock should be broken",
            hint="say it: `vlaunch lock --break --yes`",
        )
    click.confirm("Break it? What its command is doing is left half-done", abort=True, err=True)


def _break(session: Session, owner: Owner) -> bool:
    """End the lock's process; return whether that was needed. An audit line records it."""
    head, cluster, operator = session.inventory.head, session.inventory.cluster, session.operator
    record = session.transport.record(
        "lock", {head.name: (f"breaking the lock of {owner.who}@{owner.host}",)}
    )
    command = Command(
        node=head.name,
        argv=tool.break_argv(head.state_dir or "", cluster, owner),
        timeout=40,
        stdin=partial(tool.encode_owner, operator.user, operator.host, operator.command),
        preamble=record[head.name],
    )
    (answer,) = session.transport.run([command])
    result = answer.out.strip()
    if answer.ok and result in ("freed", "free"):
        return result == "freed"
    if answer.ok and result in ("changed", "stranger"):
        raise LockError(
            head.name, "the lock has changed hands meanwhile", hint="look again: `vlaunch lock`"
        )
    raise LockError(
        head.name,
        f"the process {owner.pid} that holds the lock could not be ended",
        evidence=answer.tail,
        hint=f"its login, or root, can do it: on {head.name}, `kill {owner.pid}`",
    )


def _print_owner(cluster: str, owner: Owner | None, freed: bool, *, as_json: bool) -> None:

    if as_json:
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
        say(f"{cluster}: nobody holds the lock", err=False)
    elif freed:
        say(
            untrusted.single_line(f"{cluster}: broken; it was held by {owner.description}"),
            err=False,
        )
    else:
        say(untrusted.single_line(f"{cluster}: held by {owner.description}"), err=False)
