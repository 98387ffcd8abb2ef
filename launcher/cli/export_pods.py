"""What is told of the pods of an export for Kubernetes, whatever runs in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from launcher.export.kubernetes_shape import Target
    from launcher.model import Inventory

F = TypeVar("F", bound=Callable[..., Any])


def flags(function: F, *, where: str = "") -> F:
    """Add the flags; `where` is said before what each does."""
    for option in (
        click.option(
            "--cpus", type=click.IntRange(1), help=f"{where}CPU cores that each pod requests."
        ),
        click.option(
            "--memory",
            metavar="SIZE",
            help=f"{where}Memory of each pod, requested and limited.",
        ),
        click.option(
            "--host-network",
            is_flag=True,
            help=f"{where}The inventory's own nodes, interfaces and RDMA devices (default: the pod"
            " network).",
        ),
        click.option(
            "--model-volume",
            metavar="WHERE",
            help=f"{where}Where the model lies: pvc:NAME[:/SUB/PATH] or hostPath:/PATH (default:"
            " `hf_home`).",
        ),
        click.option(
            "--rdma-resource",
            metavar="NAME[=N]",
            help=f"{where}The nodes' RDMA devices as their device plugin calls them, such as"
            " rdma/ib.",
        ),
        click.option(
            "--image", metavar="IMAGE", help=f"{where}Of the pods (default: the inventory's)."
        ),
        click.option(
            "--namespace",
            metavar="NAME",
            help=f"{where}Where the objects shall be (default: where `kubectl` is).",
        ),
    ):
        function = option(function)
    return function


def taken(said: dict[str, Any]) -> dict[str, Any]:
    """Take what these flags say out of what a command line says."""
    names = (
        *("namespace", "image", "rdma_resource", "model_volume"),
        *("host_network", "memory", "cpus"),
    )
    return {name: said.pop(name) for name in names}


def with_image(inventory: Inventory, said: dict[str, Any]) -> Inventory:
    """Return the inventory, with the image that is named instead of its own."""
    return inventory if said["image"] is None else replace(inventory, image=said["image"])


def target(target: Target, said: dict[str, Any]) -> Target:
    """Return a target with what these flags say; raises RequestError and UsageError."""
    from launcher.export import kubernetes_shape as shape

    rdma, volume = said["rdma_resource"], said["model_volume"]
    return replace(
        target,
        namespace="" if said["namespace"] is None else shape.namespace(said["namespace"]),
        rdma=None if rdma is None else shape.rdma_resource(rdma),
        volume=None if volume is None else shape.model_volume(volume),
        host_network=said["host_network"],
        memory=None if said["memory"] is None else _size(said["memory"]),
        cpus=said["cpus"],
    )


def _size(text: str) -> int:
    from launcher import sizes

    # Kubernetes leaves the B out.
    whole = f"{text}B" if text.endswith(("Ki", "Mi", "Gi", "Ti")) else text
    try:
        return sizes.read(whole)
    except ValueError:
        raise click.UsageError(f"--memory should be a size such as 900Gi, not `{text}`") from None
