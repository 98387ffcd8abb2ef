"""`vlaunch logs`: what the containers and the servers of all nodes say, each line with where it
comes from.
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from launcher import shell
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.session import Session
from launcher.errors import DeadlineError, RequestError, VlaunchError
from launcher.model import Answer, Inventory, Node, fold
from launcher.payload.agent import state
from launcher.remote.output import Lines
from launcher.tools import docker, untrusted
from launcher.tools.docker import CLUSTER
from launcher.transport import Command

if TYPE_CHECKING:
    from docker import APIClient


Merged = queue.Queue[tuple[str, str] | None]

# of a server, or of a batch job, with the process of an engine
_NAME = re.compile(rf"{state.NAME.pattern}|batch:[a-z0-9._-]{{1,40}}(?::\d{{1,10}})?")
_MOST = 50  # containers of a cluster on a node that are read
_LIMIT = 60.0  # seconds to read servers' logs, unless they are followed


@command(shows="none")
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--tail",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Lines of each log to begin with.",
)
@click.option("--server", metavar="NAME", help="Only what this server's engine says.")
@click.argument("names", metavar="[NODE]...", nargs=-1)
def logs(call: Call, follow: bool, tail: int, server: str | None, names: tuple[str, ...]) -> None:
    """Print the logs of the nodes' containers, and of the engines of servers and batch jobs, each
    line with where it comes from.
    """
    nodes = chosen(call.inventory, names)
    with call.session(nodes=nodes) as session:
        found = False
        for where, line in _merged(session, nodes, server, follow=follow, tail=tail):
            found = True
            click.echo(f"{where}: {untrusted.plain(line)}")
        if not found and not follow:
            if server is not None:
                raise RequestError(
                    f"no server `{server}` has a log there", hint="see which run: `vlaunch status`"
                )
            raise RequestError(
                f"no container of cluster {call.inventory.cluster} has said anything",
                hint="run `vlaunch up`",
            )


def _merged(
    session: Session, nodes: Sequence[Node], server: str | None, *, follow: bool, tail: int
) -> Iterator[tuple[str, str]]:
    """Yield (where, line) of all logs as lines come: of containers through the Docker API, of
    servers from inside them.
    """

    lines: Merged = queue.Queue(maxsize=1000)
    readers = [
        threading.Thread(
            target=_servers, args=(session, nodes, server, lines, follow, tail), daemon=True
        )
    ]
    for node in nodes if server is None else ():
        readers.append(
            threading.Thread(
                target=_containers, args=(session, node, lines, follow, tail), daemon=True
            )
        )
    for reader in readers:
        reader.start()
    open_ = len(readers)
    while open_:
        try:
            item = lines.get(timeout=None if follow else _LIMIT + 20)
        except queue.Empty:
            raise DeadlineError(
                f"{fold([node.name for node in nodes])}: does not come to the end of its logs",
                hint="ask one node after the other: `vlaunch logs NODE`",
            ) from None
        if item is None:
            open_ -= 1
        else:
            yield item


def _containers(session: Session, node: Node, lines: Merged, follow: bool, tail: int) -> None:
    """Put the lines of all containers of a node; each is read by a thread of its own, for a
    followed one does not end.
    """
    from launcher.remote import docker_api

    try:
        client = session.fleet.docker(node.name)
        with docker_api.errors(node.name):
            found = list(
                client.containers(
                    all=True, filters={"label": f"{CLUSTER}={session.inventory.cluster}"}
                )
            )[:_MOST]
        readers = [
            threading.Thread(
                target=_container, args=(client, node, each, lines, follow, tail), daemon=True
            )
            for each in found
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    except VlaunchError as error:
        lines.put((node.name, f"[{error.message}]"))
    finally:
        lines.put(None)


def _container(
    client: APIClient, node: Node, each: dict[str, Any], lines: Merged, follow: bool, tail: int
) -> None:
    from launcher.remote import docker_api

    count = 0

    def line(text: str) -> None:
        nonlocal count
        count += 1
        if follow or count <= tail:  # whatever comes beyond was not asked for
            lines.put((node.name, text))

    whole = Lines(line)
    try:
        with docker_api.errors(node.name):
            for chunk in client.logs(each["Id"], stream=True, follow=follow, tail=tail):
                whole.feed(chunk)
                if count > tail and not follow:
                    return
        whole.end()
    except VlaunchError as error:
        whole.end()
        lines.put((node.name, f"[{error.message}]"))


def _servers(
    session: Session,
    nodes: Sequence[Node],
    server: str | None,
    lines: Merged,
    follow: bool,
    tail: int,
) -> None:
    """Put the lines of all servers' engines; a node that has no container says nothing."""
    said: Counter[str] = Counter()
    try:
        for item in session.fleet.stream(
            [_asked(session.inventory, node, server, follow, tail) for node in nodes]
        ):
            if isinstance(item, Answer) or item.error:
                continue
            name, _, text = item.text.partition(" ")
            if not _NAME.fullmatch(name):
                continue  # not a line of ours
            where = f"{item.node}/{name}"
            said[where] += 1
            if follow or said[where] <= tail:  # whatever comes beyond was not asked for
                lines.put((where, text))
    finally:
        lines.put(None)


def _asked(
    inventory: Inventory, node: Node, server: str | None, follow: bool, tail: int
) -> Command:
    from launcher.site import Site

    words = (server or "", str(tail), "-F" if follow else "-q")
    program = ("sh", "-c", shell.program("server_logs"), "servers", *words)
    # Nobody ends what runs in a container, so it must end itself: with us (its input closes), at
    # the latest after a minute.
    bounded = docker.bounded(program, 0 if follow else _LIMIT)
    argv = docker.exec_(node.docker, Site(inventory).container_name(node), *bounded, stdin=True)
    return Command(
        node=node.name, argv=argv, timeout=math.inf if follow else _LIMIT + 10, hold_stdin=True
    )
