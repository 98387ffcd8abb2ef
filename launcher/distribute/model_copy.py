"""`vlaunch model copy`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.core import decode, sizes
from launcher.core.domain import Inventory, Node, fold
from launcher.core.errors import RequestError
from launcher.core.sizes import format_count, format_size
from launcher.distribute import chain
from launcher.distribute import copy_session as copies
from launcher.distribute.chain import THIS_MACHINE, NodeModels
from launcher.distribute.copy_session import CopyOptions
from launcher.distribute.model_plan import CopyPlan, plan_copy
from launcher.distribute.model_programs import NodePrograms, check_path
from launcher.distribute.node import models as scan

F = TypeVar("F", bound=Callable[..., Any])

SOURCE = click.option("--from", "source", metavar="NODE", help="Copy from this node.")
REVISION = click.option("--revision", default="", help="Commit, branch or tag (default: main).")


def _parse_rate(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Parse bytes per second; raises BadParameter."""
    if value is None:
        return 0
    try:
        return sizes.parse_size(value)
    except ValueError:
        raise click.BadParameter("should be bytes a second, such as 500MB") from None


def transfer_options(function: F) -> F:
    """Add the options of a transfer: `targets`, `rate` and `encrypt`."""
    for option in (
        click.option(
            "--encrypt/--no-encrypt",
            default=None,
            help=(
                "Encrypt the files' bytes between nodes (default: unless `network: {private: true}`"
                " is in the inventory)."
            ),
        ),
        click.option(
            "--rate",
            callback=_parse_rate,
            metavar="SIZE",
            help="Maximum bytes per second of each node, such as 500MB (default: unlimited).",
        ),
        click.option(
            "--to",
            "targets",
            multiple=True,
            metavar="NODE",
            help="Copy only to this node; repeatable (default: all).",
        ),
    ):
        function = option(function)
    return function


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Copy a model from a node or this machine to all nodes",
)
@click.argument("name", metavar="MODEL|PATH")
@SOURCE
@click.option("--local", is_flag=True, help="Copy from this machine.")
@click.option("--as", "as_", metavar="PATH", help="With --local: path of the folder on the nodes.")
@click.option(
    "--compare",
    is_flag=True,
    help="Compare the content of existing files, not only sizes and times.",
)
@REVISION
@transfer_options
def copy(
    call: CommandContext,
    name: str,
    source: str | None,
    local: bool,
    as_: str | None,
    targets: tuple[str, ...],
    compare: bool,
    revision: str,
    **limits: Any,
) -> None:
    """Copy a model to every node. Each node passes on what it receives, so all have it in about the
    time of one copy.

    MODEL is a name such as Qwen/Qwen3-8B in the Hugging Face cache of a node, or a folder of the
    nodes as containers see it (/data/models/mine). ./FOLDER and ~/FOLDER are on this machine, as is
    everything with --local.

    Nodes that have a part get the rest. A node that fails does not stop the others. After an
    interruption, the same command continues the copy. Every byte is verified on every node, and a
    model appears only when it is complete.
    """
    if (as_ or local) and source:
        raise click.UsageError("--from names a node; --local and --as are for this machine")
    local = local or name.startswith(("./", "../", "~", "."))
    if as_ and not local:
        raise click.UsageError("--as requires a folder of this machine")
    target_nodes = select_nodes(call.inventory, targets)
    local_model = _LocalModel.find(call.inventory, name, as_) if local else None
    model = local_model.model if local_model else name
    check_path(call.inventory, model)
    source_nodes = select_nodes(call.inventory, [source]) if source else call.inventory.nodes
    members = target_nodes if local_model else (*target_nodes, *source_nodes)
    nodes = [node for node in call.inventory.nodes if node in members]
    with call.session(nodes=nodes) as session, call.locked(session) as locked:
        programs = start_programs(locked, nodes, model)
        stores = programs.scan_models(model, files=True)
        if local_model is not None:
            stores = {THIS_MACHINE: local_model.scan(), **stores}
        plan = plan_copy(
            model,
            stores,
            source=THIS_MACHINE if local_model else source or "",
            revision=revision,
            targets=[node.name for node in target_nodes],
            compare=compare,
        )
        if call.dry_run:
            print_plan(plan)
        else:
            copy_options = CopyOptions(compare=compare, **limits)
            copy_model(programs, plan, copy_options, local=local_model.path if local_model else "")


