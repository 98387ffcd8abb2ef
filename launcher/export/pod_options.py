"""Options about the pods of an export for Kubernetes."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from launcher.export import target

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("namespace", "image", "rdma_resource", "model_volume", "host_network", "memory", "cpus")


def flags(function: F) -> F:
    """Add the flags."""
    for option in (
        click.option("--cpus", type=click.IntRange(1), help="CPU cores that each pod requests."),
        click.option(
            "--memory",
            metavar="SIZE",
            callback=_parse_flag,
            help="Memory of each pod, requested and limited.",
        ),
        click.option(
            "--host-network",
            is_flag=True,
            help="Use the inventory's own nodes, interfaces and RDMA devices (default: the"
            " pod network).",
        ),
        click.option(
            "--model-volume",
            metavar="SOURCE",
            callback=_parse_flag,
            help="Volume of the model: pvc:NAME[:/SUB/PATH] or hostPath:/PATH (default:"
            " `hf_home`).",
        ),
        click.option(
            "--rdma-resource",
            metavar="NAME[=N]",
            callback=_parse_flag,
            help="Device plugin's resource for RDMA devices, such as rdma/ib.",
        ),
        click.option(
            "--image", metavar="IMAGE", help="Image of the pods (default: the inventory's)."
        ),
        click.option(
            "--namespace",
            metavar="NAME",
            help="Namespace of the objects (default: where `kubectl` is).",
        ),
    ):
        function = option(function)
    return function


def _parse_flag(_: click.Context, parameter: click.Parameter, text: str | None) -> object:
    """Parse a value with the function of the flag's name; raise RequestError."""
    return None if text is None else getattr(target, str(parameter.name))(text)


def pop_values(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of these flags from a command line's, and return them."""
    return {name: values.pop(name) for name in NAMES}
