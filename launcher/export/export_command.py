"""`vlaunch export`: what the inventory means, written down for other programs."""

from __future__ import annotations

import time

import click

from launcher.app.command import Call, command
from launcher.export import firewall as made
from launcher.export.kubernetes_command import kubernetes
from launcher.export.prometheus_command import prometheus
from launcher.tools.observe import observe


@click.group()
def export() -> None:
    """Write down what the inventory means for other programs; no node is reached, but by `firewall
    --scan`.
    """


export.add_command(kubernetes)
export.add_command(prometheus)


@command(
    "firewall",
    under=export,
    path=True,
    shows="none",
    short_help="the packet filter for the nodes",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["nft", "iptables", "ufw"]),
    default="nft",
    show_default=True,
    help="Whose language.",
)
@click.option(
    "--scan",
    is_flag=True,
    help="Ask the nodes which ports their kernels hand out, and close those, too.",
)
def firewall(call: Call, form: str, scan: bool) -> None:
    """Print the packet filter for the nodes: open between them, closed to others but for SSH and
    the endpoint.

    The text is the same for every node, and the same each time. Read it, then load it on each node
    as root.
    """
    from launcher.ssh import openssh

    wanted = call.inventory
    logins = [openssh.resolve(node).port for node in wanted.nodes if node.connection == "ssh"]
    ranges = []
    if scan:
        with call.session() as session:
            facts = observe(wanted, session.transport, [], survey=True, clock=time.time)
        surveys = (node.survey for node in facts.values())
        ranges = [survey.port_range for survey in surveys if survey and survey.port_range]
    click.echo(made.FORMATS[form](made.rules(wanted, logins, ranges)), nl=False)
