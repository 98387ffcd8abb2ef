"""`vlaunch audit`: who changed what on the nodes, and when, read from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from launcher.app import audit as trail
from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.terminal import dump_json, say
from launcher.core import untrusted
from launcher.core.domain import fold
from launcher.core.errors import UnreadableAnswer


@command(path=True, shows="none", flags=[options.JSON])
@click.option(
    "--last",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="The newest so many; 0: all that is kept.",
)
def audit(call: Call, last: int) -> int:
    """Show what changed the cluster, the newest last: every node keeps a line for each command that
    changed it.

    The lines outlive `vlaunch down`. Nodes that cannot be read are named, and the exit code is then
    1.
    """
    with call.session(partial=True) as session:
        silent = {name: error.reason for name, error in session.missing.items()}
        entries, strange = [], {}
        for answer in session.transport.run(
            trail.ask(call.inventory.cluster, session.reached, last)
        ):
            try:
                found, odd = trail.parse(answer)
            except UnreadableAnswer as error:
                silent[answer.node] = "; ".join(
                    filter(None, (error.message.partition(": ")[2], error.evidence.strip()))
                )
                continue
            entries += found
            if odd:
                strange[answer.node] = odd
    happened = trail.merge(entries)[-last:]
    if call.as_json:
        said = [each.as_json() for each in happened]
        click.echo(
            dump_json(
                {
                    "cluster": call.inventory.cluster,
                    "entries": said,
                    "silent": silent,
                    "unreadable": strange,
                }
            )
        )
    else:
        _print(happened, silent, strange)
    return 1 if silent else 0


def _print(
    happened: Sequence[trail.Happened], silent: Mapping[str, str], strange: Mapping[str, int]
) -> None:

    for each in happened:
        entry = each.entry
        changes = "; ".join(entry.changes)
        line = (
            f"{entry.at}  {entry.who}@{entry.host}  {fold(each.nodes)}  {entry.command}: {changes}"
        )
        click.echo(untrusted.plain(line.replace("\n", " ")))
    if not happened:
        say("no node has a line about this cluster")
    for name, count in strange.items():
        say(f"{name}: {count} line{'' if count == 1 else 's'} of its trail cannot be read")
    for name, why in silent.items():
        say(untrusted.plain(why.splitlines()[0] if why else "gave no answer"), lead=f"{name}: ")
