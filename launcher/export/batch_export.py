"""`vlaunch batch --export`: a job as manifests, for clusters that nobody reaches from here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import click

from launcher.batch.batch_plan import Request
from launcher.core.domain import Inventory
from launcher.export import pod_options
from launcher.export.target import Target, object_name

F = TypeVar("F", bound=Callable[..., Any])


def flags(function: F) -> F:
    """Add the flags; the function gets what they say as `exporter`."""

    @functools.wraps(function)
    def called(*args: Any, export: str | None, **given: Any) -> Any:
        exporter = functools.partial(_exporter, export, pod_options.taken(given))
        return function(*args, exporter=exporter, **given)

    option = click.option(
        "--export",
        type=click.Choice(["kuberay"]),
        help="Print it as manifests for Kubernetes, and reach no node.",
    )
    return cast("F", option(pod_options.flags(called, where="With --export: ")))


def _exporter(
    export: str | None, pods: dict[str, Any], about_nodes: bool
) -> Callable[[Inventory, Request], None] | None:
    """Return what prints a job, None without `--export`; raises UsageError for options that are
    about nodes beside `--export`, and about pods without it.
    """
    named = [f"--{name.replace('_', '-')}" for name, value in pods.items() if value]
    if export is None and named:
        raise click.UsageError(f"{named[0]} goes with --export: it is about pods")
    if export is not None and about_nodes:
        raise click.UsageError(
            "--export only prints: --discard-results, --retry-errors, --queue, --detach, --dry-run"
            " and --fetch are about a job on the nodes"
        )
    return functools.partial(_show, pods) if export else None


def _show(pods: dict[str, Any], inventory: Inventory, asked: Request) -> None:
    """Print a job as manifests for Kubernetes; raises RequestError where pods cannot run it."""
    from launcher.export import kuberay_batch

    inventory = replace(inventory, image=pods.pop("image") or inventory.image)
    target = Target(name=object_name(asked.job.name), kind="kuberay", **pods)
    group = kuberay_batch.group(inventory, asked, target)
    click.echo(kuberay_batch.manifests(group, asked).text, nl=False)
