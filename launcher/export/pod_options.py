"""Flags about the pods of an export for Kubernetes, whatever runs in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from launcher.export import target

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("namespace", "image", "rdma_resource", "model_volume", "host_network", "memory", "cpus")


def flags(function: F, *, where: str = "") -> F:
    """Add the flags; `where` precedes their help."""
    for option in (
        click.option(
            "--cpus", type=click.IntRange(1), help=f"{where}CPU cores that each pod requests."
        ),
        click.option(
            "--memory",
            metavar="SIZE",
            callback=_read,
            help=f"{where}Memory of each pod, requested and limited.",
        ),
        click.option(
            "--host-network",
            is_flag=True,
            help=f"{where}Use the inventory's own nodes, interfaces and RDMA devices (default: the"
            " pod network).",
        ),
        click.option(
            "--model-volume",
            metavar="SOURCE",
            callback=_read,
            help=f"{where}Volume of the model: pvc:NAME[:/SUB/PATH] or hostPath:/PATH (default:"
            " `hf_home`).",
        ),
        click.option(
            "--rdma-resource",
            metavar="NAME[=N]",
            callback=_read,
            help=f"{where}Device plugin's resource for RDMA devices, such as rdma/ib.",
        ),
        click.option(
            "--image", metavar="IMAGE", help=f"{where}Image of the pods (default: the inventory's)."
        ),
        click.option(
            "--namespace",
            metavar="NAME",
            help=f"{where}Namespace of the objects (default: where `kubectl` is).",
        ),
    ):
        function = option(function)
    return function


def _read(_: click.Context, parameter: click.Parameter, text: str | None) -> object:
    """Read a value by the function of the flag's name; raises RequestError."""
    return None if text is None else getattr(target, str(parameter.name))(text)


def taken(said: dict[str, Any]) -> dict[str, Any]:
    """Take the values of these flags out of a command line's."""
    return {name: said.pop(name) for name in NAMES}
