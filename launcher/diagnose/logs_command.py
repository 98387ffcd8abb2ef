"""`vlaunch logs`: what the containers and the servers of all nodes say, each line with where it
comes from.
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from launcher.agent import state
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.core import shell, untrusted
from launcher.core.domain import Answer, Node, fold
from launcher.core.errors import DeadlineError, RequestError, VlaunchError
from launcher.core.transport import Command
from launcher.ssh.output import Lines
from launcher.tools import docker, symptoms
from launcher.tools.docker import CLUSTER
from launcher.tools.site import Site

if TYPE_CHECKING:
    from docker import APIClient


Line = tuple[str, str]  # where it comes from, and its text

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
) -> Iterator[Line]:
    """Yield the lines of all logs as they come: of containers through the Docker API, of servers
    from inside them. Each source has a thread, for a followed one does not end.
    """
    lines: queue.Queue[Line | None] = queue.Queue(maxsize=1000)
    sources: list[Iterable[Line]] = [_servers(session, nodes, server, follow, tail)]
    if server is None:
        with ThreadPoolExecutor(session.inventory.cap) as pool:
            for found in pool.map(lambda node: _containers(session, node, follow, tail), nodes):
                sources += found

    def feed(source: Iterable[Line]) -> None:
        try:
            for line in source:
                lines.put(line)
        finally:
            lines.put(None)

    for source in sources:
        threading.Thread(target=feed, args=(source,), daemon=True).start()
    left = len(sources)
    while left:
        try:
            item = lines.get(timeout=None if follow else _LIMIT + 20)
        except queue.Empty:
            raise DeadlineError(
                f"{fold([node.name for node in nodes])}: the logs did not end in time",
                hint="read one node after the other: `vlaunch logs NODE`",
            ) from None
        if item is None:
            left -= 1
        else:
            yield item


def _containers(session: Session, node: Node, follow: bool, tail: int) -> list[Iterable[Line]]:
    """Return the logs of a node's containers."""
    from launcher.ssh import docker_api

    label = f"{CLUSTER}={session.inventory.cluster}"
    try:
        client = session.fleet.docker(node.name)
        with docker_api.errors(node.name, symptoms.docker_error):
            found = list(client.containers(all=True, filters={"label": label}))[:_MOST]
    except VlaunchError as error:
        return [[(node.name, f"[{error.reason}]")]]
    return [_container(client, node, container["Id"], follow, tail) for container in found]


def _container(
    client: APIClient, node: Node, container: str, follow: bool, tail: int
) -> Iterator[Line]:
    from launcher.ssh import docker_api

    texts: list[str] = []
    whole, count = Lines(texts.append), 0
    try:
        with docker_api.errors(node.name, symptoms.docker_error):
            for chunk in client.logs(container, stream=True, follow=follow, tail=tail):
                whole.feed(chunk)
                for text in texts:
                    count += 1
                    if count > tail and not follow:
                        return
                    yield node.name, text
                texts.clear()
        whole.end()
    except VlaunchError as error:
        whole.end()
        texts.append(f"[{error.reason}]")
    yield from ((node.name, text) for text in texts)


def _servers(
    session: Session, nodes: Sequence[Node], server: str | None, follow: bool, tail: int
) -> Iterator[Line]:
    """Yield the lines of all servers' engines; none of a node that has no container."""
    words = (server or "", str(tail), "-F" if follow else "-q")
    program = ("sh", "-c", shell.program("server_logs"), "servers", *words)
    # A program in a container must end itself: with us (its input closes), at the latest after a
    # minute.
    bounded = docker.bounded(program, 0 if follow else _LIMIT)
    site, timeout = Site(session.inventory), math.inf if follow else _LIMIT + 10
    commands = [
        Command(
            node=node.name,
            argv=docker.exec_(node.docker, site.container_name(node), *bounded, stdin=True),
            timeout=timeout,
            hold_stdin=True,
        )
        for node in nodes
    ]
    counts: Counter[str] = Counter()
    for item in session.fleet.stream(commands):
        if isinstance(item, Answer) or item.error:
            continue
        name, _, text = item.text.partition(" ")
        if not _NAME.fullmatch(name):
            continue  # not a line of ours
        where = f"{item.node}/{name}"
        counts[where] += 1
        if follow or counts[where] <= tail:
            yield where, text
