"""Plan of a model copy: source, order and missing files, decided from the nodes' models before
anything is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.domain import fold, natural_key
from launcher.core.errors import RequestError
from launcher.core.sizes import format_size
from launcher.distribute.chain import THIS_MACHINE, NodeModels, Revision, StoredModel
from launcher.distribute.node.files import CopyManifest, ManifestFile

_Copy = tuple[StoredModel, Revision]
MAIN: Final = "main"
_CHUNK, _LARGE_CHUNK = 2**20, 4 * 2**20
_LARGE = 2**34  # bytes; larger models get larger chunks
_MARGIN: Final = 1.02  # space required per missing byte


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """A copy of `manifest` from `source` to `targets`, in this order.

    `links` and `refs` are created at the end. `missing_bytes` of each target are estimated from
    names and sizes; `complete_nodes` have all files already, and `all_nodes` follow the inventory's
    order.
    """

    model: str
    revision: str
    source: str
    targets: tuple[str, ...]
    complete_nodes: tuple[str, ...]
    manifest: CopyManifest
    links: tuple[tuple[str, str], ...]
    refs: tuple[tuple[str, str], ...]
    missing_bytes: Mapping[str, int]
    all_nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the copy's record on the nodes."""
        return self.revision or "files"


def plan_copy(
    model: str,
    stores: Mapping[str, NodeModels],
    *,
    source: str = "",
    revision: str = "",
    targets: Sequence[str] = (),
    compare: bool = False,
    partial: bool = False,
) -> CopyPlan:
    """Plan a copy of a model to all nodes, or to `targets`.

    Args:
        model: its name, or its folder's path.
        stores: the nodes' models, with their files.
        source: the node to copy from; by default the first one with a complete copy.
        revision: a commit, or a ref; by default `main`.
        targets: nodes to copy to.
        compare: do not skip nodes whose files have the same names, sizes and times.
        partial: the source may lack files of the model.

    Raises:
        RequestError: no node has the model, the nodes' copies differ, or there is no space.
    """
    matches = {name: _find_revision(store, model, revision) for name, store in stores.items()}
    copies = {name: match for name, match in matches.items() if match is not None}
    if not (partial and source in copies):
        source = _choose_source(model, revision, copies, source, stores)
    entry, selected = copies[source]
    files = selected.unique_files
    names = tuple(name for name in (targets or stores) if name != source)
    missing = {name: _missing_bytes(files, copies.get(name)) for name in names}
    receivers = [name for name in names if compare or not _is_current(selected, copies.get(name))]
    # A node that has more of the files comes first, because it can serve the others.
    order = tuple(sorted(chain_order(receivers, source), key=lambda name: missing[name]))
    check_space(stores, {name: missing[name] for name in order})
    total = sum(file.size for file in files)
    try:
        manifest = CopyManifest(list(files), choose_chunk_size(total))
    except ValueError as error:
        text, hint = f"{source} names a file of {model} that cannot be copied", "try `--from NODE`"
        raise RequestError(text, evidence=str(error), hint=hint) from None
    refs = {(f"refs/{name}", selected.revision) for name in _ref_names(entry, selected, revision)}
    return CopyPlan(
        model=model,
        revision=selected.revision,
        source=source,
        targets=order,
        complete_nodes=tuple(name for name in stores if name in {source, *names} - {*order}),
        manifest=manifest,
        links=selected.links,
        refs=tuple(sorted(refs)),
        missing_bytes={name: missing[name] for name in order},
        all_nodes=tuple(stores),
    )


def chain_order(names: Iterable[str], source: str) -> tuple[str, ...]:
    """Sort nodes into the order of a chain: by name, numbers as numbers, from the one after the
    source around to the one before it.

    Nodes of one rack mostly have consecutive names. The shared link of a rack then carries the data
    once in and once out.
    """
    ordered = sorted(names, key=natural_key)
    if source == THIS_MACHINE:
        return tuple(ordered)
    after = [name for name in ordered if natural_key(name) > natural_key(source)]
    return (*after, *ordered[: len(ordered) - len(after)])


def choose_chunk_size(total: int) -> int:
    """Return the bytes of a chunk: each node passes on whole chunks, so they are small compared
    with the total, but large enough that the overhead per chunk does not matter.
    """
    return _LARGE_CHUNK if total > _LARGE else _CHUNK


def _find_revision(store: NodeModels, model: str, revision: str) -> _Copy | None:
    """Find a model on a node in a revision, by default `main`; None without it."""
    stored = next((item for item in store.models if item.name == model), None)
    if stored is None:
        return None
    commit = "" if stored.kind == "plain" else stored.refs.get(revision or MAIN, revision)
    match = next((item for item in stored.revisions if item.revision == commit), None)
    return None if match is None else (stored, match)


