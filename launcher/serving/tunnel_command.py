"""`vlaunch tunnel`: the front, a server's API or Ray's dashboard on this machine, through the
existing SSH connection.
"""

import click

from launcher.agent.state import group_of
from launcher.app import options, selection
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core.domain import Node
from launcher.core.errors import NodeError
from launcher.tools.site.servers import ServersState


@command(shows="none")
@click.option(
    "--local-port",
    type=click.IntRange(0, 65535),
    help="Port on this machine (default: the same; 0: any free port).",
)
@click.option("--dashboard", is_flag=True, help="Forward Ray's dashboard instead of the API.")
@click.option("--direct", is_flag=True, help="Forward the server's own API, not the front.")
@options.SERVER
def tunnel(
    call: CommandContext,
    local_port: int | None,
    dashboard: bool,
    direct: bool,
    server: str | None,
) -> None:
    """Forward the API of a running or starting server to this machine until Ctrl-C.

    With `front:` in the inventory, forward the front, which asks for a user's key.
    """
    inventory = call.inventory
    if dashboard and server is not None:
        raise click.UsageError("--dashboard cannot be combined with --server")
    if dashboard and inventory.ray.off:
        raise click.UsageError("this cluster has no Ray, so there is no dashboard")
    front = None if dashboard or direct else inventory.front
    with call.session(nodes=[inventory.front_nodes[0] if front else inventory.head]) as session:
        # The dashboard listens on loopback only; so may the API.
        node, target, port = (
            (inventory.head, "127.0.0.1", inventory.ports.dashboard)
            if dashboard
            else (inventory.front_nodes[0], _local_address(front.bind), front.port)
            if front
            else _api_address(session, server)
        )
        local = port if local_port is None else local_port
        with session.fleet.forward(node.name, target, port, local) as forward:
            scheme = front.scheme if front else "http"
            path = f"/{group_of(server)}" if front and server else ""
            click.echo(f"{scheme}://127.0.0.1:{forward.port}{path}")
            say(f"forwarding to {target}:{port} on {node.name}; stop with Ctrl-C")
            if front and front.tls.cert:
                say(f"the certificate of the front is not for 127.0.0.1: see {front.tls.cert}")
            forward.wait()


def _local_address(bind: str) -> str:
    """Return the address that reaches a bind address from its own node."""
    return "127.0.0.1" if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared


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
        host = _local_address(inventory.api_bind([inventory.head]))
        return inventory.head, host, inventory.ports.api
    spec, node = selection.select_server(session, head_state, server)
    return node, spec.api_host(node.name), spec.port
