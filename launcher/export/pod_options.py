"""Options about the pods of an export for Kubernetes, and `vlaunch batch --export`: a job as
manifests, for clusters that are not reachable from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import click

from launcher.batch.batch_plan import BatchRequest
from launcher.core.domain import Inventory
from launcher.export import target

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("namespace", "image", "rdma_resource", "model_volume", "host_network", "memory", "cpus")


def flags(function: F, *, where: str = "") -> F:
    """Add the flags; `where` is a prefix of their help."""
    for option in (
        click.option(
            "--cpus", type=click.IntRange(1), help=f"{where}CPU cores that each pod requests."
        ),
        click.option(
            "--memory",
            metavar="SIZE",
            callback=_parse_flag,
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
            callback=_parse_flag,
            help=f"{where}Volume of the model: pvc:NAME[:/SUB/PATH] or hostPath:/PATH (default:"
            " `hf_home`).",
        ),
        click.option(
            "--rdma-resource",
            metavar="NAME[=N]",
            callback=_parse_flag,
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


def _parse_flag(_: click.Context, parameter: click.Parameter, text: str | None) -> object:
    """Parse a value with the function of the flag's name; raise RequestError."""
    return None if text is None else getattr(target, str(parameter.name))(text)


def pop_values(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of these flags from a command line's, and return them."""
    return {name: values.pop(name) for name in NAMES}


def batch_flags(function: F) -> F:
    """Add `--export` and the flags of its pods; the function gets their values as `exporter`."""

    @functools.wraps(function)
    def called(*args: Any, export: str | None, **values: Any) -> Any:
        exporter = functools.partial(_exporter, export, pop_values(values))
        return function(*args, exporter=exporter, **values)

    option = click.option(
        "--export",
        type=click.Choice(["kuberay"]),
        help="Print the job as Kubernetes manifests; contact no node.",
    )
    return cast("F", option(flags(called, where="With --export: ")))


def _exporter(
    export: str | None, pods: dict[str, Any], about_nodes: bool
) -> Callable[[Inventory, BatchRequest], None] | None:
    """Return the function that prints a job, None without `--export`; raise UsageError for node
    options with `--export`, and for pod options without it.
    """
    named = [f"--{name.replace('_', '-')}" for name, value in pods.items() if value]
    if export is None and named:
        raise click.UsageError(f"{named[0]} requires --export: it configures pods")
    if export is not None and about_nodes:
        raise click.UsageError(
            "--export only prints: --discard-results, --retry-errors, --queue, --detach, --dry-run"
            " and --fetch are about a job on the nodes"
        )
    return functools.partial(_print_job, pods) if export else None


def _print_job(pods: dict[str, Any], inventory: Inventory, job_request: BatchRequest) -> None:
    """Print a job as manifests for Kubernetes; raise RequestError if pods cannot run it."""
    from launcher.export import kuberay_batch

    inventory = replace(inventory, image=pods.pop("image") or inventory.image)
    pod_target = target.ExportTarget(
        name=target.object_name(job_request.job.name), kind="kuberay", **pods
    )
    group = kuberay_batch.build_job_group(inventory, job_request, pod_target)
    click.echo(kuberay_batch.job_manifests(group, job_request).text, nl=False)
