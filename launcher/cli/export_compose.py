"""`vlaunch export compose`: a server as a file for docker compose for each node."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli import export_server, options


@click.command(
    params=[options.INVENTORY], short_help="a server as a file for docker compose a node"
)
@export_server.flags
@export_server.host_flags
def compose(
    named: str | None, node: str | None, skip_network_check: bool, output: str | None, **server: Any
) -> None:
    """Print a server as files for docker compose, one for each node: the network proof, then the
    containers that `vlaunch up` starts, whose agents keep the server that `vlaunch serve` asks for.

    No node is reached. The first comments of each file say what its node must have, how it is
    started and proven, and what is not carried over. Everything after `--` goes to `vllm serve`.
    """
    from launcher.export import compose as made
    from launcher.export import hosts

    read = export_server.read(named, "mp", server)
    cluster = hosts.cluster(read.inventory, read.request, read.policy, gate=not skip_network_check)
    export_server.show(made.texts(cluster), made.ENDING, node, output)
