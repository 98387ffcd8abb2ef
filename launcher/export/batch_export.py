"""`vlaunch batch --export`: a job as manifests, for clusters that nobody reaches from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.batch.batch_plan import Request
    from launcher.core.domain import Inventory


def check(export: str | None, pods: Mapping[str, Any], *, about_nodes: bool) -> None:
    """Raise UsageError for options that are about nodes beside `--export`, and about pods without
    it.
    """
    named = [f"--{name.replace('_', '-')}" for name, each in pods.items() if each]
    if export is None and named:
        raise click.UsageError(f"{named[0]} goes with --export: it is about pods")
    if export is not None and about_nodes:
        raise click.UsageError(
            "--export only prints: --discard-results, --retry-errors, --queue, --detach, --dry-run"
            " and --fetch are about a job on the nodes"
        )


def show(inventory: Inventory, asked: Request, pods: dict[str, Any]) -> None:
    """Print a job as manifests for Kubernetes; raises RequestError where pods cannot run it."""
    from launcher.export import kuberay_batch
    from launcher.export.target import Target, object_name

    inventory = replace(inventory, image=pods.pop("image") or inventory.image)
    target = Target(name=object_name(asked.job.name), kind="kuberay", **pods)
    group = kuberay_batch.group(inventory, asked, target)
    click.echo(kuberay_batch.manifests(group, asked).text, nl=False)
