"""`vlaunch audit`: the history of changes, read from all nodes."""

import click

from launcher.app import audit as trail
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.terminal import dump_json, say
from launcher.core import untrusted
from launcher.core.transport import Command


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
    cluster, entries, unreadable = call.inventory.cluster, [], {}
    with call.session(partial=True) as session:
        silent = {name: error.reason for name, error in session.missing.items()}
        commands = [
            Command(
                node=node.name,
                argv=trail.read_argv(node.state_dir or "", cluster, tail),
                timeout=30,
            )
            for node in session.reached
        ]
        for answer in session.transport.run(commands):
            if not answer.ok:
                reasons = ("cannot read its audit trail", answer.tail.strip())
                silent[answer.node] = "; ".join(filter(None, reasons))
                continue
            node_entries, unreadable_count = trail.parse_lines(answer.node, answer.out)
            entries += node_entries
            if unreadable_count:
                unreadable[answer.node] = unreadable_count
    history = trail.merge_lines(entries)[-tail:]
    if call.as_json:
        payload = {"entries": history, "silent": silent, "unreadable": unreadable}
        click.echo(dump_json({"cluster": cluster, **payload}))
        return 1 if silent else 0
    for entry in history:
        click.echo(trail.describe_entry(entry))
    if not history and not silent:
        say("no node has an audit entry for this cluster")
    for name, count in unreadable.items():
        say(f"{name}: {count} unreadable line{'' if count == 1 else 's'} in its audit trail")
    for name, reason in silent.items():
        text = reason.splitlines()[0] if reason else "did not respond"
        say(untrusted.sanitize(text), lead=f"{name}: ")
    return 1 if silent else 0
