"""`vlaunch export systemd`: a server as a unit for each node."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli import export_server, options


@click.command(params=[options.INVENTORY], short_help="a server as a unit of systemd for each node")
@export_server.flags
@export_server.host_flags
def systemd(
    named: str | None, node: str | None, skip_network_check: bool, output: str | None, **server: Any
) -> None:
    """Print a server as units of systemd, one for each node: the containers that `vlaunch up`
    starts, whose agents keep the server that `vlaunch serve` asks for. Started is answered.

    No node is reached. The first comments of each file say what its node must have, how it is
    started and proven, and what is not carried over. Everything after `--` goes to `vllm serve`.
    """
    from launcher.export import hosts
    from launcher.export import systemd as made

    read = export_server.read(named, "mp", server)
    cluster = hosts.cluster(read.inventory, read.request, read.policy, gate=not skip_network_check)
    export_server.show(made.texts(made.prepared(cluster)), made.ENDING, node, output)
