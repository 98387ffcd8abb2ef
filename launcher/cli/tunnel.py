"""`vlaunch tunnel`: the API (or Ray's dashboard) on this machine, through the SSH connection that is there anyway."""

from __future__ import annotations

import click

from launcher.cli import options


@click.command()
@options.reaching
@click.option("--local-port", type=click.IntRange(0, 65535), help="Port on this machine (default: the same; 0: any free one).")
@click.option("--dashboard", is_flag=True, help="Ray's dashboard instead of the API.")
def tunnel(inventory: str | None, accept_new_host_keys: bool, verbose: bool, local_port: int | None, dashboard: bool) -> None:
    """Make the head's API reachable on this machine until Ctrl-C."""
    from launcher.cli import session
    from launcher.ui.progress import printer

    wanted = session.read(None, inventory)
    port = wanted.ports.dashboard if dashboard else wanted.ports.api
    # The dashboard listens on loopback only; so may the API (`serve: {bind: 127.0.0.1}`).
    bind = wanted.serve.bind
    target = "127.0.0.1" if dashboard or bind in ("0.0.0.0", "127.0.0.1", "::") else bind  # noqa: S104
    with (
        printer(quiet=True) as to,
        session.reach(wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose) as reached,
        reached.fleet.forward(wanted.head.name, target, port, port if local_port is None else local_port) as forward,
    ):
        click.echo(f"http://127.0.0.1:{forward.port}")
        click.echo(f"forwarding to {target}:{port} on {wanted.head.name}; Ctrl-C ends it", err=True)
        forward.wait()
