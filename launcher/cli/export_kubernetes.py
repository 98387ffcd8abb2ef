"""`vlaunch export kubernetes`: a server as manifests, and rules for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import export_pods, export_server, options
from launcher.errors import RequestError, VlaunchError

if TYPE_CHECKING:
    from launcher.export.kubernetes_shape import Kind

_KUSTOMIZATION = "kustomization.yaml"
_SCHEMAS = "what schemas see: `kubectl apply --server-side --dry-run=server -f FILE`"


@click.command(params=[options.INVENTORY], short_help="a server as manifests for Kubernetes")
@export_server.flags
@click.option(
    "--kind",
    type=click.Choice(["lws", "kuberay"]),
    default="lws",
    show_default=True,
    help="Controller of the pods: LeaderWorkerSet for vLLM's own ranks (mp), KubeRay for Ray.",
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
    metavar="WHERE",
    help="Only judge manifests, such as an edited copy: a file, a folder, or standard input (`-`).",
)
def kubernetes(
    named: str | None,
    kind: Kind,
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
    read = export_server.read(named, "ray" if kind == "kuberay" else "mp", said)
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


def _judge(where: str) -> None:
    """Judge manifests; raises RequestError with every mistake."""
    from launcher.export import kubernetes_rules

    found = [each for file in _files(where) for each in _objects(file)]
    if not found:
        raise RequestError(f"{where} holds no objects of Kubernetes", hint="name other manifests")
    if wrong := kubernetes_rules.mistakes(found):
        count = "a mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
        beside = Path(where).parent if where != "-" else None
        alone = beside is not None and (beside / _KUSTOMIZATION).is_file()
        whole = f"judge the folder as a whole: `vlaunch export kubernetes --check {beside}`"
        raise VlaunchError(f"{where}: {count}", evidence=wrong, hint=whole if alone else _SCHEMAS)
    click.echo(f"{where}: {len(found)} objects, no mistake; {_SCHEMAS}", err=True)


def _files(where: str) -> list[str]:
    """Return the files of a folder with manifests, less its kustomization, or the one that is
    named.
    """
    folder = Path(where)
    if where == "-" or not folder.is_dir():
        return [where]
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    return [str(each) for each in files if each.name != _KUSTOMIZATION]


def _objects(file: str) -> list[dict[str, Any]]:
    """Return the objects in a file; raises RequestError for what is none."""
    import yaml

    try:
        with click.open_file(file, encoding="utf-8") as opened:
            found = [each for each in yaml.safe_load_all(opened) if each]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(
            f"{file} cannot be read", evidence=str(error), hint="name a file with manifests"
        ) from None
    for each in found:
        if not isinstance(each, dict) or not each.get("kind") or not each.get("apiVersion"):
            raise RequestError(
                f"{file} is no manifest of Kubernetes",
                evidence="each object should have `apiVersion` and `kind`",
                hint="name a file with manifests",
            )
    return found
