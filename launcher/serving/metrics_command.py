"""`vlaunch metrics`: what servers do, in figures, for those who have no Prometheus."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice

import click

from launcher.app import choose, options
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, show, show_live
from launcher.core.errors import NodeError
from launcher.serving.metrics import Counting, Look
from launcher.tools import servers
from launcher.tools.ray_judges import try_payload
from launcher.tools.servers import Kept


@command(path=True, shows="none", flags=[options.JSON])
@options.SERVER
@click.option(
    "--every",
    type=click.FloatRange(0.5, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--watch/--once",
    default=None,
    help="Look again until Ctrl-C, or only as long as rates need: two looks. (default: --watch in a"
    " terminal, --once in a pipe)",
)
def metrics(call: Call, server: str | None, every: float, watch: bool | None) -> None:
    """Show what servers do: requests, tokens per second, latencies, KV cache, and how each rank is.

    vLLM counts it, and the head's keeper says how ranks are; nothing is changed. Latencies are of
    the last minute, or, where no request came, since the engine started.
    """
    from launcher.serving.metrics_view import render

    with call.session(nodes=[call.inventory.head]) as session:
        looks = _looks(session, server, every)
        if watch is None:
            watch = sys.stdout.isatty()
        if watch and not call.as_json:
            show_live(
                render(look, when=f"{datetime.now():%H:%M:%S}, every {every:g} s") for look in looks
            )
        for look in looks if watch else islice(looks, 1, 2):
            if look.trouble and not watch:
                raise NodeError(
                    session.inventory.head.name,
                    "does not say what its servers do",
                    evidence=look.trouble,
                    hint="run `vlaunch up`, which brings what it is asked with up to date",
                )
            if call.as_json:
                click.echo(dump_json(look.as_json()))
            else:
                show(render(look))


def _looks(
    session: Session,
    only: str | None,
    every: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Look]:
    """Look again and again, so many seconds apart.

    Raises at the first look, when nothing was seen yet:
        NodeError: the head cannot say which servers there are.
        RequestError: none runs, or none of that name.
    """
    kept = choose.kept(session)
    if only is not None or not kept.running:
        servers.choose(kept.running, only)  # raises
    counting, began = Counting(session.site), time.monotonic()
    while True:
        look, kept = _look(session, counting, kept, only)
        yield look
        began = max(began + every, time.monotonic() - every)
        sleep(max(0.0, began - time.monotonic()))


def _look(session: Session, counting: Counting, kept: Kept, only: str | None) -> tuple[Look, Kept]:
    """Query the servers of the last look once more."""
    from dataclasses import replace

    from launcher.serving import metrics

    queries = metrics.ask(session.site, kept.running)
    missing = session.fleet.connect([query.node for query in queries])
    queries = [query for query in queries if query.node not in missing]
    reports = {node: {"error": error.message} for node, error in missing.items()}
    reports |= {answer.node: try_payload(answer) for answer in session.transport.run(queries)}
    of_head = reports.get(session.inventory.head.name, {})
    if "servers" in of_head:
        kept = servers.read(of_head)
        return counting.read(kept, reports, only, time.monotonic()), kept
    look = counting.read(kept, {}, only, time.monotonic())
    return replace(look, trouble=str(of_head.get("error") or "the head says nothing")), kept
