"""`vlaunch export kubernetes`: a server as manifests, and rules for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from launcher.cli import export_pods, export_server, options
from launcher.errors import RequestError, VlaunchError

if TYPE_CHECKING:
    from launcher.export.kubernetes_shape import Kind
    from launcher.model import Backend


@click.command(params=[options.INVENTORY], short_help="a server as manifests for Kubernetes")
@export_server.flags
@click.option(
    "--kind",
    type=click.Choice(["lws", "statefulset", "kuberay"]),
    default="lws",
    show_default=True,
    help="What starts the group: the LeaderWorkerSet controller, our agent in a StatefulSet, or"
    " KubeRay.",
)
@click.option(
    "--backend",
    type=click.Choice(["mp", "ray"]),
    help="Who runs the ranks: vLLM itself (mp), or Ray, which the image must have (default: mp; of"
    " kuberay: ray).",
)
@click.option("--name", metavar="NAME", help="Name of the objects (default: the cluster's).")
@export_pods.flags
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
    kind: Kind,
    backend: Backend | None,
    name: str | None,
    disruption_budget: bool,
    pod_monitor: bool,
    skip_network_check: bool,
    output: str | None,
    check: str | None,
    **said: Any,
) -> None:
    """Print a server as manifests for Kubernetes: a group of pods that prove the network and then
    run the ranks, with Service, NetworkPolicy and the helper programs.

    No node is reached. What the cluster must have, what applies it, what proves it and what is not
    carried over stands at its head. Everything after `--` goes to `vllm serve`.
    """
    if check is not None:
        _judge(check)
        return
    from launcher.export import kubernetes as made
    from launcher.export import kubernetes_shape as shape

    pods = export_pods.taken(said)
    usual: Backend = "ray" if kind == "kuberay" else "mp"
    read = export_server.read(named, backend or usual, said)
    inventory = export_pods.with_image(read.inventory, pods)
    target = shape.Target(
        name=shape.object_name(name or inventory.cluster),
        kind=kind,
        gate=not skip_network_check,
        disruption_budget=disruption_budget,
        pod_monitor=pod_monitor,
    )
    target = export_pods.target(target, pods)
    group = shape.group(inventory, read.request, read.policy, target)
    found = made.manifests(group)
    if output is None:
        click.echo(found.text, nl=False)
    else:
        export_server.write(output, found.files())


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
