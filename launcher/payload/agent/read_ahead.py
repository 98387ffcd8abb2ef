"""Reads a model's files into the page cache while Python and vLLM start, which takes 10 to 30
seconds in which a disk that holds nothing else has nothing to do. Off unless the inventory asks for
it: on the disk of the images the start waits behind it (docs/performance.md).

Standard library only. Only files that vLLM would read on this node anyway are read, and nothing
where they would take more than half of the memory that is free.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate

from .wire import say

_CHUNK = 16 << 20
_SHARE = 0.5  # of the free memory that a model may take
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,5})\.")
_INDEX = "model.safetensors.index.json"


class ReadAhead:
    """A model's files on this node, which are read in a thread from now on until `stop`.

    `stages` are the first pipeline stage of this node's ranks, the one behind their last, and how
    many there are in all.
    """

    def __init__(self, name: str, model: str, stages: tuple[int, int, int]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(name, model, stages), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no further."""
        self._over.set()

    def join(self, seconds: float) -> bool:
        """Wait for its end; True when it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, name: str, model: str, stages: tuple[int, int, int]) -> None:
        with contextlib.suppress(OSError, ValueError):
            paths = files(folder(model), stages)
            size = sum(os.path.getsize(path) for path in paths)
            if not 0 < size <= _SHARE * _available():
                return
            say(f"{name}: reading {size / 2**30:.1f} GiB of {model} ahead")
            for path in paths:
                self._read(path)

    def _read(self, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, _CHUNK):
                if self._over.is_set():
                    return
                # The kernel reads all of it, and copies nothing; its last byte is there at last.
                os.posix_fadvise(file.fileno(), start, _CHUNK, os.POSIX_FADV_WILLNEED)
                os.pread(file.fileno(), 1, min(start + _CHUNK, size) - 1)


def folder(model: str) -> str:
    """Return where a model's files are on this node: its own path, or its snapshot in the Hugging
    Face cache (huggingface_hub, guides/manage-cache); empty where they are not.
    """
    if os.path.isdir(model):
        return model
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    repository = os.path.join(home, "hub", "models--" + model.replace("/", "--"))
    try:
        with open(os.path.join(repository, "refs", "main"), encoding="utf-8") as file:
            return os.path.join(repository, "snapshots", file.read().strip())
    except OSError:
        return ""


def files(folder: str, stages: tuple[int, int, int]) -> list[str]:
    """Return the weights that these stages load: all where nothing tells which."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))) if folder else []
    try:
        with open(os.path.join(folder, _INDEX), encoding="utf-8") as file:
            places = json.load(file)["weight_map"]
        own = _own({str(tensor): str(place) for tensor, place in places.items()}, stages)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    return [path for path in found if os.path.basename(path) in own]


def _own(places: dict[str, str], stages: tuple[int, int, int]) -> set[str]:
    """Return the files with tensors of these stages' layers, or of no layer, such as embeddings."""
    layers = {tensor: int(at[1]) for tensor in places if (at := _LAYER.search(tensor))}
    first, end, count = stages
    bounds = [0, *accumulate(split(max(layers.values(), default=-1) + 1, count))]
    mine = range(bounds[first], bounds[end])
    return {
        place for tensor, place in places.items() if tensor not in layers or layers[tensor] in mine
    }


def split(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has: those left over go to the last ones but one
    (`get_pp_indices` in vllm/distributed/utils.py).
    """
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    for at in range(2, rest + 2):
        sizes[-at] += 1
    return sizes


def _available() -> int:
    with open("/proc/meminfo", encoding="utf-8") as file:
        return _kib(file) * 1024


def _kib(lines: Iterable[str]) -> int:
    return next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def stages_of(
    ranks: Sequence[tuple[str, int]], stage: int, count: int
) -> dict[str, tuple[int, int, int]]:
    """Return each node's stages: `ranks` has how many ranks each holds, in order, `stage` how many
    one stage has, `count` how many stages a replica has.
    """
    found: dict[str, tuple[int, int, int]] = {}
    begun = 0
    for node, held in ranks:
        first, last = begun // stage, (begun + held - 1) // stage
        begun += held
        whole = last - first + 1 >= count or first // count != last // count
        found[node] = (0, count, count) if whole else (first % count, last % count + 1, count)
    return found
