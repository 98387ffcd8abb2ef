"""`vlaunch tunnel`: the API (or Ray's dashboard) on this machine, through the SSH connection that is there anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli import options

if TYPE_CHECKING:
    from launcher.cli.session import Session


@click.command()
@options.reaching
@click.option("--local-port", type=click.IntRange(0, 65535), help="Port on this machine (default: the same; 0: any free one).")
@click.option("--dashboard", is_flag=True, help="Ray's dashboard instead of the API.")
def tunnel(inventory: str | None, accept_new_host_keys: bool, verbose: bool, local_port: int | None, dashboard: bool) -> None:
    """Make the API of the server that runs (or is to run) on the head reachable on this machine until Ctrl-C."""
    from launcher.cli import session
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    with (
        printer(quiet=True) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose, nodes=(wanted.head,)) as reached,
    ):
        # The dashboard listens on loopback only; so may the API.
        target, port = ("127.0.0.1", wanted.ports.dashboard) if dashboard else _api(reached)
        local = port if local_port is None else local_port
        with reached.fleet.forward(wanted.head.name, target, port, local) as forward:
            click.echo(f"http://127.0.0.1:{forward.port}")
            click.echo(f"forwarding to {target}:{port} on {wanted.head.name}; Ctrl-C ends it", err=True)
            forward.wait()


def _api(session: Session) -> tuple[str, int]:
    """Return where the running server listens, as the head sees it; where none is known of, what the inventory says."""
    from launcher.cli.server import look
    from launcher.plan import running
    from launcher.tools.payload import api_host

    inventory = session.inventory
    seen = look(session, head_only=True)
    found = running.find(inventory, seen.facts, seen.said)
    host, port = (found[0].host, found[0].port) if found else (inventory.serve.bind, inventory.ports.api)
    return api_host(host), port
