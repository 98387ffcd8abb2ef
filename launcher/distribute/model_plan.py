"""Plan of a copy of a model: source, order and missing files, decided from what the nodes have
before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.domain import fold, natural
from launcher.core.errors import RequestError
from launcher.core.sizes import told
from launcher.distribute.chain import HERE, Model, Revision, Seen
from launcher.distribute.node.files import File, Manifest

MAIN: Final = "main"
_CHUNK, _LARGE_CHUNK = 2**20, 4 * 2**20
_LARGE = 2**34  # bytes from which larger chunks cost less work
_MARGIN: Final = 1.02  # how much more room than the missing bytes there must be


@dataclass(frozen=True, kw_only=True)
class Copying:
    """One copy to be: `source` has the files, `targets` get them in this order.

    `manifest` is what is copied, `links` and `refs` what is made of it at the end; `missing` are
    the bytes that each target lacks, as well as names and sizes tell, `complete` the nodes that
    have all of it already, and `order` is all nodes in the inventory's.
    """

    model: str
    revision: str
    source: str
    targets: tuple[str, ...]
    complete: tuple[str, ...]
    manifest: Manifest
    links: tuple[tuple[str, str], ...]
    refs: tuple[tuple[str, str], ...]
    missing: Mapping[str, int]
    order: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the copy's record on the nodes."""
        return self.revision or "files"


def plan_copy(
    model: str,
    seen: Mapping[str, Seen],
    *,
    source: str = "",
    revision: str = "",
    targets: Sequence[str] = (),
    compare: bool = False,
    partial: bool = False,
) -> Copying:
    """Return the copy that brings a model to all nodes, or to `targets`.

    Args:
        model: its name, or its folder's path.
        seen: what each node has of it, with its files.
        source: the node to copy from; by default the first one that has all of it.
        revision: a commit, or the name of one; `main` by default.
        targets: nodes that shall have it.
        compare: names, sizes and times are no reason to leave a node out.
        partial: the source may have only some files of the model.

    Raises:
        RequestError: nobody has it, nodes differ in what it is, or there is no room.
    """
    has = {name: there for name, each in seen.items() if (there := _found(each, model, revision))}
    if not (partial and source in has):
        source = _source(model, revision, has, source, seen)
    kind, found = has[source]
    rows = found.rows
    wanted = tuple(name for name in (targets or seen) if name != source)
    missing = {name: _missing(rows, has.get(name)) for name in wanted}
    lacking = tuple(name for name in wanted if compare or not _same(found, has.get(name)))
    # Who has most goes first, for it can serve the others.
    order = tuple(sorted(in_order(lacking, source), key=lambda name: missing[name]))
    check_room(seen, {name: missing[name] for name in order})
    total = sum(each.size for each in rows)
    try:
        manifest = Manifest(list(rows), chunk(total))
    except ValueError as error:
        text, hint = f"{source} names a file of {model} that cannot be copied", "try `--from NODE`"
        raise RequestError(text, evidence=str(error), hint=hint) from None
    return Copying(
        model=model,
        revision=found.revision,
        source=source,
        targets=order,
        complete=tuple(name for name in seen if name == source or name in {*wanted} - {*order}),
        manifest=manifest,
        links=found.links,
        refs=tuple(
            sorted({(f"refs/{name}", found.revision) for name in _refs(kind, found, revision)})
        ),
        missing={name: missing[name] for name in order},
        order=tuple(seen),
    )


def in_order(names: Iterable[str], source: str) -> tuple[str, ...]:
    """Return nodes as they follow the source in a chain: by their names, numbers as numbers, from
    the one after the source round to the one before it.

    Nodes of a rack mostly have names that follow each other. The link to a rack, which its nodes
    share, then carries a copy once inwards and once outwards.
    """
    ordered = sorted(names, key=natural)
    if source == HERE:
        return tuple(ordered)
    after = [name for name in ordered if natural(name) > natural(source)]
    return (*after, *ordered[: len(ordered) - len(after)])


def chunk(total: int) -> int:
    """Return the bytes of a chunk: what a node holds back before the next one gets it, so small
    against the whole, and not so small that each one's own work is felt.
    """
    return _LARGE_CHUNK if total > _LARGE else _CHUNK


def _found(seen: Seen, model: str, revision: str) -> tuple[Model, Revision] | None:
    """Return a model of a node, in the revision that is meant; None where it has nothing of it."""
    there = next((each for each in seen.models if each.name == model), None)
    if there is None:
        return None
    commit = "" if there.kind == "plain" else there.refs.get(revision or MAIN, revision)
    match = next((each for each in there.revisions if each.revision == commit), None)
    return None if match is None else (there, match)