def complete_nodes(model: str, stores: Mapping[str, NodeModels]) -> tuple[str, ...]:
    """Return the nodes with a complete copy of a model."""
    return tuple(
        name
        for name, store in stores.items()
        if (match := _find_revision(store, model, "")) and _is_complete(*match)
    )


def _choose_source(
    model: str,
    revision: str,
    copies: Mapping[str, _Copy],
    source: str,
    stores: Mapping[str, NodeModels],
) -> str:
    """Return the node to copy from; raises RequestError."""
    complete = {name: copy for name, copy in copies.items() if _is_complete(*copy)}
    if source:
        if source not in complete:
            raise RequestError(
                f"{source} does not have {_format_model(model, revision)}",
                evidence=_describe_partial(copies.get(source)),
                hint="list the models: `vlaunch model list`",
            )
        return source
    if not complete:
        evidence = [f"{name}: {_describe_partial(copy)}" for name, copy in copies.items()]
        raise RequestError(
            f"no node has {_format_model(model, revision)}"
            + (" completely" if copies else f" (checked: {fold(list(stores))})"),
            evidence=evidence,
            hint="list the models: `vlaunch model list`; to copy a folder of this machine:"
            " `vlaunch model copy ./FOLDER`",
        )
    first = next(iter(complete))
    others = [
        name
        for name, (_, copy) in complete.items()
        if copy.revision != complete[first][1].revision or _files_differ(copy, complete[first][1])
    ]
    if others:
        raise RequestError(
            f"{model} differs between {fold([first, *others])}",
            evidence=[
                f"{name}: {copy.revision or f'{copy.count} files'}, {format_size(copy.size)}"
                for name, (_, copy) in complete.items()
            ],
            hint=f"choose the source: `vlaunch model copy {model} --from {first}`",
        )
    return first


def _is_complete(model: StoredModel, revision: Revision) -> bool:
    return not revision.why and not model.unfinished


def _describe_partial(copy: _Copy | None) -> str:
    if copy is None:
        return "none of its files"
    model, revision = copy
    return revision.why or (
        f"an incomplete copy, {format_size(model.unfinished)} so far" if model.unfinished else ""
    )


def _format_model(model: str, revision: str) -> str:
    return f"{model} in revision {revision}" if revision else model


def _files_differ(revision: Revision, other: Revision) -> bool:
    sizes = {(file.name, file.size) for file in revision.unique_files}
    return sizes != {(file.name, file.size) for file in other.unique_files}


def _is_current(source: Revision, target: _Copy | None) -> bool:
    """True when a target has the files already, judged by names, sizes and times."""
    if target is None or target[0].unfinished:
        return False
    required, present = _file_keys(source.unique_files), _file_keys(target[1].unique_files)
    refs = target[0].kind == "plain" or source.revision in target[0].refs.values()
    return refs and required <= present and set(source.links) <= set(target[1].links)


def _file_keys(files: Sequence[ManifestFile]) -> set[tuple[str, int, int]]:
    """Return comparison keys: with the time of change, except for blobs, named by their digests."""
    return {(file.name, file.size, 0 if file.digest else file.mtime) for file in files}


def _missing_bytes(files: Sequence[ManifestFile], target: _Copy | None) -> int:
    present = _file_keys(target[1].unique_files) if target is not None else set()
    return sum(file.size for file in files if not _file_keys([file]) <= present)


def check_space(stores: Mapping[str, NodeModels], missing: Mapping[str, int]) -> None:
    """Raise RequestError when a node has too little space for its missing bytes."""
    full_nodes = [
        name
        for name, size in missing.items()
        if size * _MARGIN > stores[name].free + sum(m.unfinished for m in stores[name].models)
    ]
    if full_nodes:
        raise RequestError(
            f"{fold(full_nodes)} has too little disk space",
            evidence=[
                f"{name}: {format_size(missing[name])} missing, {format_size(stores[name].free)}"
                " free"
                for name in full_nodes
            ],
            hint="free space: `vlaunch model list`, then `vlaunch model remove MODEL --node"
            " NODE`; or copy only to other nodes with `--to NODE`",
        )


def _ref_names(model: StoredModel, selected: Revision, revision: str) -> list[str]:
    """Return the refs that point to the copied revision."""
    if model.kind == "plain":
        return []
    current = [name for name, commit in model.refs.items() if commit == selected.revision]
    requested = [revision] if revision and revision != selected.revision else []
    return [*current, *requested] or [MAIN]
