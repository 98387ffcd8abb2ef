"""`vlaunch model`: which models lie on which nodes, whether they are whole, and how to bring one
everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.model_pull import pull
from launcher.cli.model_push import push
from launcher.errors import NodeError, RequestError
from launcher.model import Node, fold

if TYPE_CHECKING:
    from launcher.cli.model_programs import Programs
    from launcher.cli.session import Session
    from launcher.tools.chain import Model, Revision, Seen, Verified

NODE = click.option(
    "-n",
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="Only on this node (may be given several times).",
)


@click.group()
def model() -> None:
    """Show which models lie on which nodes, compare them, bring one to all nodes, or remove it.

    A model is a name such as Qwen/Qwen3-8B, which is looked for in each node's Hugging Face cache
    (`hf_home`), or the path of a folder as containers see it.
    """


@command(
    "list",
    under=model,
    path=True,
    shows="none",
    flags=[options.JSON],
    short_help="what is where, whole or in part, how large, and when it was used",
)
@NODE
def list_(call: Call, nodes: tuple[str, ...]) -> int:
    """Show the models in the nodes' Hugging Face caches, and the folders beside them.

    A model is whole when nothing speaks against it: every file has its content, all files that its
    index names are there, and no copy or download is unfinished. Whether the bytes are right,
    `vlaunch model verify` says. The exit code is 1 when a node cannot be asked.
    """
    from launcher.cli.model_programs import Programs
    from launcher.ui import json_line
    from launcher.ui import models as ui
    from launcher.ui.terminal import say, show

    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        seen = Programs(session, picked).look() if len(session.missing) < len(picked) else {}
        remarks = [error.message for error in session.missing.values()]
    if call.as_json:
        click.echo(json_line.dumps(_as_json(call.inventory.cluster, seen, remarks)))
    elif not any(each.models for each in seen.values()) and not remarks:
        say("there is no model on these nodes")
    else:
        show(ui.render(seen, remarks))
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
    flags=[options.JSON],
    short_help="whether a model's bytes are still what was copied or published",
)
@click.argument("name", metavar="MODEL")
@click.option("--deep", is_flag=True, help="Read all bytes back from the disks.")
@NODE
def verify(call: Call, name: str, deep: bool, nodes: tuple[str, ...]) -> None:
    """Compare MODEL on every node with what is known of it.

    What `vlaunch model push` has copied is compared with the digests that were taken then: sizes,
    times and inodes of all files, and the bytes of 300 pieces, which find damage of one piece in a
    hundred with 95 %. With --deep all bytes are read. Files of a Hugging Face cache that nobody
    has compared before are compared with their names, which are digests, with --deep. Nodes are
    compared with each other by names and sizes.

    The exit code is 1 when something is missing, has changed, or has wrong bytes.
    """
    from launcher.cli.model_programs import Programs, check_path, missing_told
    from launcher.tools import chain

    check_path(call.inventory, name)
    picked = chosen(call.inventory, nodes)
    with call.session(partial=True, nodes=picked) as session:
        missing_told(session)
        programs = Programs(session, picked)
        seen = programs.look(name, files=True)
        found = _the_revisions(name, seen)
        session.begin("verify", f"Compare {name} on {fold(list(found))}")
        session.wait("verify", "reading")
        roots = {node.name: chain.root(programs.where(node), node, name) for node in programs.nodes}
        said = programs.ask(
            lambda node: chain.verify(roots[node.name], found[node.name].rows, deep=deep),
            chain.parse_verified,
            nodes=[node for node in programs.nodes if node.name in found],
            timeout=86400.0,
        )
        _tell_verified(session, name, found, said, [each for each in seen if each not in found])


def _the_revisions(name: str, seen: Mapping[str, Seen]) -> dict[str, Revision]:
    """Return what each node has of a model: `main`, or the only revision; raises RequestError."""
    found: dict[str, Revision] = {}
    for node, each in seen.items():
        there = next((one for one in each.models if one.name == name), None)
        if there is None or not there.revisions:
            continue
        main = there.refs.get("main", "")
        match = [one for one in there.revisions if one.revision == main]
        found[node] = (match or list(there.revisions))[0]
    if not found:
        raise RequestError(f"no node has {name}", hint="see what is where: `vlaunch model list`")
    return found


def _tell_verified(
    session: Session,
    name: str,
    found: Mapping[str, Revision],
    said: Mapping[str, Verified],
    without: Sequence[str],
) -> None:
    """Show what each node has said; raises NodeError when a copy is not what it should be."""
    from launcher.sizes import told

    for node, each in said.items():
        data = asdict(each)
        compared = f"{told(each.bytes)} of {told(found[node].size)} read in {each.seconds:.1f}s"
        if each.bad:
            session.step(
                "verify", f"{_names(each.bad)} differ; {compared}", node=node, state="failed"
            )
        elif each.unproven:
            text = (
                f"{_names(each.unproven)}: nobody has compared these before, and nobody says what"
                f" they should be; {compared}"
            )
            session.note("verify", text, node=node, state="warn", data=data)
        else:
            session.note(
                "verify",
                f"all {each.files} files are right; {compared}",
                node=node,
                state="ok",
                data=data,
            )
    differing = _differing(found)
    if without:
        session.note("verify", f"{name} is not there", node=fold(list(without)))
    bad = {node: each for node, each in said.items() if each.bad}
    if bad:
        good = next((node for node in said if node not in bad), "")
        again = " ".join(f"--to {node}" for node in bad)
        line = f"vlaunch model push {name} --from {good} --compare {again}"
        hint = f"copy what differs: `{line}`" if good else ""
        raise NodeError(
            fold(list(bad)),
            f"{name} is not what it was",
            evidence=[f"{node}: {_why(each)}" for node, each in bad.items()],
            hint=hint,
        )
    first = next(iter(found))
    if differing:
        raise NodeError(
            fold(list(found)),
            f"{name} is not the same everywhere",
            evidence=differing,
            hint=f"bring one of them everywhere: `vlaunch model push {name} --from {first}`",
        )
    session.done(f"{name} is right on {fold(list(said))}", stage="verify")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _why(each: Verified) -> str:
    parts = {
        "missing": each.missing,
        "changed since it was compared": each.changed,
        "wrong bytes": each.wrong,
    }
    return "; ".join(f"{what}: {_names(names)}" for what, names in parts.items() if names)


def _differing(found: Mapping[str, Revision]) -> list[str]:
    """Say how nodes differ in revision, names or sizes; empty where they do not."""
    kinds = {
        (each.revision, tuple(sorted((row.name, row.size) for row in each.rows)))
        for each in found.values()
    }
    if len(kinds) < 2:
        return []
    from launcher.sizes import told

    return [
        f"{node}: {f'revision {each.revision[:12]}, ' if each.revision else ''}{each.count} files,"
        f" {told(each.size)}"
        for node, each in found.items()
    ]


@command(
    under=model,
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="remove a model from the nodes",
)
@click.argument("name", metavar="MODEL")
@NODE
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(call: Call, name: str, nodes: tuple[str, ...], yes: bool) -> None:
    """Remove MODEL from every node, or from those that are named: all its revisions, unfinished
    copies and downloads, and what is written down of them.

    A model that a server of the cluster uses stays.
    """
    from launcher.cli.model_programs import Programs, check_path, missing_told
    from launcher.tools import chain

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
        _confirm(ours, there, name, yes=yes)
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
    from launcher.tools import chain

    root = chain.root(programs.where(node), node, name)
    if chain.is_path(name):
        return [root]
    hub, _, folder = root.rpartition("/")
    return [root, f"{hub}/.locks/{folder}"]


def _refuse_served(session: Session, programs: Programs, name: str) -> None:
    """Raise RequestError when a server of the cluster uses a model."""
    from launcher.cli import server
    from launcher.state import servers

    if session.inventory.head.name in session.missing or not programs.site.head_runs:
        return
    seen = server.look(session, head_only=True)
    used = [each for each in servers.read(seen.said).running if each.model == name]
    if used:
        raise RequestError(f"{used[0].what} uses {name}", hint="stop it first: `vlaunch stop`")


def _print_removal(there: Sequence[Node], seen: Mapping[str, Seen], name: str) -> None:
    from launcher.sizes import told

    for node in there:
        each = next(one for one in seen[node.name].models if one.name == name)
        size = sum(one.size for one in each.revisions) + each.unfinished + each.left_over
        click.echo(f"{node.name}: {each.root} would be removed, {told(size)}")


def _confirm(session: Session, there: Sequence[Node], name: str, *, yes: bool) -> None:
    if yes:
        return
    where = fold([node.name for node in there])
    if not sys.stdin.isatty():
        raise RequestError(
            f"nobody can be asked whether {name} may be removed from {where}",
            hint=f"say it: `vlaunch model remove {name} --yes`",
        )
    with session.to.paused():
        click.confirm(f"Remove {name} from {where}?", abort=True, err=True)


def _tell_removed(session: Session, name: str, freed: Mapping[str, int]) -> None:
    from launcher.sizes import told

    text = f"{name} is removed from {fold(list(freed))}: {told(sum(freed.values()))} in all"
    session.done(text, stage="model", data={"freed": dict(freed)})


model.add_command(push)
model.add_command(pull)
