"""`vlaunch soak`: a bounded load on a running server, and a verdict."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import click

from launcher.agent.desired import Desired
from launcher.agent.health.task import task_named
from launcher.app import options, selection
from launcher.app.command import CommandContext, command
from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.app.terminal import dump_json, print_field
from launcher.core import untrusted
from launcher.core.errors import NodeError, RequestError
from launcher.serving import endpoints
from launcher.serving.soak import retransmits
from launcher.serving.soak.load import LoadGenerator, LoadTarget
from launcher.serving.soak.verdict import judge_load, verdict_rows
from launcher.tools.site import servers

_pause = time.sleep


@command(shows="people", flags=[options.JSON])
@click.option(
    "--streams",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Concurrent requests.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=128,
    show_default=True,
    help="Tokens per answer.",
)
@options.SERVER
@click.argument("duration", type=options.Duration("1s", "7d"))
def soak(
    call: CommandContext, duration: float, streams: int, tokens: int, server: str | None
) -> int:
    """Load a running server for DURATION (30m, 2h), then report gaps between tokens, latencies,
    errors, TCP retransmits and restarts.

    Requests are sent from this machine: directly if it reaches the endpoint and no API key is
    needed, else through SSH. Ctrl-C stops the load and prints the report so far. The exit code is 1
    after an error, a restart, or a gap between tokens that the supervisor would report as quiet.
    """
    with call.session(nodes=[call.inventory.head]) as session:
        verdict = _run_soak(session, server, duration, streams, tokens)
    if call.as_json:
        click.echo(dump_json(verdict))
    else:
        for row, text in verdict_rows(verdict):
            print_field(f"{row:<13}{untrusted.sanitize(text)}")
    return 1 if verdict["failures"] else 130 if verdict["interrupted"] else 0


def _run_soak(
    session: Session, name: str | None, seconds: float, streams: int, tokens: int
) -> dict[str, Any]:
    chosen = servers.choose_server(selection.query_servers(session).running, name)
    spec, before = chosen.desired, chosen.observed
    if spec is None or before is None or before.state != "ready":
        raise RequestError(
            f"{chosen.label} is {servers.shown_state(chosen.state)}, not ready",
            hint="see `vlaunch status`",
        )
    task = task_named(chosen.task)
    if task is None or not task.generates:
        raise RequestError(f"{chosen.label} does not generate tokens, which a soak test measures")
    endpoints, model, route = _load_targets(session, spec)
    server_nodes = {*chosen.nodes, *(process.node for process in spec.processes)}
    nodes = [node.name for node in session.site.nodes if node.name in server_nodes]
    missing = session.fleet.connect(nodes)
    queries = retransmits.query_counters([name for name in nodes if name not in missing])
    load = LoadGenerator(endpoints, model, task, tokens, streams)
    counters = retransmits.parse_counters(session.transport.run(queries))
    session.wait("soak", f"{streams} streams at {chosen.label}, {route}", deadline=seconds)
    with contextlib.suppress(KeyboardInterrupt), load:
        _pause(seconds)
    later = retransmits.parse_counters(session.transport.run(queries))
    again = retransmits.compare_counters(counters, later)
    try:
        current = selection.query_servers(session).servers
        after = {server.name: server.observed for server in current}.get(chosen.name)
    except NodeError:
        after = replace(before, verdict="unknown")
    return judge_load(
        load, planned=seconds, route=route, before=before, after=after, retransmits=again
    )


def _load_targets(session: Session, spec: Desired) -> tuple[Sequence[LoadTarget], str, str]:
    """Return the targets of requests, the model's name there, and the route in words.

    Another machine may have the endpoint's address on this network: a direct route counts only if
    it serves the same model as the route through SSH, and it never gets an API key.
    """
    inventory = session.inventory
    sources = {name: source for name, source in inventory.secrets.items() if name == "VLLM_API_KEY"}
    key = "".join(secret.reveal() for secret in resolve(sources, inventory.path.parent).values())
    plain = {"Content-Type": "application/json"}
    headers = {**plain, "Authorization": f"Bearer {key}"} if key else plain
    direct, tunnels = [], []
    apis = endpoints.list_endpoints(inventory, spec)
    if failed := session.fleet.connect([at.node for at in apis]):
        raise next(iter(failed.values()))
    for api in apis:
        forward = session.fleet.forward(api.node, spec.api_host(api.node), spec.port)
        tunnels.append(LoadTarget(host="127.0.0.1", port=forward.port, headers=headers))
        at = urlsplit(api.url)
        direct.append(LoadTarget(host=at.hostname or "", port=at.port or 0, headers=plain))
    try:
        model = tunnels[0].query_model()
    except (OSError, ValueError) as error:
        raise NodeError(spec.api_node, "no answer from its API", evidence=str(error)) from None
    with contextlib.suppress(OSError, ValueError):
        if not key and all(endpoint.query_model() == model for endpoint in direct):
            return direct, model, "directly"
    return tunnels, model, "through SSH"
