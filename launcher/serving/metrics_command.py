"""`vlaunch metrics`: load, latencies and KV cache of servers, without Prometheus."""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice

import click

from launcher.app import options, selection
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, show, show_live
from launcher.core.errors import NodeError
from launcher.serving.metrics import MetricsCollector, MetricsSample
from launcher.tools.site import servers
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.servers import ServersState


@command(shows="none", flags=[options.JSON])
@options.SERVER
@click.option(
    "--every",
    type=options.Duration("0.5s", "1h"),
    default="2s",
    show_default=True,
    help="Time between two samples.",
)
@click.option(
    "--watch/--once",
    default=None,
    help="Refresh until Ctrl-C, or print one result (default: --watch on a terminal, else --once).",
)
def metrics(call: CommandContext, server: str | None, every: float, watch: bool | None) -> None:
    """Show throughput, latency and KV cache use of servers, and the health of each rank.

    The figures are vLLM's; the health of ranks comes from the supervisor on the head. Latencies
    cover the last minute, or, without requests in it, the time since the engine started.
    """
    from launcher.serving.metrics_view import render_metrics

    with call.session(nodes=[call.inventory.head]) as session:
        samples = _poll_metrics(session, server, every)
        if watch is None:
            watch = sys.stdout.isatty()
        if watch and not call.as_json:
            show_live(
                render_metrics(sample, when=f"{datetime.now():%H:%M:%S}, every {every:g} s")
                for sample in samples
            )
        for sample in samples if watch else islice(samples, 1, 2):
            if sample.trouble and not watch:
                raise NodeError(
                    session.inventory.head.name,
                    "cannot read the metrics of its servers",
                    evidence=sample.trouble,
                    hint="run `vlaunch up`: the node programs may be outdated",
                )
            if call.as_json:
                click.echo(dump_json(sample.as_json()))
            else:
                show(render_metrics(sample))


def _poll_metrics(
    session: Session,
    server_name: str | None,
    every: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[MetricsSample]:
    """Yield a sample every `every` seconds.

    Raises before the first sample:
        NodeError: the head cannot list its servers.
        RequestError: no server runs, or none of that name.
    """
    state = selection.query_servers(session)
    if server_name is not None or not state.running:
        servers.choose_server(state.running, server_name)  # raises
    collector, next_at = MetricsCollector(session.site), time.monotonic()
    while True:
        sample, state = _take_sample(session, collector, state, server_name)
        yield sample
        next_at = max(next_at + every, time.monotonic() - every)
        sleep(max(0.0, next_at - time.monotonic()))


def _take_sample(
    session: Session, collector: MetricsCollector, state: ServersState, server_name: str | None
) -> tuple[MetricsSample, ServersState]:
    """Query the servers of the previous sample again."""
    from dataclasses import replace

    from launcher.serving import metrics

    queries = metrics.query_metrics(session.site, state.running)
    missing = session.fleet.connect([query.node for query in queries])
    queries = [query for query in queries if query.node not in missing]
    reports = {node: {"error": error.message} for node, error in missing.items()}
    reports |= {answer.node: try_payload(answer) for answer in session.transport.run(queries)}
    head_report = reports.get(session.inventory.head.name, {})
    if "servers" in head_report:
        state = servers.parse_servers(head_report)
        return collector.build_sample(state, reports, server_name, time.monotonic()), state
    sample = collector.build_sample(state, {}, server_name, time.monotonic())
    return replace(sample, trouble=str(head_report.get("error") or "no answer from it")), state
