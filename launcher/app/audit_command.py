"""`vlaunch audit`: the history of changes, read from all nodes."""

from collections.abc import Mapping, Sequence

import click

from launcher.app import audit as trail
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.terminal import dump_json, say
from launcher.core import untrusted
from launcher.core.domain import fold
from launcher.core.errors import UnreadableAnswer


@command(shows="none", flags=[options.JSON])
@click.option(
    "--tail",
    type=options.Tail(1),
    default=50,
    show_default=True,
    metavar="N|all",
    help="Number of entries to show from the end.",
)
def audit(call: CommandContext, tail: int) -> int:
    """Show who changed what, and when; the newest is last.

    Every node records each command that changed it; the records survive `vlaunch down`. Nodes that
    cannot be read are named, and the exit code is 1.
    """
    with call.session(partial=True) as session:
        silent = {name: error.reason for name, error in session.missing.items()}
        entries, unreadable = [], {}
        for answer in session.transport.run(
            trail.query_audit(call.inventory.cluster, session.reached, tail)
        ):
            try:
                node_entries, unreadable_count = trail.parse_lines(answer)
            except UnreadableAnswer as error:
                silent[answer.node] = "; ".join(
                    filter(None, (error.message.partition(": ")[2], error.evidence.strip()))
                )
                continue
            entries += node_entries
            if unreadable_count:
                unreadable[answer.node] = unreadable_count
    history = trail.merge_lines(entries)[-tail:]
    if call.as_json:
        payload = [entry.as_json() for entry in history]
        click.echo(
            dump_json(
                {
                    "cluster": call.inventory.cluster,
                    "entries": payload,
                    "silent": silent,
                    "unreadable": unreadable,
                }
            )
        )
    else:
        _print_entries(history, silent, unreadable)
    return 1 if silent else 0


def _print_entries(
    history: Sequence[trail.AuditEntry], silent: Mapping[str, str], unreadable: Mapping[str, int]
) -> None:

    for item in history:
        entry = item.entry
        changes = "; ".join(entry.changes)
        line = (
            f"{entry.at}  {entry.who}@{entry.host}  {fold(item.nodes)}  {entry.command}: {changes}"
        )
        click.echo(untrusted.sanitize(line.replace("\n", " ")))
    if not history and not silent:
        say("no node has an audit entry for this cluster")
    for name, count in unreadable.items():
        say(f"{name}: {count} unreadable line{'' if count == 1 else 's'} in its audit trail")
    for name, reason in silent.items():
        say(
            untrusted.sanitize(reason.splitlines()[0] if reason else "did not respond"),
            lead=f"{name}: ",
        )
