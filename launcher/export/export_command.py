"""`vlaunch export`: the inventory for other programs."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher.app import options, session
from launcher.app.command import CommandContext, command
from launcher.app.progress import make_printer
from launcher.app.selection import select_model, select_nodes
from launcher.app.terminal import say
from launcher.batch import batch_flags
from launcher.core.domain import Inventory, ServeDefaults
from launcher.core.errors import RequestError, VlaunchError
from launcher.export import firewall as packet_filter
from launcher.export import pod_options
from launcher.export.group import build_group
from launcher.export.target import ExportTarget, Kind, object_name
from launcher.serving.serve_request import merge_vllm_args
from launcher.serving.start_spec import StartSpec, supervision_policy
from launcher.tools.host.node_probes import probe_nodes


@click.group()
def export() -> None:
    """Generate files for other programs; only `firewall --scan` contacts nodes."""


@command(
    "firewall",
    under=export,
    shows="none",
    short_help="Print firewall rules for the nodes",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["nft", "iptables", "ufw"]),
    default="nft",
    show_default=True,
    help="Output syntax.",
)
@click.option(
    "--scan",
    is_flag=True,
    help="Query the nodes for their ephemeral ports, and close these too.",
)
def firewall(call: CommandContext, form: str, scan: bool) -> None:
    """Print firewall rules for the nodes: open between them, closed to others except for SSH and
    the endpoint.

    The rules are the same for every node. Review them, then load them on each node as root.
    """
    from launcher.ssh import openssh

    inventory = call.inventory
    logins = [openssh.resolve(node).port for node in inventory.nodes if node.connection == "ssh"]
    ranges = []
    if scan:
        with call.session() as session:
            facts = probe_nodes(inventory, session.transport, [], survey=True, clock=time.time)
        surveys = (node.survey for node in facts.values())
        ranges = [survey.port_range for survey in surveys if survey and survey.port_range]
    rules = packet_filter.build_filter(inventory, logins, ranges)
    click.echo(packet_filter.FORMATS[form](rules), nl=False)


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder; raise VlaunchError."""
    try:
        for name, data in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise VlaunchError(
            f"{folder}: {error.strerror}", hint="use a writable folder: `-o DIR`"
        ) from None
    click.echo(f"wrote {', '.join(files)} to {folder}", err=True)


@export.command(
    "prometheus",
    short_help="Print the scrape configuration; write alerts and dashboards",
    params=[options.INVENTORY],
)
@click.option(
    "--api",
    "apis",
    multiple=True,
    metavar="NODE[:PORT]",
    help="Endpoint of vLLM as `vlaunch status` shows it; repeatable (default: the head,"
    " at the inventory's port).",
)
@click.option(
    "--node-exporter",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Scrape node_exporter on every node at this port too, such as 9100.",
)
@click.option(
    "--dcgm-exporter",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Scrape NVIDIA's dcgm-exporter on every node at this port too, such as 9400.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    help="Write all files to this folder (default: print the scrape configuration).",
)
def prometheus(
    named: str | None,
    apis: tuple[str, ...],
    node_exporter: int | None,
    dcgm_exporter: int | None,
    folder: str | None,
) -> None:
    """Print the scrape configuration for Prometheus; with -o, write it with alerts, their tests and
    dashboards.

    The targets are vLLM, Ray on every node, and the agent on the head.
    """
    from launcher.export import prometheus as monitoring

    inventory = session.load_inventory(None, named)
    files = monitoring.build_files(
        inventory,
        [_parse_api(inventory, api) for api in apis],
        node_exporter=node_exporter,
        dcgm_exporter=dcgm_exporter,
    )
    if folder is None:
        click.echo(files[monitoring.SCRAPE], nl=False)
        return
    write_files(folder, {name: text.encode() for name, text in files.items()})
    say(f"check them: `promtool check config {folder}/{monitoring.SCRAPE}`")


@export.command(params=[options.INVENTORY], short_help="Print a server as Kubernetes manifests")
@options.inventory_option(ServeDefaults, "model", default="the inventory's", metavar="MODEL")
@options.inventory_option(ServeDefaults, "tp")
@options.inventory_option(ServeDefaults, "pp")
@options.inventory_option(ServeDefaults, "dp", *options.DP_FLAGS)
@options.START_TIMEOUT
@click.option(
    "--kind",
    type=click.Choice(["lws", "kuberay"]),
    default="lws",
    show_default=True,
    help="Controller of the pods: LeaderWorkerSet for vLLM's own ranks (mp), KubeRay for Ray.",
)
@click.option("--name", metavar="NAME", help="Name of the objects (default: the cluster's).")
@pod_options.flags
@click.option("--skip-network-check", is_flag=True, help="Start vLLM without a network check.")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="Write a folder for kustomize, with the network check as a file of its own.",
)
@options.ENGINE_ARGS
def kubernetes(
    named: str | None,
    model: str | None,
    timeout: float | None,
    kind: Kind,
    name: str | None,
    skip_network_check: bool,
    output: str | None,
    args: tuple[str, ...],
    **parallelism: Any,
) -> None:
    """Print a server as manifests for Kubernetes: a group of pods that check the network and then
    run the ranks, a Service and a NetworkPolicy.

    No node is contacted. The first comments name what the cluster must have, the commands that
    check, apply and test it, and what is not carried over. Everything after `--` goes to `vllm
    serve`.
    """
    from launcher.export import kubernetes as renderer

    pods = pod_options.pop_values(parallelism)
    inventory, image = session.load_inventory(None, named), pods.pop("image")
    inventory = replace(inventory, image=image or inventory.image)
    spec = StartSpec(
        name="default",
        model=select_model(model, inventory),
        backend="ray" if kind == "kuberay" else "mp",
        host=inventory.serve.bind or "",
        port=inventory.ports.api,
        args=merge_vllm_args(inventory, args),
        policy=supervision_policy(inventory, timeout),
        **parallelism,
    )
    target = ExportTarget(
        name=object_name(name or inventory.cluster), kind=kind, gate=not skip_network_check, **pods
    )
    manifests = renderer.server_manifests(
        build_group(inventory, spec.build_request(inventory, None), spec.policy, target)
    )
    if output is None:
        click.echo(manifests.text, nl=False)
    else:
        write_files(output, manifests.folder())


@export.command(params=[options.INVENTORY], short_help="Print a batch job as Kubernetes manifests")
@batch_flags.job_options
@pod_options.flags
def batch(named: str | None, **values: Any) -> None:
    """Print a batch job as manifests for Kubernetes: a RayJob of KubeRay with the job's files.

    JOB.yaml and the options of the job are those of `vlaunch batch`. No node is contacted.
    """
    from launcher.batch.batch_command import build_request
    from launcher.export import kuberay_batch

    pods = pod_options.pop_values(values)
    inventory, image = session.load_inventory(None, named), pods.pop("image")
    inventory = replace(inventory, image=image or inventory.image)
    with make_printer() as printer:
        request = build_request(inventory, values, printer)
    target = ExportTarget(name=object_name(request.job.name), kind="kuberay", **pods)
    group = kuberay_batch.build_job_group(inventory, request, target)
    click.echo(kuberay_batch.job_manifests(group, request).text, nl=False)


def _parse_api(inventory: Inventory, text: str) -> tuple[str, int]:
    """Parse NODE[:PORT]; raise RequestError for an unknown node, or an invalid port."""
    name, colon, number = text.partition(":")
    (node,) = select_nodes(inventory, [name])
    if not colon:
        return node.name, inventory.ports.api
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise RequestError(f"`--api {text}`: `{number}` is not a port", hint="write NODE:PORT")
    return node.name, int(number)
