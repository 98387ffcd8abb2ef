"""`vlaunch doctor`: after a failure, the known causes that the logs of all nodes show, the most
likely first.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import click

from launcher.app import options, refusal
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.core import untrusted
from launcher.core.domain import Answer, Node
from launcher.core.transport import Command
from launcher.diagnose import doctor_view as ui
from launcher.diagnose import log_files
from launcher.diagnose.doctor import Diagnosis, diagnose
from launcher.tools.diagnosis import Told, ask_diagnosis, read

_TIMEOUT = 240.0  # each part of the answer has a deadline of its own


@command(shows="people", flags=[options.JSON])
@click.option(
    "--since",
    callback=options.parse_duration,
    metavar="DURATION",
    help="Look only this far back: 30m, 2h, 1d.",
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="FILE",
    help="Judge this text instead, and ask no node: a log, an archive, or `-` (again: more).",
)
@click.argument("names", metavar="[NODE]...", nargs=-1)
def doctor(
    call: Call, since: float | None, sources: tuple[str, ...], names: tuple[str, ...]
) -> int:
    """Say what most likely went wrong: the logs of all nodes against the known failures, each with
    its cause and fix.

    Read are the ends of the logs of containers, of servers' engines, of Ray's jobs and workers,
    what Docker and the kernel say, and what the keeper of servers wrote down. Nothing is changed.
    The exit code is 1 when something is found that stands in the way.

    With --from it is any text: what `kubectl logs --prefix`, `journalctl` print, a file, or what
    `vlaunch collect` made.
    """
    if sources:
        if names:
            raise click.UsageError("--from asks no node: leave the nodes' names out")
        found = _of_text(sources, since)
        ui.show(found, as_json=call.as_json)
        return 1 if found.found else 0
    nodes = chosen(call.inventory, names)
    with call.session(nodes=nodes, partial=True) as session:
        found = examine(session, nodes, since=since)
    ui.show(found, as_json=call.as_json)
    return 1 if found.found else 0


def _of_text(sources: tuple[str, ...], since: float | None) -> Diagnosis:
    """Judge what files say."""
    told = log_files.read(sources)
    lines = (line for one in told.values() for log in one.logs for line in log.lines)
    rdma = any("NET/IB" in line for line in lines)  # else nobody has promised any
    return diagnose(told, {}, rdma=rdma, now=time.time(), since=since)


def examine(session: Session, nodes: Sequence[Node], *, since: float | None = None) -> Diagnosis:
    """Ask the nodes that were reached, and judge what all of them told."""
    inventory, mark = session.inventory, f"@@{secrets.token_hex(12)}"
    session.wait("doctor", "reading the logs of all nodes")
    queries = [
        Command(
            node=node.name,
            argv=ask_diagnosis(
                node.docker,
                mark=mark,
                cluster=inventory.cluster,
                state_dir=node.state_dir or "",
                hf_home=node.hf_home,
                since=since,
            ),
            timeout=_TIMEOUT,
        )
        for node in session.reached_of(nodes)
    ]
    told, silent = _parse(session.transport.run(queries), mark)
    unreached = {name: error.brief for name, error in session.missing.items()}
    missing = unreached | silent
    return diagnose(
        {node.name: told[node.name] for node in nodes if node.name in told},
        {node.name: missing[node.name] for node in nodes if node.name in missing},
        rdma=inventory.fabric != "ethernet",
        refused=refusal.load(inventory.cluster),
        now=time.time(),
        since=since,
    )


def _parse(answers: Iterable[Answer], mark: str) -> tuple[dict[str, Told], dict[str, str]]:
    """Read all answers: what each node told, and why one told nothing."""
    told: dict[str, Told] = {}
    silent: dict[str, str] = {}
    for answer in answers:
        said = read(answer.out, mark)
        if said.clock is None and not said.lines and not said.states:
            late = (
                f"no answer within {answer.seconds:.0f} s"
                if answer.timed_out
                else "it answered something else"
            )
            silent[answer.node] = f"{late}: {untrusted.shown(answer.tail, last=True)}".strip(": ")
        else:
            told[answer.node] = said
    return told, silent
