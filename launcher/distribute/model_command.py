"""`vlaunch model`, `vlaunch model list` and `vlaunch model remove`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.app.terminal import dump_json, make_table, plain_text, say, show, text_line
from launcher.core.domain import Node, fold
from launcher.core.errors import RequestError
from launcher.core.sizes import format_size
from launcher.distribute import chain
from launcher.distribute.chain import NodeModels, Revision, StoredModel
from launcher.distribute.model_copy import copy
from launcher.distribute.model_programs import NodePrograms, check_path, warn_unreachable
from launcher.distribute.model_pull import pull
from launcher.tools.site import servers

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.group()
def model() -> None:
    """List, download, copy and remove models on the nodes.

    A model is a name such as Qwen/Qwen3-8B, stored in each node's Hugging Face cache (`hf_home`),
    or the path of a folder as containers see it.
    """


@command(
    "list",
    under=model,
    shows="none",
    flags=[options.JSON],
    short_help="List the models on all nodes: size, completeness, last use",
)
@options.NODES
def list_(call: CommandContext, nodes: tuple[str, ...]) -> int:
    """List the models in the nodes' Hugging Face caches and in the folders beside them.

    A model is complete when every file has its content, no file of its index is missing, and no
    copy or download is unfinished. The exit code is 1 when a node cannot be queried.
    """
    picked = select_nodes(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        reached = len(session.missing) < len(picked)
        stores = NodePrograms(session, picked).scan_models() if reached else {}
        remarks = [error.message for error in session.missing.values()]
    if call.as_json:
        click.echo(dump_json(_as_json(call.inventory.cluster, stores, remarks)))
    elif not any(store.models for store in stores.values()) and not remarks:
        say("these nodes have no models")
    else:
        show(render_models(stores, remarks))
    return 1 if remarks else 0


def _as_json(cluster: str, stores: Mapping[str, NodeModels], remarks: list[str]) -> dict[str, Any]:
    def model_json(model: StoredModel) -> dict[str, Any]:
        entry = asdict(model)
        for revision in entry["revisions"]:
            del revision["files"], revision["links"]
        return entry

    nodes = {
        name: {"free": store.free, "models": [model_json(model) for model in store.models]}
        for name, store in stores.items()
    }
    return {"cluster": cluster, "nodes": nodes, "remarks": list(remarks)}


@command(
    under=model,
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.YES, options.JSON],
    short_help="Remove a model from the nodes",
)
@click.argument("name", metavar="MODEL")
@options.NODES
def remove(call: CommandContext, name: str, nodes: tuple[str, ...]) -> int:
    """Remove MODEL from every node, or from the given ones: all revisions, unfinished copies and
    downloads, and their records.

    A model in use by a server of the cluster is not removed. An unreachable node keeps it, and the
    exit code is 1.
    """
    check_path(call.inventory, name)
    picked = select_nodes(call.inventory, nodes)
    with call.session(partial=True) as session, call.locked(session) as locked:
        warn_unreachable(locked)
        programs = NodePrograms(locked, picked)
        stores = programs.scan_models(name)
        code = 1 if any(node.name in locked.missing for node in picked) else 0
        nodes_with_model = [node for node in programs.nodes if _has_model(stores[node.name], name)]
        if not nodes_with_model:
            if names := [node.name for node in programs.nodes]:
                session.done(f"{name} is not on {fold(names)}; there was nothing to remove")
            return code
        _refuse_served(locked, programs, name)
        if call.dry_run:
            _print_removal(nodes_with_model, stores, name)
            return code
        places = fold([node.name for node in nodes_with_model])
        call.confirm(locked, f"Remove {name} from {places}?")
        changes = {node.name: [f"removing {name}"] for node in nodes_with_model}
        freed = programs.run_all(
            lambda node: chain.remove_request(*_roots(programs, node, name)),
            chain.parse_removed,
            nodes=nodes_with_model,
            timeout=3600.0,
            preambles=locked.transport.record("model remove", changes),
        )
        _report_removed(locked, name, freed)
        return code


def _has_model(store: NodeModels, name: str) -> bool:
    """True when a node has a model; a folder must have a configuration, or be a copy by vlaunch."""
    return any(
        model.name == name and (model.kind == "hub" or model.copied or _has_config(model))
        for model in store.models
    )


def _has_config(model: StoredModel) -> bool:
    return all(revision.why != "config.json missing" for revision in model.revisions)


def _roots(programs: NodePrograms, node: Node, name: str) -> list[str]:
    root = chain.model_root(programs.runtime(node), node, name)
    if chain.is_path(name):
        return [root]
    hub, _, folder = root.rpartition("/")
    return [root, f"{hub}/.locks/{folder}"]


def _refuse_served(session: Session, programs: NodePrograms, name: str) -> None:
    """Raise RequestError when a server of the cluster uses a model."""
    from launcher.app import servers as server_queries

    if session.inventory.head.name in session.missing or not programs.site.head_runs:
        return
    snapshot = server_queries.query_cluster(session, head_only=True)
    for server in servers.parse_servers(snapshot.payload).running:
        if server.model == name:
            raise RequestError(f"{server.label} uses {name}", hint="stop it first: `vlaunch stop`")


def _print_removal(nodes: Sequence[Node], stores: Mapping[str, NodeModels], name: str) -> None:
    for node in nodes:
        model = next(model for model in stores[node.name].models if model.name == name)
        stored = sum(revision.size for revision in model.revisions)
        size = stored + model.unfinished + model.left_over
        click.echo(f"{node.name}: {model.root} would be removed, {format_size(size)}")


def _report_removed(session: Session, name: str, freed: Mapping[str, int]) -> None:
    text = f"removed {name} from {fold(list(freed))}: {format_size(sum(freed.values()))} in all"
    session.done(text, stage="model", data={"freed": dict(freed)})


model.add_command(copy)
model.add_command(pull)


def render_models(stores: Mapping[str, NodeModels], remarks: Sequence[str] = ()) -> RenderableType:
    """Return a table with one row per model and revision, and below it incomplete models,
    unfinished copies and downloads, and free space.
    """
    from rich.console import Group

    table = make_table("MODEL", "REVISION", "SIZE", "COMPLETE ON", "INCOMPLETE ON")
    table.add_column("LAST USED", no_wrap=True)
    rows: dict[tuple[str, str], list[tuple[str, StoredModel, Revision]]] = {}
    for node, store in stores.items():
        for model in store.models:
            for revision in model.revisions:
                copies = rows.setdefault((model.name, revision.revision), [])
                copies.append((node, model, revision))
    for key in sorted(rows):
        table.add_row(*(plain_text(cell) for cell in _cells(*key, rows[key])))
    return Group(
        table,
        *(text_line(text) for text in _problem_lines(stores)),
        *(text_line(f"{node}: {format_size(store.free)} free") for node, store in stores.items()),
        *(text_line(text, "red") for text in remarks),
    )


def _cells(
    name: str, revision: str, copies: Sequence[tuple[str, StoredModel, Revision]]
) -> tuple[str, ...]:
    complete = [node for node, model, stored in copies if not stored.why and not model.unfinished]
    partial = [node for node, _, _ in copies if node not in complete]
    used = max(stored.used for _, _, stored in copies)
    return (
        name,
        revision[:12] or "-",
        format_size(max(stored.size for _, _, stored in copies)),
        fold(complete) if complete else "-",
        fold(partial) if partial else "-",
        datetime.fromtimestamp(used).strftime("%Y-%m-%d %H:%M") if used > 0 else "-",
    )


def _problem_lines(stores: Mapping[str, NodeModels]) -> list[str]:
    """Describe incomplete models; equal descriptions name their nodes together."""
    nodes_by_problem: dict[str, list[str]] = {}
    for node, store in stores.items():
        for model in store.models:
            for text in _model_problems(model):
                nodes_by_problem.setdefault(text, []).append(node)
    return [f"{fold(nodes)}: {text}" for text, nodes in nodes_by_problem.items()]


def _model_problems(model: StoredModel) -> list[str]:
    problems = [f"{model.name}: {revision.why}" for revision in model.revisions if revision.why]
    if model.unfinished:
        problems.append(
            f"{model.name}: a copy is incomplete, {format_size(model.unfinished)} so far;"
            f" `vlaunch model copy {model.name}` continues it"
        )
    if model.downloading:
        problems.append(
            f"{model.name}: {format_size(model.left_over)} of running or interrupted downloads"
        )
    return problems
