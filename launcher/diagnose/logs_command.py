"""`vlaunch logs`: lines of the containers and servers of all nodes, with their origins."""

from __future__ import annotations

import itertools
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
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.app.terminal import dump_json
from launcher.core import shell, untrusted
from launcher.core.domain import Answer, Node, fold
from launcher.core.errors import DeadlineError, RequestError, VlaunchError
from launcher.core.transport import Command
from launcher.failures.explain import docker_error
from launcher.ssh.output import Lines
from launcher.tools import docker
from launcher.tools.docker import CLUSTER
from launcher.tools.site import Site

if TYPE_CHECKING:
    from docker import APIClient


SourcedLine = tuple[str, str]  # origin and text

# A server, or a batch job with an engine's process ID.
_NAME = re.compile(rf"{state.NAME.pattern}|batch:[a-z0-9._-]{{1,40}}(?::\d{{1,10}})?")
_MAX_CONTAINERS = 50  # containers per node and cluster
_READ_TIMEOUT = 60.0  # seconds to read servers' logs, unless they are followed


@command(shows="none", flags=[options.JSON])
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until Ctrl-C.")
@click.option(
    "--tail",
    type=options.Tail(0),
    default=100,
    show_default=True,
    metavar="N|all",
    help="Number of lines to show from the end of each log.",
)
@click.option("--server", metavar="NAME", help="Show only this server's engine log.")
@click.argument("names", metavar="[NODE]...", nargs=-1)
def logs(
    call: CommandContext, follow: bool, tail: int, server: str | None, names: tuple[str, ...]
) -> None:
    """Print the logs of containers, servers and jobs on all nodes, each line with its source."""
    nodes = select_nodes(call.inventory, names)
    with call.session(nodes=nodes) as session:
        printed = False
        for origin, line in _merge_logs(session, nodes, server, follow=follow, tail=tail):
            printed = True
            node, _, log = origin.partition("/")
            text = untrusted.sanitize(line)
            fields = {"node": node, "log": log or None, "text": text}
            click.echo(dump_json(fields) if call.as_json else f"{origin}: {text}")
        if not printed and not follow:
            if server is not None:
                raise RequestError(
                    f"server `{server}` has no log", hint="list the servers: `vlaunch status`"
                )
            raise RequestError(
                f"the containers of cluster {call.inventory.cluster} have no log output",
                hint="run `vlaunch up`",
            )


def _merge_logs(
    session: Session, nodes: Sequence[Node], server: str | None, *, follow: bool, tail: int
) -> Iterator[SourcedLine]:
    """Yield the lines of all logs as they arrive: of containers through the Docker API, of servers
    from inside the containers. Each source has a thread, because followed ones do not end.
    """
    lines: queue.Queue[SourcedLine | None] = queue.Queue(maxsize=1000)
    sources: list[Iterable[SourcedLine]] = [_server_lines(session, nodes, server, follow, tail)]
    if server is None:
        with ThreadPoolExecutor(session.inventory.cap) as pool:
            streams = pool.map(lambda node: _container_logs(session, node, follow, tail), nodes)
            sources += itertools.chain.from_iterable(streams)

    def feed(source: Iterable[SourcedLine]) -> None:
        try:
            for line in source:
                lines.put(line)
        finally:
            lines.put(None)

    for source in sources:
        threading.Thread(target=feed, args=(source,), daemon=True).start()
    open_sources = len(sources)
    while open_sources:
        try:
            item = lines.get(timeout=None if follow else _READ_TIMEOUT + 20)
        except queue.Empty:
            raise DeadlineError(
                f"{fold([node.name for node in nodes])}: reading the logs timed out",
                hint="read one node at a time: `vlaunch logs NODE`",
            ) from None
        if item is None:
            open_sources -= 1
        else:
            yield item


def _container_logs(
    session: Session, node: Node, follow: bool, tail: int
) -> list[Iterable[SourcedLine]]:
    """Return the logs of a node's containers."""
    from launcher.ssh import docker_api

    label = f"{CLUSTER}={session.inventory.cluster}"
    try:
        client = session.fleet.docker(node.name)
        with docker_api.errors(node.name, docker_error):
            containers = list(client.containers(all=True, filters={"label": label}))
    except VlaunchError as error:
        return [[(node.name, f"[{error.reason}]")]]
    ids = [container["Id"] for container in containers[:_MAX_CONTAINERS]]
    return [_container_lines(client, node, id_, follow, tail) for id_ in ids]


def _container_lines(
    client: APIClient, node: Node, container: str, follow: bool, tail: int
) -> Iterator[SourcedLine]:
    from launcher.ssh import docker_api

    complete_lines: list[str] = []
    splitter, count = Lines(complete_lines.append), 0
    try:
        with docker_api.errors(node.name, docker_error):
            for chunk in client.logs(container, stream=True, follow=follow, tail=tail):
                splitter.feed(chunk)
                for text in complete_lines:
                    count += 1
                    if count > tail and not follow:
                        return
                    yield node.name, text
                complete_lines.clear()
        splitter.end()
    except VlaunchError as error:
        splitter.end()
        complete_lines.append(f"[{error.reason}]")
    yield from ((node.name, text) for text in complete_lines)


def _server_lines(
    session: Session, nodes: Sequence[Node], server: str | None, follow: bool, tail: int
) -> Iterator[SourcedLine]:
    """Yield the lines of all servers' engines; none for a node without a container."""
    arguments = (server or "", str(tail), "-F" if follow else "-q")
    program = ("sh", "-c", shell.program_text("server_logs"), "servers", *arguments)
    # A program in a container must stop by itself: when its input closes, or after _READ_TIMEOUT.
    bounded = docker.with_deadline(program, 0 if follow else _READ_TIMEOUT)
    site, timeout = Site(session.inventory), math.inf if follow else _READ_TIMEOUT + 10
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
            continue  # not a line of the program
        origin = f"{item.node}/{name}"
        counts[origin] += 1
        if follow or counts[origin] <= tail:
            yield origin, text
