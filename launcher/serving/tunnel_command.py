"""`vlaunch tunnel`: the API (or Ray's dashboard) on this machine, through the existing SSH
connection.
"""

from __future__ import annotations

import click

from launcher.app import options, selection
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core.domain import Node
from launcher.core.errors import NodeError
from launcher.tools.servers import ServersState


@command(shows="none")
@click.option(
    "--local-port",
    type=click.IntRange(0, 65535),
    help="Port on this machine (default: the same; 0: any free port).",
)
@click.option("--dashboard", is_flag=True, help="Forward Ray's dashboard instead of the API.")
@options.SERVER
def tunnel(
    call: CommandContext, local_port: int | None, dashboard: bool, server: str | None
) -> None:
    """Forward the API of a running or starting server to this machine until Ctrl-C."""
    inventory = call.inventory
    if dashboard and server is not None:
        raise click.UsageError("--dashboard cannot be combined with --server")
    if dashboard and inventory.ray.off:
        raise click.UsageError("this cluster has no Ray, so there is no dashboard")
    with call.session(nodes=[inventory.head]) as session:
        # The dashboard listens on loopback only; so may the API.
        node, target, port = (
            (inventory.head, "127.0.0.1", inventory.ports.dashboard)
            if dashboard
            else _api_address(session, server)
        )
        local = port if local_port is None else local_port
        with session.fleet.forward(node.name, target, port, local) as forward:
            click.echo(f"http://127.0.0.1:{forward.port}")
            say(f"forwarding to {target}:{port} on {node.name}; stop with Ctrl-C")
            forward.wait()


def _api_address(session: Session, server: str | None) -> tuple[Node, str, int]:
    """Return node, address and port of a server's API, else the inventory's."""
    inventory = session.inventory
    try:
        head_state = selection.query_servers(session)
    except NodeError:
        if server is not None:
            raise
        head_state = ServersState()
    if server is None and not head_state.running:
        bind = inventory.serve.bind
        host = "127.0.0.1" if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared
        return inventory.head, host, inventory.ports.api
    spec, node = selection.select_server(session, head_state, server)
    return node, spec.api_host, spec.port
