"""`vlaunch export kubernetes`: a server as manifests, and rules for them."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli import export_server, options
from launcher.errors import RequestError, VlaunchError


@click.command(params=[options.INVENTORY], short_help="a server as manifests for Kubernetes")
@export_server.flags
@click.option("--name", metavar="NAME", help="Name of the objects (default: the cluster's).")
@click.option(
    "--rdma-resource",
    metavar="NAME[=N]",
    help="The nodes' RDMA devices as their device plugin calls them, such as rdma/ib.",
)
@click.option(
    "--model-volume",
    metavar="WHERE",
    help="Where the model lies: pvc:NAME[:/SUB/PATH] or hostPath:/PATH (default: `hf_home`).",
)
@click.option(
    "--host-network",
    is_flag=True,
    help="The inventory's own nodes, interfaces and RDMA devices (default: the pod network).",
)
@click.option("--memory", metavar="SIZE", help="Memory of each pod, requested and limited.")
@click.option("--cpus", type=click.IntRange(1), help="CPU cores that each pod requests.")
@click.option("--disruption-budget", is_flag=True, help="Add a PodDisruptionBudget.")
@click.option("--pod-monitor", is_flag=True, help="Add a PodMonitor, for Prometheus' operator.")
@click.option(
    "--skip-network-check", is_flag=True, help="Leave out the gate that proves the network."
)
@click.option("-o", "--output", metavar="DIR", help="Write a file for each object into a folder.")
@click.option(
    "--check",
    metavar="FILE",
    help="Only judge manifests, such as an edited copy (`-`: standard input).",
)
def kubernetes(
    named: str | None,
    name: str | None,
    rdma_resource: str | None,
    model_volume: str | None,
    host_network: bool,
    memory: str | None,
    cpus: int | None,
    disruption_budget: bool,
    pod_monitor: bool,
    skip_network_check: bool,
    output: str | None,
    check: str | None,
    **server: Any,
) -> None:
    """Print a server as manifests for Kubernetes: a LeaderWorkerSet whose pods prove the network
    and then run vLLM's own ranks, with Service, NetworkPolicy and the helper programs.

    No node is reached. What the cluster must have, what applies it, what proves it and what is not
    carried over stands at its head. Everything after `--` goes to `vllm serve`.
    """
    if check is not None:
        _judge(check)
        return
    from launcher.export import kubernetes as made
    from launcher.export import kubernetes_shape as shape
    from launcher.export import lws

    read = export_server.read(named, "mp", server)
    target = shape.Target(
        name=shape.object_name(name or read.inventory.cluster),
        rdma=None if rdma_resource is None else shape.rdma_resource(rdma_resource),
        volume=None if model_volume is None else shape.model_volume(model_volume),
        host_network=host_network,
        memory=None if memory is None else _size(memory),
        cpus=cpus,
        gate=not skip_network_check,
        disruption_budget=disruption_budget,
        pod_monitor=pod_monitor,
    )
    group = shape.group(read.inventory, read.request, read.policy, target, leader=lws.LEADER)
    found = made.manifests(group)
    if output is None:
        click.echo(found.text, nl=False)
    else:
        export_server.write(output, found.files())


def _size(text: str) -> int:
    from launcher import sizes

    try:
        return sizes.read(text)
    except ValueError:
        raise click.UsageError(f"--memory should be a size such as 900GiB, not `{text}`") from None


def _judge(file: str) -> None:
    """Judge manifests; raises RequestError with every mistake."""
    import yaml

    from launcher.export import kubernetes_rules

    try:
        with click.open_file(file, encoding="utf-8") as opened:
            found = [each for each in yaml.safe_load_all(opened) if each]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(
            f"{file} cannot be read", evidence=str(error), hint="name a file with manifests"
        ) from None
    if not found or not all(isinstance(each, dict) for each in found):
        raise RequestError(f"{file} holds no objects of Kubernetes", hint="name other manifests")
    if wrong := kubernetes_rules.mistakes(found):
        count = "a mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
        raise VlaunchError(
            f"{file}: {count}",
            evidence=wrong,
            hint="what schemas see: `kubectl apply --server-side --dry-run=server -f FILE`",
        )
    click.echo(f"{file}: {len(found)} objects, no mistake", err=True)
