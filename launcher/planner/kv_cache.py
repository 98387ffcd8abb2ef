"""How many tokens a KV cache of so many bytes holds.

Pure arithmetic, that of vLLM 0.32: `v1/core/kv_cache_utils.py` (groups, blocks, capacity),
`v1/kv_cache_interface.py` (the size of a page, and what one request needs), and
`platforms/interface.py` (`_align_hybrid_block_size`). Memory is laid out layer by layer, which is
the default (`v1/attention/backends/utils.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

from launcher.core.errors import RequestError
from launcher.planner.architecture import Architecture, Kind, Layer, Recurrent

# Bytes of an element, times 16 so that they stay whole. NVFP4 packs two values into a byte and adds
# a scale of one byte for sixteen (`kv_cache_interface.py`, KVQuantMode).
_SIXTEENTHS = {
    "auto": 32,
    "bfloat16": 32,
    "float16": 32,
    "half": 32,
    "float32": 64,
    "float": 64,
    "nvfp4": 9,
}
_SPARSE_FP8 = 656
_INDEXER_SCALE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """What decides about a cache besides the model: flags of `vllm serve`, and its defaults.

    `in_flight` is the most tokens that are scheduled and not yet settled (`max_in_flight_tokens`);
    `block` the tokens of a block, 0 for the backend's own; `states` how many requests must have a
    block each, of a model with recurrent layers.
    """

    tp: int = 1
    dcp: int = 1
    length: int
    in_flight: int
    block: int = 0
    dtype: str = "auto"
    prefix_caching: bool = True
    hybrid: bool = True
    states: int = 0


@dataclass(frozen=True, slots=True)
class _Spec:
    """One layer's cache: `page` bytes for `block` tokens. Layers with equal ones may be grouped."""

    kind: Kind
    window: int
    block: int
    page: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a table of blocks; `needs` is the blocks that a longest request takes."""

    spec: _Spec
    layers: tuple[int, ...]
    needs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A KV cache's shape: its groups, and the bytes of one block on each pipeline stage. An engine
    does not start with fewer blocks than `states`.
    """

    groups: tuple[Group, ...]
    block_bytes: tuple[int, ...]
    length: int
    states: int = 0

    @property
    def per_request(self) -> int:
        """Blocks that one request of the longest length takes."""
        return sum(group.needs for group in self.groups)

    def blocks(self, memory: Sequence[int]) -> int:
        """Return the blocks that fit: the poorest stage decides. `memory` is bytes for each."""
        pairs = zip(memory, self.block_bytes, strict=True)
        return max(0, min((have // each for have, each in pairs if each), default=0))

    def concurrency(self, blocks: int) -> float:
        """Return how many requests of the longest length so many blocks hold."""
        return blocks / self.per_request if self.per_request else 0.0

    def tokens(self, blocks: int) -> int:
        """Return what vLLM prints as "GPU KV cache size" (`get_kv_cache_capacity`)."""
        return int(self.concurrency(blocks) * self.length)

    def starts(self, memory: Sequence[int]) -> bool:
        """Tell whether a longest request fits on each stage, beside the block that is held back,
        and there is a block for each recurrent state.
        """
        return self.blocks(memory) >= self.states and all(
            have // each - 1 >= self.per_request
            for have, each in zip(memory, self.block_bytes, strict=True)
            if each
        )


def cache_of(model: Architecture, request: CacheRequest, stages: Sequence[int]) -> Cache:
    """Return the cache of a model whose pipeline stages have so many layers each.

    Raises:
        RequestError: a KV cache dtype whose layout is not known here.
    """
    if request.dtype not in _SIXTEENTHS and not request.dtype.startswith("fp8"):
        raise RequestError(
            f"the KV cache dtype {request.dtype} is not known to the planner",
            hint="use auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2 or nvfp4",
        )
    specs = _unified(_specs(model, request), request)
    groups = tuple(
        Group(specs[layers[0]], layers, _needs(specs[layers[0]], request))
        for layers in _grouped(specs)
    )
    ends = list(accumulate(stages))
    block_bytes = tuple(
        max(
            (sum(specs[at].page for at in group.layers if start <= at < end) for group in groups),
            default=0,
        )
        for start, end in zip([0, *ends], ends, strict=False)
    )
    states = request.states if any(spec.kind == "recurrent" for spec in specs.values()) else 0
    return Cache(groups=groups, block_bytes=block_bytes, length=request.length, states=states)


def state_bytes(state: Recurrent, tp: int) -> int:
    """Return the bytes of one request's state in one recurrent layer on one GPU."""
    groups = state.groups if state.groups % tp == 0 else tp if state.groups else 0
    channels = (state.channels + groups * state.group_channels) // tp
    memory = state.heads // tp * state.head_dim * state.state * state.state_bytes
    return channels * state.taps * 2 + memory


def _specs(model: Architecture, request: CacheRequest) -> dict[int, _Spec]:
    """Return the cache of each layer that keeps one, by the layer's number.

    Recurrent states lie in pages of the attention layers, whose blocks grow until one fits.
    """
    sizes = {
        at: _token_bytes(model, layer, request)
        for at, layer in enumerate(model.layers)
        if layer.kind not in ("none", "recurrent")
    }
    widest = max(sizes.values(), default=0)
    state = state_bytes(model.recurrent, request.tp) if model.recurrent else 0
    block = _block(model, request, state, widest)
    page = max(state, block * widest)
    return {
        at: _Spec(layer.kind, layer.window, block, block * sizes[at] if at in sizes else page)
        for at, layer in enumerate(model.layers)
        if layer.kind != "none"
    }


def _token_bytes(model: Architecture, layer: Layer, request: CacheRequest) -> int:
    """Return the bytes that one token takes in one layer on one GPU."""
    if latent := model.latent:
        dense = (latent.kv_rank + latent.rope) * _element(request.dtype) // 16
        if not latent.indexer:
            return dense
        main = _SPARSE_FP8 if request.dtype.startswith("fp8") else dense
        return main + latent.indexer + _INDEXER_SCALE
    heads = max(1, layer.kv_heads // request.tp)
    return heads * 2 * layer.head_dim * _element(request.dtype) // 16


def _block(model: Architecture, request: CacheRequest, state: int, token: int) -> int:
    """Return the tokens of a block: as many as a recurrent state needs, at so many bytes each."""
    block = request.block or (64 if model.latent else 16)
    if not state or not token:
        return block
    step = max(block, 128) if model.latent else block
    return max(block, step * -(-state // (step * token)))


def _unified(specs: Mapping[int, _Spec], request: CacheRequest) -> Mapping[int, _Spec]:
    """Make all pages equal, where layers of several kinds share blocks: smaller ones take more
    tokens a block, or padding (`unify_kv_cache_spec_page_size`). Without the hybrid manager local
    attention keeps all tokens.
    """
    if not request.hybrid and any(spec.kind == "full" for spec in specs.values()):
        specs = {at: _kept_whole(spec) for at, spec in specs.items()}
    if len({(spec.kind, spec.window) for spec in specs.values()}) < 2:
        return specs
    largest = max(spec.page for spec in specs.values())
    return {at: _grown(spec, largest) for at, spec in specs.items()}


def _element(dtype: str) -> int:
    """Return sixteenths of a byte for one element."""
    return _SIXTEENTHS.get(dtype, 16)


def _kept_whole(spec: _Spec) -> _Spec:
    return replace(spec, kind="full", window=0) if spec.kind in ("sliding", "chunked") else spec


def _grown(spec: _Spec, page: int) -> _Spec:
    """Return a cache with a page of this size: of more tokens, or padded."""
    times = page // spec.page if page % spec.page == 0 and spec.kind != "recurrent" else 1
    return replace(spec, page=page, block=spec.block * times)


def _grouped(specs: Mapping[int, _Spec]) -> list[tuple[int, ...]]:
    """Group layers (`_get_kv_cache_groups_uniform_page_size`): equally many in each group, as many
    as there are of the rarest kind, or of the commonest where that is less than half as many more.
    """
    kinds: dict[tuple[Kind, int], list[int]] = {}
    for at, spec in specs.items():
        kinds.setdefault((spec.kind, spec.window), []).append(at)
    counts = [len(layers) for layers in kinds.values()] or [1]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for layers in kinds.values():
        number = -(-len(layers) // size)
        groups += [tuple(layers[start::number]) for start in range(number)]
    return groups


def _needs(spec: _Spec, request: CacheRequest) -> int:
    """Return the blocks of one group that a request of the longest length takes."""
    if spec.kind == "recurrent":
        return 2 if request.prefix_caching else 1
    if spec.kind == "sliding":
        held = min(spec.window - 1 + request.in_flight, request.length)
        return -(-held // spec.block) + 1
    if spec.kind == "chunked":
        return -(-min(spec.window + request.in_flight, request.length) // spec.block)
    shard = -(-request.length // request.dcp)
    return -(-shard // spec.block)


def partition(layers: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each pipeline stage has: what is left over goes to those before the
    last (`get_pp_indices` in vLLM's `distributed/utils.py`).
    """
    counts = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        counts[-index] += 1
    return tuple(counts)


def copies(model: Architecture, tp: int) -> int:
    """Return how many GPUs of a TP group hold the same KV heads."""
    heads = model.kv_heads
    return tp // gcd(heads, tp) if heads and tp > heads else 1
