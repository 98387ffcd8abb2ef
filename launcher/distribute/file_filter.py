"""Files of a model to download, chosen from those that the hub lists for a revision."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from launcher.core.errors import RequestError
from launcher.distribute.chain import Resolved, Seen
from launcher.distribute.node.files import Unsafe, safe

# The same weights in other forms, beside safetensors, which cannot contain code; and what vLLM
# does not read.
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.ot")
_BESIDE: Final = ("original/*", "consolidated*.safetensors", "*.tflite", "*.mlmodel", "*.gguf")
_WEIGHTS: Final = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class FileFilter:
    """Patterns of file names, of which one must match and none may. Without any: the weights in
    safetensors alone, and all files that are no weights. `every`: all files.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    every: bool = False


def choose(model: str, resolved: Resolved, wanted: FileFilter) -> tuple[tuple[str, int, str], ...]:
    """Return the files to download, each with its size and digest.

    Raises:
        RequestError: none is left; there are no safetensors, and other forms were not asked for;
            or a name leads out of the cache.
    """
    names = [row[0] for row in resolved.files]
    tensors = any(name.endswith(_WEIGHTS) and not _any(name, _BESIDE) for name in names)
    chosen = tuple(row for row in resolved.files if _matches(row[0], wanted, tensors))
    weights = [name for name in names if _any(name, (*_OTHER_WEIGHTS, "*.gguf"))]
    if not tensors and weights and not wanted.include and not wanted.every:
        raise RequestError(
            f"{model} has no weights in safetensors",
            evidence=weights[:5],
            hint="files of other forms may run code when they are loaded; if you trust them:"
            f" `vlaunch model pull {model} --all-files`, or name them with `--include`",
        )
    if not chosen:
        raise RequestError(f"no file of {model} is left", evidence=names[:5])
    for name, size, digest in chosen:
        _check(model, name, size, digest)
    return chosen


def _matches(name: str, wanted: FileFilter, tensors: bool) -> bool:
    if _any(name, wanted.exclude):
        return False
    if wanted.include:
        return _any(name, wanted.include)
    return wanted.every or not tensors or not _any(name, (*_OTHER_WEIGHTS, *_BESIDE))


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check(model: str, name: str, size: int, digest: str) -> None:
    """Raise RequestError for a file that cannot be stored safely."""
    try:
        safe(name)
    except Unsafe as error:
        raise RequestError(f"{model} has a file with a bad name", evidence=str(error)) from None
    if size < 0 or len(digest) not in (40, 64) or set(digest) - set("0123456789abcdef"):
        raise RequestError(f"the hub does not say what {name} of {model} is")


def holders(
    model: str, resolved: Resolved, rows: Sequence[tuple[str, int, str]], seen: dict[str, Seen]
) -> list[str]:
    """Return the nodes that have all chosen files of a revision, by their names and sizes."""
    wanted = {(f"blobs/{digest}", size) for _, size, digest in rows}
    return [
        node
        for node, each in seen.items()
        for found in each.models
        for revision in found.revisions
        if (found.name, revision.revision) == (model, resolved.revision)
        and not (revision.why or found.unfinished)
        and wanted <= {(row.name, row.size) for row in revision.rows}
    ]


def missing(rows: Sequence[tuple[str, int, str]], seen: Seen) -> int:
    """Return the bytes of the chosen files that a node lacks, of any revision."""
    blobs = {(f"blobs/{digest}", size) for _, size, digest in rows}
    stored = {
        (row.name, row.size)
        for found in seen.models
        for revision in found.revisions
        for row in revision.rows
    }
    return sum(size for _, size in blobs - stored)
