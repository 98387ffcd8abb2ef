"""`vlaunch exec`: one command on every node; equal answers are folded."""

from collections.abc import Sequence

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.app.terminal import dump_json
from launcher.core import untrusted
from launcher.core.domain import Answer, Argv, Node, fold
from launcher.core.errors import NodeError
from launcher.core.transport import Command
from launcher.tools import docker


@command(
    "exec",
    shows="none",
    flags=[options.JSON],
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@options.NODES
@click.option("--head", "only_head", is_flag=True, help="Run only on the head.")
@click.option("--host", is_flag=True, help="Run on the node itself instead of in its container.")
@click.option(
    "--timeout",
    type=options.Duration("1s"),
    default="1m",
    show_default=True,
    help="Time limit for the command.",
)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(
    call: CommandContext,
    nodes: tuple[str, ...],
    only_head: bool,
    host: bool,
    timeout: float,
    words: tuple[str, ...],
) -> int:
    """Run COMMAND in the container of every node.

    Example: `vlaunch exec -- nvidia-smi`. Equal output of several nodes is shown once. The exit
    code is the largest of all.
    """
    selected = (call.inventory.head,) if only_head else select_nodes(call.inventory, nodes)
    with call.session(nodes=selected) as session:
        answers = _run_on_nodes(session, selected, words, timeout, host=host)
    ordered = [answers[node.name] for node in selected if node.name in answers]
    if call.as_json:
        fields = [
            {"node": a.node, "exit_code": a.code, "stdout": a.out, "stderr": a.err} for a in ordered
        ]
        click.echo(dump_json({"cluster": call.inventory.cluster, "nodes": fields}))
    else:
        _print_answers(ordered)
    if missing := [node.name for node in selected if node.name not in answers]:
        raise NodeError(
            fold(missing),
            f"no container of cluster {call.inventory.cluster}",
            hint="run `vlaunch up`, or add `--host` to run it on the node itself",
        )
    return max(answer.code for answer in answers.values())


def _run_on_nodes(
    session: Session, nodes: Sequence[Node], command: Argv, timeout: float, *, host: bool
) -> dict[str, Answer]:
    """Run the command on nodes or in their containers; nodes without a container are left out."""
    commands, names = [], {}
    limited = docker.with_deadline(command, timeout)
    for node in nodes:
        names[node.name] = name = session.site.container_name(node)
        argv = command if host else docker.exec_(node.docker, name, *limited, stdin=True)
        commands.append(Command(node=node.name, argv=argv, timeout=timeout + 10, hold_stdin=True))
    answers = session.transport.run(commands)
    return {a.node: a for a in answers if host or not _lacks_container(a, names[a.node])}


def _print_answers(answers: Sequence[Answer]) -> None:

    groups: dict[tuple[int, str, str], list[str]] = {}
    for answer in answers:
        groups.setdefault((answer.code, answer.out, answer.err), []).append(answer.node)
    for (code, out, err), names in groups.items():
        label = fold(names)
        for line in out.splitlines():
            click.echo(f"{label}: {untrusted.sanitize(line)}")
        for line in err.splitlines():
            click.echo(f"{label}: {untrusted.sanitize(line)}", err=True)
        if code:
            click.echo(f"{label}: exit code {code}", err=True)


def _lacks_container(answer: Answer, container: str) -> bool:
    """True if Docker has no such container, so that nothing ran."""
    return (
        not answer.ok
        and not answer.out
        and answer.err.rstrip().endswith(f"No such container: {container}")
    )
