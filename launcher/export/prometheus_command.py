"""`vlaunch export prometheus`: what watches a cluster, and rules for it."""

from __future__ import annotations

import click

from launcher.app import options, session
from launcher.app.choose import chosen
from launcher.app.terminal import say
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.export.files import write


@click.command(
    "prometheus",
    short_help="scrape configuration, alerts and Grafana dashboards",
    params=[options.PATH, options.INVENTORY],
)
@click.option(
    "--api",
    "apis",
    multiple=True,
    metavar="NODE[:PORT]",
    help="Where vLLM answers, as `vlaunch status` shows it; may be repeated (default: the head, at"
    " the inventory's port).",
)
@click.option(
    "--node-exporter",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Scrape node_exporter on every node, too (its own port is 9100).",
)
@click.option(
    "--dcgm-exporter",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Scrape NVIDIA's dcgm-exporter on every node, too (its own port is 9400).",
)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    help="Write all files there; else only the scrape configuration is printed.",
)
def prometheus(
    path: str | None,
    named: str | None,
    apis: tuple[str, ...],
    node_exporter: int | None,
    dcgm_exporter: int | None,
    folder: str | None,
) -> None:
    """Print the scrape configuration for Prometheus; with -o, write it with alerts, their tests and
    dashboards.

    What is scraped is vLLM, Ray on every node, and the agent on the head.
    """
    from launcher.export import prometheus as monitoring

    wanted = session.read(path, named)
    found = monitoring.files(
        wanted,
        [_api(wanted, each) for each in apis],
        node_exporter=node_exporter,
        dcgm_exporter=dcgm_exporter,
    )
    if folder is None:
        click.echo(found[monitoring.SCRAPE], nl=False)
        return
    write(folder, {name: text.encode() for name, text in found.items()})
    say(f"check them: `promtool check config {folder}/{monitoring.SCRAPE}`")


def _api(inventory: Inventory, said: str) -> tuple[str, int]:
    """Read NODE[:PORT]; raises RequestError where that is no node, or no port."""
    name, colon, number = said.partition(":")
    (node,) = chosen(inventory, [name])
    if not colon:
        return node.name, inventory.ports.api
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise RequestError(f"`--api {said}`: `{number}` is no port", hint="write NODE:PORT")
    return node.name, int(number)