def print_plan(plan: CopyPlan) -> None:
    """Print a plan, for a dry run."""
    size = format_size(plan.manifest.total_bytes)
    files = len(plan.manifest.files)
    click.echo(
        f"{copies.display_name(plan)}: {size} in {format_count(files, 'file')}, from {plan.source}"
    )
    before = plan.source
    for name in plan.targets:
        click.echo(f"  {name} would get {format_size(plan.missing_bytes[name])}, from {before}")
        before = name
    if complete := [name for name in copies.nodes_with_copy(plan) if name != plan.source]:
        click.echo(f"  {fold(complete)} has it already")


def copy_model(
    programs: NodePrograms,
    plan: CopyPlan,
    copy_options: CopyOptions,
    *,
    local: str = "",
    last: bool = True,
    verify: bool = False,
) -> None:
    """Copy a model, and show the result.

    Args:
        programs: the nodes' programs.
        plan: the plan.
        copy_options: the options of the copy.
        local: the source folder on this machine; empty when a node is the source.
        last: this copy is the command's last step.
        verify: compare the source's files even if no node lacks them.

    Raises:
        NodeError: a node does not have the model.
        LockError: the cluster's lock was lost.
    """
    session, name = programs.session, copies.display_name(plan)
    if not plan.targets and not verify:
        if last:
            copies.report_unchanged(session, name, copies.nodes_with_copy(plan))
        return
    locations = {
        node.name: copies.CopyLocation(
            runtime=programs.runtime(node),
            root=chain.model_root(programs.runtime(node), node, plan.model),
        )
        for node in programs.nodes
    }
    if local:
        runtime = copies.local_runtime(session.inventory)
        locations[THIS_MACHINE] = copies.CopyLocation(runtime=runtime, root=local)
    result = copies.run_copy(session, "model copy", plan, locations, copy_options)
    updated = [name for name in plan.targets if name not in result.failed]
    for node in updated:
        member = result.members[node]
        if not member.shared:
            text = f"{format_size(member.received)} received and verified"
            session.step("copy", text, node=node, seconds=member.seconds)
    received = {node: result.members[node].received for node in updated}
    max_received = max(received.values(), default=0)
    speed = format_size(round(max_received / max(result.seconds, 0.001)))
    rate = f", {speed}/s" if max_received else ""
    total, nodes = plan.manifest.total_bytes, copies.nodes_with_copy(plan, [plan.source, *updated])
    data = {
        "bytes": total,
        "nodes": nodes,
        "failed": result.failed,
        "received": received,
        "changed": len(updated),
    }
    text = f"{name} is on {fold(nodes)}: {format_size(total)}{rate}"
    copies.report_result(session, plan.model, data, text=text, seconds=result.seconds, last=last)


class _LocalModel:
    """A model on this machine: `path` is its folder, `model` its name on the nodes."""

    def __init__(self, path: str, model: str, request: Mapping[str, Any]) -> None:
        self.path, self.model, self.request = path, model, request

    @classmethod
    def find(cls, inventory: Inventory, name: str, as_: str | None) -> _LocalModel:
        """Find a model on this machine by name or path; raises RequestError."""
        path = Path(name).expanduser()
        if path.is_dir() and (name.startswith((".", "~", "/")) or as_):
            path = path.resolve()
            homes = {node.hf_home.rstrip("/") for node in inventory.nodes}
            if not as_ and len(homes) > 1:
                raise RequestError(
                    "the nodes have different hf_home settings, so the folder needs a path",
                    hint="set it: `--as PATH`",
                )
            target = as_ or f"{homes.pop()}/{path.name}"
            return cls(str(path), target, {"path": str(path)})
        if name.startswith((".", "~", "/")):
            raise RequestError(f"{name}: no such folder on this machine")
        hub = _local_hub()
        if not (hub / scan.cache_folder(name)).is_dir():
            raise RequestError(
                f"{name} is not in this machine's Hugging Face cache", evidence=str(hub)
            )
        return cls(str(hub / scan.cache_folder(name)), name, {"hub": str(hub), "name": name})

    def scan(self) -> NodeModels:
        """Scan the model's files."""
        raw = scan.scan_models({**self.request, "files": True, "room": self.path})
        store = decode.validate(NodeModels, raw, "the list of models on this machine")
        models = tuple(replace(model, name=self.model) for model in store.models)
        return replace(store, models=models)


def _local_hub() -> Path:
    """Return this machine's Hugging Face cache, as huggingface_hub locates it."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def start_programs(session: Session, nodes: Sequence[Node], model: str) -> NodePrograms:
    """Announce the scan for a model, and return the nodes' programs."""
    session.begin("look", f"Look for {model} on {fold([node.name for node in nodes])}")
    return NodePrograms(session, nodes)
