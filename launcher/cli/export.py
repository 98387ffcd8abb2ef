"""`vlaunch export`: what the inventory means, written down for other programs."""

from __future__ import annotations

import time

import click

from launcher.cli import options
from launcher.cli.command import Call, command
from launcher.cli.export_compose import compose
from launcher.cli.export_kubernetes import kubernetes
from launcher.cli.export_prometheus import prometheus
from launcher.cli.export_systemd import systemd
from launcher.export import firewall as made


@click.group()
def export() -> None:
    """Write down what the inventory means for other programs; no node is reached, but by `firewall
    --scan`.
    """


export.add_command(compose)
export.add_command(kubernetes)
export.add_command(prometheus)
export.add_command(systemd)


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
    from launcher.remote import ssh_config
    from launcher.state.observe import observe

    wanted, config = call.inventory, ssh_config.load()
    logins = [ssh_config.port_of(config, node) for node in wanted.nodes if node.connection == "ssh"]
    ranges = []
    if scan:
        with call.session() as session:
            facts = observe(wanted, session.transport, [], survey=True, clock=time.time)
        surveys = (node.survey for node in facts.values())
        ranges = [survey.port_range for survey in surveys if survey and survey.port_range]
    click.echo(made.FORMATS[form](made.rules(wanted, logins, ranges)), nl=False)


@export.command(
    "run-cluster",
    short_help="the line of scripts/run_cluster.sh for each node",
    params=[options.PATH, options.INVENTORY],
)
@click.option("--model", metavar="MODEL", help="What to serve (default: the inventory's).")
def run_cluster(path: str | None, named: str | None, model: str | None) -> None:
    """Print what to type where no launcher can log in: a line of scripts/run_cluster.sh for each
    node, and the command that serves.

    What the script cannot do is refused, and what the lines do not carry over is said in them.
    """
    from launcher import placement
    from launcher.cli import session
    from launcher.cli.choose import chosen_model
    from launcher.export import run_cluster as lines
    from launcher.plan.request import Request

    wanted = session.read(path, named)
    serve = wanted.serve
    request = Request(
        model=chosen_model(model, wanted),
        placement=placement.choose(wanted, serve.tp, serve.pp, None, dp=serve.dp),
        backend="ray",
        host=serve.bind,
        port=wanted.ports.api,
        args=serve.args,
    )
    click.echo(lines.text(wanted, request.argv), nl=False)
