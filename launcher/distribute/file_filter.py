"""Files of a model to download, chosen from those that the hub lists for a revision."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.errors import RequestError
from launcher.distribute.chain import NodeModels, Resolved
from launcher.distribute.node.files import UnsafeName, safe_name

# The same weights in other formats, which unlike safetensors may contain code; and files that vLLM
# does not read.
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.ot")
_UNREAD: Final = ("original/*", "consolidated*.safetensors", "*.tflite", "*.mlmodel", "*.gguf")
_WEIGHTS: Final = ".safetensors"
_Row = tuple[str, int, str]  # a file's name, bytes and digest


@dataclass(frozen=True, kw_only=True)
class FileFilter:
    """Patterns of file names: one of `include` must match, and none of `exclude`. Without patterns:
    weights as safetensors only, and all files that are not weights. `every`: all files.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    every: bool = False


def select_files(model: str, resolved: Resolved, file_filter: FileFilter) -> tuple[_Row, ...]:
    """Return the files to download, each with its size and digest.

    Raises:
        RequestError: no file is left; the model has no safetensors, and other formats were not
            requested; or a name leads out of the cache.
    """
    names = [row[0] for row in resolved.files]
    read = [name for name in names if not _matches_any(name, _UNREAD)]
    tensors = any(name.endswith(_WEIGHTS) for name in read)
    chosen = tuple(row for row in resolved.files if _matches(row[0], file_filter, tensors))
    weights = [name for name in names if _matches_any(name, (*_OTHER_WEIGHTS, "*.gguf"))]
    if not tensors and weights and not file_filter.include and not file_filter.every:
        raise RequestError(
            f"{model} has no weights in safetensors",
            evidence=weights[:5],
            hint=f"if you trust this model, run `vlaunch model pull {model} --all-files`, or"
            " select files with `--include`: other formats may run code when loaded",
        )
    if not chosen:
        raise RequestError(f"the filters exclude every file of {model}", evidence=names[:5])
    for name, size, digest in chosen:
        _check_file(model, name, size, digest)
    return chosen


def _matches(name: str, file_filter: FileFilter, tensors: bool) -> bool:
    if _matches_any(name, file_filter.exclude):
        return False
    if file_filter.include:
        return _matches_any(name, file_filter.include)
    return file_filter.every or not tensors or not _matches_any(name, (*_OTHER_WEIGHTS, *_UNREAD))


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_file(model: str, name: str, size: int, digest: str) -> None:
    """Raise RequestError for a file that cannot be stored safely."""
    try:
        safe_name(name)
    except UnsafeName as error:
        raise RequestError(f"{model} has an invalid file name", evidence=str(error)) from None
    if size < 0 or len(digest) not in (40, 64) or set(digest) - set("0123456789abcdef"):
        raise RequestError(f"the hub gives no valid size and digest of {name} in {model}")


def nodes_with_files(
    model: str, resolved: Resolved, rows: Sequence[_Row], stores: dict[str, NodeModels]
) -> list[str]:
    """Return the nodes that have all selected files of a revision, by name and size."""
    required = {(f"blobs/{digest}", size) for _, size, digest in rows}
    return [
        node
        for node, store in stores.items()
        for stored in store.models
        for revision in stored.revisions
        if (stored.name, revision.revision) == (model, resolved.revision)
        and not (revision.why or stored.unfinished)
        and required <= {(row.name, row.size) for row in revision.unique_files}
    ]


def missing_bytes(rows: Sequence[_Row], store: NodeModels) -> int:
    """Return the bytes of the selected files that a node has in no revision."""
    blobs = {(f"blobs/{digest}", size) for _, size, digest in rows}
    present = {
        (row.name, row.size)
        for stored in store.models
        for revision in stored.revisions
        for row in revision.unique_files
    }
    return sum(size for _, size in blobs - present)
