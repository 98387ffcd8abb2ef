"""`vlaunch model`: list and remove models; copy and download are in modules of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, line, make_table, plain, say, show
from launcher.core.domain import Node, fold
from launcher.core.errors import RequestError
from launcher.core.sizes import told
from launcher.distribute import chain
from launcher.distribute.chain import Model, Revision, Seen
from launcher.distribute.model_copy import copy
from launcher.distribute.model_programs import Programs, check_path, missing_told
from launcher.distribute.model_pull import pull
from launcher.tools import servers

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.group()
def model() -> None:
    """List, download, copy and remove models of the nodes.

    A model is a name such as Qwen/Qwen3-8B, which is looked for in each node's Hugging Face cache
    (`hf_home`), or the path of a folder as containers see it.
    """


@command(
    "list",
    under=model,
    path=True,
    shows="none",
    flags=[options.JSON],
    short_help="List the models of all nodes: size, complete or not, last use",
)
@options.NODES
def list_(call: Call, nodes: tuple[str, ...]) -> int:
    """Show the models in the nodes' Hugging Face caches, and the folders beside them.

    A model is whole when nothing speaks against it: every file has its content, all files that its
    index names are there, and no copy or download is unfinished. The exit code is 1 when a node
    cannot be asked.
    """
    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        stores = Programs(session, picked).look() if len(session.missing) < len(picked) else {}
        remarks = [error.message for error in session.missing.values()]
    if call.as_json:
        click.echo(dump_json(_as_json(call.inventory.cluster, stores, remarks)))
    elif not any(store.models for store in stores.values()) and not remarks:
        say("there is no model on these nodes")
    else:
        show(render(stores, remarks))
    return 1 if remarks else 0


def _as_json(cluster: str, seen: Mapping[str, Seen], remarks: Sequence[str]) -> dict[str, Any]:
    def one(found: Model) -> dict[str, Any]:
        said = asdict(found)
        for each in said["revisions"]:
            del each["files"], each["links"]
        return said

    nodes = {
        name: {"free": each.free, "models": [one(found) for found in each.models]}
        for name, each in seen.items()
    }
    return {"cluster": cluster, "nodes": nodes, "remarks": list(remarks)}


@command(
    under=model,
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Remove a model from the nodes",
)
@click.argument("name", metavar="MODEL")
@options.NODES
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(call: Call, name: str, nodes: tuple[str, ...], yes: bool) -> None:
    """Remove MODEL from every node, or from those that are named: all its revisions, unfinished
    copies and downloads, and what is written down of them.

    A model that a server of the cluster uses stays.
    """
    check_path(call.inventory, name)
    picked = chosen(call.inventory, nodes)
    with call.session(partial=True) as session, call.locked(session) as ours:
        missing_told(ours)
        programs = Programs(ours, picked)
        seen = programs.look(name)
        there = [node for node in programs.nodes if _is_model(seen[node.name], name)]
        if not there:
            names = [node.name for node in programs.nodes]
            session.done(f"{name} is not on {fold(names)}; there was nothing to remove")
            return
        _refuse_served(ours, programs, name)
        if call.dry_run:
            _print_removal(there, seen, name)
            return
        if not yes:
            where = fold([node.name for node in there])
            ours.confirm(
                f"Remove {name} from {where}?",
                f"nobody can be asked whether {name} may be removed from {where}",
                hint=f"say it: `vlaunch model remove {name} --yes`",
            )
        words = {node.name: [f"removing {name}"] for node in there}
        freed = programs.ask(
            lambda node: chain.remove(*_roots(programs, node, name)),
            chain.parse_removed,
            nodes=there,
            timeout=3600.0,
            before=ours.transport.record("model remove", words),
        )
        _tell_removed(ours, name, freed)


def _is_model(seen: Seen, name: str) -> bool:
    """True when a node has it; a folder must look like a model, or be a copy of ours."""
    return any(
        each.name == name and (each.kind == "hub" or each.copied or _has_config(each))
        for each in seen.models
    )


def _has_config(each: Model) -> bool:
    return all(one.why != "config.json missing" for one in each.revisions)


def _roots(programs: Programs, node: Node, name: str) -> list[str]:
    root = chain.root(programs.where(node), node, name)
    if chain.is_path(name):
        return [root]
    hub, _, folder = root.rpartition("/")
    return [root, f"{hub}/.locks/{folder}"]


def _refuse_served(session: Session, programs: Programs, name: str) -> None:
    """Raise RequestError when a server of the cluster uses a model."""
    from launcher.app import servers as server

    if session.inventory.head.name in session.missing or not programs.site.head_runs:
        return
    seen = server.look(session, head_only=True)
    used = [each for each in servers.read(seen.said).running if each.model == name]
    if used:
        raise RequestError(f"{used[0].what} uses {name}", hint="stop it first: `vlaunch stop`")


def _print_removal(there: Sequence[Node], seen: Mapping[str, Seen], name: str) -> None:
    for node in there:
        each = next(one for one in seen[node.name].models if one.name == name)
        size = sum(one.size for one in each.revisions) + each.unfinished + each.left_over
        click.echo(f"{node.name}: {each.root} would be removed, {told(size)}")


def _tell_removed(session: Session, name: str, freed: Mapping[str, int]) -> None:
    text = f"{name} is removed from {fold(list(freed))}: {told(sum(freed.values()))} in all"
    session.done(text, stage="model", data={"freed": dict(freed)})


model.add_command(copy)
model.add_command(pull)


def render(seen: Mapping[str, Seen], remarks: Sequence[str] = ()) -> RenderableType:
    """Return the table: one row for each model in each revision; below it why one is not whole,
    what unfinished copies and downloads hold, and how much room is left.
    """
    from rich.console import Group

    table = make_table("MODEL", "REVISION", "SIZE", "WHOLE ON", "IN PART ON")
    table.add_column("LAST USED", no_wrap=True)
    rows: dict[tuple[str, str], list[tuple[str, Model, Revision]]] = {}
    for node, each in seen.items():
        for model in each.models:
            for revision in model.revisions:
                found = rows.setdefault((model.name, revision.revision), [])
                found.append((node, model, revision))
    for key in sorted(rows):
        table.add_row(*(plain(cell) for cell in _cells(*key, rows[key])))
    room = [f"{node}: {told(each.free)} free" for node, each in seen.items()]
    return Group(
        table,
        *(line(each) for each in _remarks(seen)),
        *(line(each) for each in room),
        *(line(each, "red") for each in remarks),
    )


def _cells(
    name: str, revision: str, found: Sequence[tuple[str, Model, Revision]]
) -> tuple[str, ...]:
    whole = [node for node, model, each in found if not each.why and not model.unfinished]
    part = [node for node, _, _ in found if node not in whole]
    used = max(each.used for _, _, each in found)
    return (
        name,
        revision[:12] or "-",
        told(max(each.size for _, _, each in found)),
        fold(whole) if whole else "-",
        fold(part) if part else "-",
        datetime.fromtimestamp(used).strftime("%Y-%m-%d %H:%M") if used > 0 else "-",
    )


def _remarks(seen: Mapping[str, Seen]) -> list[str]:
    """Say what is not whole, equal words of several nodes once."""
    said: dict[str, list[str]] = {}
    for node, each in seen.items():
        for model in each.models:
            for text in _troubles(model):
                said.setdefault(text, []).append(node)
    return [f"{fold(nodes)}: {text}" for text, nodes in said.items()]


def _troubles(model: Model) -> list[str]:
    said = [f"{model.name}: {each.why}" for each in model.revisions if each.why]
    if model.unfinished:
        said.append(
            f"{model.name}: a copy is unfinished, {told(model.unfinished)} so far; the same"
            f" `vlaunch model copy {model.name}` goes on with it"
        )
    if model.downloading:
        said.append(
            f"{model.name}: {told(model.left_over)} of downloads that run or were interrupted"
        )
    return said
