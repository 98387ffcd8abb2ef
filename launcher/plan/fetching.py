"""Which files of a model are downloaded, and where they belong in Hugging Face's cache: decided
from what the hub says of a revision.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from launcher.errors import RequestError
from launcher.payload.chain.files import File, Manifest, Unsafe, safe
from launcher.plan.copying import MAIN, Copying, chunk, in_order
from launcher.sizes import told
from launcher.tools.chain import Resolved, Seen

# The same weights in other forms, beside safetensors, which cannot bring code along; and what
# vLLM does not read.
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.ot")
_BESIDE: Final = ("original/*", "consolidated*.safetensors", "*.tflite", "*.mlmodel", "*.gguf")
_WEIGHTS: Final = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What of a model is wanted: patterns of names, of which one must match and none may; without
    any, the weights in safetensors alone, and what is no weights. `every`: all files.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    every: bool = False


def choose(model: str, found: Resolved, wish: Wish) -> tuple[tuple[str, int, str], ...]:
    """Return the files to download, each with its size and digest.

    Raises:
        RequestError: none is left; there are no safetensors, and other forms were not asked for;
            or a name leads out of the cache.
    """
    names = [row[0] for row in found.files]
    tensors = any(name.endswith(_WEIGHTS) and not _any(name, _BESIDE) for name in names)
    picked = tuple(row for row in found.files if _wanted(row[0], wish, tensors))
    weights = [name for name in names if _any(name, (*_OTHER_WEIGHTS, "*.gguf"))]
    if not tensors and weights and not wish.include and not wish.every:
        raise RequestError(
            f"{model} has no weights in safetensors",
            evidence=[f"{name}" for name in weights[:5]],
            hint="files of other forms may run code when they are loaded; if you trust them:"
            f" `vlaunch model pull {model} --all-files`, or name them with `--include`",
        )
    if not picked:
        raise RequestError(f"no file of {model} is left", evidence=names[:5])
    for name, size, digest in picked:
        _check(model, name, size, digest)
    return picked


def _wanted(name: str, wish: Wish, tensors: bool) -> bool:
    if _any(name, wish.exclude):
        return False
    if wish.include:
        return _any(name, wish.include)
    return wish.every or not tensors or not _any(name, (*_OTHER_WEIGHTS, *_BESIDE))


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


def _check(model: str, name: str, size: int, digest: str) -> None:
    """Raise RequestError for what would not be written as it should."""
    try:
        safe(name)
    except Unsafe as error:
        raise RequestError(f"{model} has a file with a bad name", evidence=str(error)) from None
    if size < 0 or len(digest) not in (40, 64) or set(digest) - set("0123456789abcdef"):
        raise RequestError(f"the hub does not say what {name} of {model} is")


def plan_fetch(
    model: str,
    found: Resolved,
    rows: Sequence[tuple[str, int, str]],
    *,
    source: str,
    targets: Sequence[str],
    revision: str = "",
) -> Copying:
    """Return the copy from the node that downloads to the others, file by file as each is there."""
    blobs = {digest: File(f"blobs/{digest}", size, 0, digest) for _, size, digest in rows}
    # Small ones first: the large ones take the time, and what is small is soon everywhere.
    files = sorted(blobs.values(), key=lambda each: each.size)
    total = sum(each.size for each in files)
    base = f"snapshots/{found.revision}"
    name = revision if revision and revision != found.revision else MAIN
    return Copying(
        model=model,
        revision=found.revision,
        source=source,
        targets=in_order((each for each in targets if each != source), source),
        complete=(),
        manifest=Manifest(files, chunk(total)),
        links=tuple((f"{base}/{path}", f"blobs/{digest}") for path, _, digest in rows),
        refs=((f"refs/{name}", found.revision),),
        missing={each: total for each in targets if each != source},
        order=tuple(targets),
    )


def check_room(model: str, seen: Seen, node: str, copying: Copying) -> None:
    """Raise RequestError when a node has too little room for what it lacks of a model."""
    there = {
        row.name: row.size
        for each in seen.models
        if each.name == model
        for one in each.revisions
        for row in one.rows
    }
    begun = sum(each.unfinished for each in seen.models if each.name == model)
    need = sum(each.size for each in copying.manifest.files if there.get(each.name) != each.size)
    if (need - begun) * 1.02 > seen.free:
        raise RequestError(
            f"{node} has too little room for {model}",
            evidence=f"{told(need)} are missing there, {told(seen.free)} free",
            hint="see what could go: `vlaunch model list`",
        )