def whole_on(model: str, stores: Mapping[str, Seen]) -> tuple[str, ...]:
    """Return the nodes that have all of a model."""
    return tuple(
        name
        for name, store in stores.items()
        if (match := _found(store, model, "")) and _is_whole(*match)
    )


def _source(
    model: str,
    revision: str,
    has: Mapping[str, tuple[Model, Revision]],
    source: str,
    seen: Mapping[str, Seen],
) -> str:
    """Return the node to copy from; raises RequestError."""
    whole = {name: found for name, found in has.items() if _is_whole(*found)}
    if source:
        if source not in whole:
            raise RequestError(
                f"{source} does not have {_named(model, revision)}",
                evidence=_partial(has.get(source)),
                hint="see what is where: `vlaunch model list`",
            )
        return source
    if not whole:
        evidence = [f"{name}: {_partial(found)}" for name, found in has.items()]
        raise RequestError(
            f"no node has {_named(model, revision)}"
            + (", or not all of it" if has else f" ({fold(list(seen))} were asked)"),
            evidence=evidence,
            hint="see what is where: `vlaunch model list`; a folder of this machine is copied with"
            " `vlaunch model copy ./FOLDER`",
        )
    first = next(iter(whole))
    others = [
        name
        for name, (_, found) in whole.items()
        if found.revision != whole[first][1].revision or _differs(found, whole[first][1])
    ]
    if others:
        raise RequestError(
            f"{model} is not the same on {fold([first, *others])}",
            evidence=[
                f"{name}: {found.revision or f'{found.count} files'}, {told(found.size)}"
                for name, (_, found) in whole.items()
            ],
            hint=f"say whose it shall be: `vlaunch model copy {model} --from {first}`",
        )
    return first


def _is_whole(model: Model, found: Revision) -> bool:
    return not found.why and not model.unfinished


def _partial(found: tuple[Model, Revision] | None) -> str:
    if found is None:
        return "nothing of it is there"
    model, revision = found
    return revision.why or (
        f"an unfinished copy, {told(model.unfinished)} so far" if model.unfinished else ""
    )


def _named(model: str, revision: str) -> str:
    return f"{model} in revision {revision}" if revision else model


def _differs(one: Revision, other: Revision) -> bool:
    return {(each.name, each.size) for each in one.rows} != {
        (each.name, each.size) for each in other.rows
    }


def _same(source: Revision, target: tuple[Model, Revision] | None) -> bool:
    """True when a target has the files already, as well as names, sizes and times tell."""
    if target is None or target[0].unfinished:
        return False
    wanted, there = _marks(source.rows), _marks(target[1].rows)
    refs = target[0].kind == "plain" or source.revision in target[0].refs.values()
    return refs and wanted <= there and set(source.links) <= set(target[1].links)


def _marks(rows: Sequence[File]) -> set[tuple[str, int, int]]:
    """Return keys of files: a blob's name is its digest, of others the time of change counts."""
    return {(each.name, each.size, 0 if each.sum else each.mtime) for each in rows}


def _missing(rows: Sequence[File], target: tuple[Model, Revision] | None) -> int:
    there = _marks(target[1].rows) if target is not None else set()
    return sum(each.size for each in rows if not _marks([each]) <= there)


def check_room(seen: Mapping[str, Seen], missing: Mapping[str, int]) -> None:
    """Raise RequestError when a node has too little room for what it lacks."""
    tight = [
        name
        for name, size in missing.items()
        if size * _MARGIN > seen[name].free + sum(each.unfinished for each in seen[name].models)
    ]
    if tight:
        raise RequestError(
            f"{fold(tight)} has too little room",
            evidence=[
                f"{name}: {told(missing[name])} are missing there, {told(seen[name].free)} free"
                for name in tight
            ],
            hint="see what could go: `vlaunch model list`, then `vlaunch model remove MODEL"
            " --node NODE`; or name the others with `--to NODE`",
        )


def _refs(model: Model, found: Revision, revision: str) -> list[str]:
    """Return the names under which a copied revision shall be found."""
    if model.kind == "plain":
        return []
    own = [name for name, commit in model.refs.items() if commit == found.revision]
    asked = [revision] if revision and revision != found.revision else []
    return [*own, *asked] or [MAIN]
