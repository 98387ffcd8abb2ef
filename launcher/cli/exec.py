"""`vlaunch exec`: one command on every node, equal answers folded."""

from __future__ import annotations

import click

from launcher.cli import options


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.reaching
@click.option("-n", "--node", "nodes", multiple=True, metavar="NAME", help="Only on this node (may be given several times).")
@click.option("--head", "only_head", is_flag=True, help="Only on the head.")
@click.option("--host", is_flag=True, help="On the node itself instead of in its container.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds until the command is ended.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    nodes: tuple[str, ...],
    only_head: bool,
    host: bool,
    timeout: float,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND in the container of every node: `vlaunch exec -- nvidia-smi -L`.

    Nodes that say the same are shown once. The exit code is the largest of all.
    """
    from launcher.cli import session
    from launcher.cli.choose import chosen
    from launcher.model import fold
    from launcher.plan import containers
    from launcher.tools import docker, symptoms
    from launcher.transport import Command
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    picked = (wanted.head,) if only_head else chosen(wanted, nodes)
    with (
        printer(quiet=True) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose, nodes=picked) as reached,
    ):
        asked = [
            Command(
                node=node.name,
                argv=command
                if host
                else docker.exec_(node.docker, containers.name(wanted, node), *docker.bounded(command, timeout), stdin=True),
                timeout=timeout + 10,
                hold_stdin=True,
            )
            for node in picked
        ]
        answers = {answer.node: answer for answer in reached.transport.run(asked)}
    groups: dict[tuple[int, str, str], list[str]] = {}
    for node in picked:
        answer = answers[node.name]
        groups.setdefault((answer.code, answer.out, answer.err), []).append(node.name)
    for (code, out, err), names in groups.items():
        label = fold(names)
        for line in out.splitlines():
            click.echo(f"{label}: {symptoms.plain(line)}")
        for line in err.splitlines():
            click.echo(f"{label}: {symptoms.plain(line)}", err=True)
        if code:
            click.echo(f"{label}: exit code {code}", err=True)
    return max(answer.code for answer in answers.values())
