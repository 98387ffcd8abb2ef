"""`vlaunch export kubernetes`: a server as manifests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from launcher.app import options, session
from launcher.app.choose import chosen_model
from launcher.core.domain import ServeDefaults
from launcher.export import files, pod_options
from launcher.export.group import group
from launcher.export.target import Kind, Target, object_name
from launcher.serving.serve_request import vllm_arguments
from launcher.serving.start import StartSpec, policy


@click.command(params=[options.INVENTORY], short_help="a server as manifests for Kubernetes")
@options.key(ServeDefaults, "model", default="the inventory's", metavar="MODEL")
@options.key(ServeDefaults, "tp")
@options.key(ServeDefaults, "pp")
@options.key(ServeDefaults, "dp")
@options.key(ServeDefaults, "timeout", default="the inventory's")
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
    **said: Any,
) -> None:
    """Print a server as manifests for Kubernetes: a group of pods that check the network and then
    run the ranks, a Service and a NetworkPolicy.

    No node is contacted. The first comments name what the cluster must have, the commands that
    check, apply and test it, and what is not carried over. Everything after `--` goes to `vllm
    serve`.
    """
    from launcher.export import kubernetes as made

    pods = pod_options.taken(said)
    inventory, image = session.read(None, named), pods.pop("image")
    inventory = replace(inventory, image=image or inventory.image)
    spec = StartSpec(
        name="default",
        model=chosen_model(model, inventory),
        backend="ray" if kind == "kuberay" else "mp",
        host=inventory.serve.bind,
        port=inventory.ports.api,
        args=vllm_arguments(inventory, args),
        policy=policy(inventory, timeout),
        **said,
    )
    target = Target(
        name=object_name(name or inventory.cluster), kind=kind, gate=not skip_network_check, **pods
    )
    manifests = made.manifests(group(inventory, spec.request(inventory, None), spec.policy, target))
    if output is None:
        click.echo(manifests.text, nl=False)
    else:
        files.write(output, manifests.folder())
