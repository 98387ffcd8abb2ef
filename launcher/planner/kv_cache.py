"""Capacity of a KV cache in tokens, from its size in bytes.

Pure arithmetic, that of vLLM 0.32: `v1/core/kv_cache_utils.py` (groups, blocks, capacity),
`v1/kv_cache_interface.py` (the size of a page, and the blocks of one request), and
`platforms/interface.py` (`_align_hybrid_block_size`). Memory is laid out layer by layer, which is
the default (`v1/attention/backends/utils.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

from launcher.core.errors import RequestError
from launcher.planner.architecture import Architecture, Kind, Layer, Recurrent

# Integer sixteenths of a byte per element. NVFP4 packs two values into a byte and adds a scale of
# one byte for sixteen (`kv_cache_interface.py`, KVQuantMode).
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
    """Settings that decide a cache besides the model: flags of `vllm serve`, and its defaults.

    `in_flight` is the maximum of tokens scheduled but not yet settled (`max_in_flight_tokens`);
    `block` the tokens of a block, 0 for the backend's own; `states` the number of requests that
    must have a block each, for a model with recurrent layers.
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
class _LayerCache:
    """One layer's cache: `page` bytes for `block` tokens. Layers with equal ones may be grouped."""

    kind: Kind
    window: int
    block: int
    page: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table; `request_blocks` is the blocks of a longest request."""

    spec: _LayerCache
    layers: tuple[int, ...]
    request_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Shape of a KV cache: its groups, and the bytes of one block on each pipeline stage. An engine
    does not start with fewer blocks than `states`.
    """

    groups: tuple[CacheGroup, ...]
    block_bytes: tuple[int, ...]
    length: int
    states: int = 0

    @property
    def per_request(self) -> int:
        """Blocks of one request of the longest length."""
        return sum(group.request_blocks for group in self.groups)

    def blocks(self, memory: Sequence[int]) -> int:
        """Return the blocks that fit on the stage with the fewest; `memory` is bytes per stage."""
        stages = zip(memory, self.block_bytes, strict=True)
        return max(0, min((available // block for available, block in stages if block), default=0))

    def concurrency(self, blocks: int) -> float:
        """Return the number of requests of the longest length that the blocks hold."""
        return blocks / self.per_request if self.per_request else 0.0

    def tokens(self, blocks: int) -> int:
        """Return the figure that vLLM prints as "GPU KV cache size" (`get_kv_cache_capacity`)."""
        return int(self.concurrency(blocks) * self.length)

    def can_start(self, memory: Sequence[int]) -> bool:
        """True if a longest request, the reserved block and all recurrent states fit."""
        return self.blocks(memory) >= self.states and all(
            available // block - 1 >= self.per_request
            for available, block in zip(memory, self.block_bytes, strict=True)
            if block
        )


def build_cache(model: Architecture, request: CacheRequest, stages: Sequence[int]) -> KvCache:
    """Return the cache of a model; `stages` is the layers of each pipeline stage.

    Raises:
        RequestError: the planner does not know the layout of this KV cache dtype.
    """
    if request.dtype not in _SIXTEENTHS and not request.dtype.startswith("fp8"):
        raise RequestError(
            f"unknown KV cache dtype {request.dtype}",
            hint="use auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2 or nvfp4",
        )
    specs = _unify_pages(_layer_caches(model, request), request)
    groups = tuple(
        CacheGroup(specs[layers[0]], layers, _blocks_per_request(specs[layers[0]], request))
        for layers in _group_layers(specs)
    )
    ends = list(accumulate(stages))
    block_bytes = tuple(
        max(
            (
                sum(specs[layer].page for layer in group.layers if start <= layer < end)
                for group in groups
            ),
            default=0,
        )
        for start, end in zip([0, *ends], ends, strict=False)
    )
    states = request.states if any(spec.kind == "recurrent" for spec in specs.values()) else 0
    return KvCache(groups=groups, block_bytes=block_bytes, length=request.length, states=states)


def state_bytes(state: Recurrent, tp: int) -> int:
    """Return the bytes of one request's state in one recurrent layer on one GPU."""
    groups = state.groups if state.groups % tp == 0 else tp if state.groups else 0
    channels = (state.channels + groups * state.group_channels) // tp
    memory = state.heads // tp * state.head_dim * state.state * state.state_bytes
    return channels * state.taps * 2 + memory


def _layer_caches(model: Architecture, request: CacheRequest) -> dict[int, _LayerCache]:
    """Return the cache of each layer that has one, by the layer's number.

    Recurrent states use pages of the attention layers, whose blocks grow until one fits.
    """
    sizes = {
        index: _token_bytes(model, layer, request)
        for index, layer in enumerate(model.layers)
        if layer.kind not in ("none", "recurrent")
    }
    widest = max(sizes.values(), default=0)
    state = state_bytes(model.recurrent, request.tp) if model.recurrent else 0
    block = _block_tokens(model, request, state, widest)
    page = max(state, block * widest)
    return {
        index: _LayerCache(
            layer.kind, layer.window, block, block * sizes[index] if index in sizes else page
        )
        for index, layer in enumerate(model.layers)
        if layer.kind != "none"
    }


def _token_bytes(model: Architecture, layer: Layer, request: CacheRequest) -> int:
    """Return the bytes of one token in one layer on one GPU."""
    if latent := model.latent:
        dense = (latent.kv_rank + latent.rope) * _element_sixteenths(request.dtype) // 16
        if not latent.indexer:
            return dense
        latent_bytes = _SPARSE_FP8 if request.dtype.startswith("fp8") else dense
        return latent_bytes + latent.indexer + _INDEXER_SCALE
    heads = max(1, layer.kv_heads // request.tp)
    return heads * 2 * layer.head_dim * _element_sixteenths(request.dtype) // 16


def _block_tokens(model: Architecture, request: CacheRequest, state: int, token: int) -> int:
    """Return the tokens of a block: as many as a recurrent state needs, at `token` bytes each."""
    block = request.block or (64 if model.latent else 16)
    if not state or not token:
        return block
    step = max(block, 128) if model.latent else block
    return max(block, step * -(-state // (step * token)))


def _unify_pages(
    specs: Mapping[int, _LayerCache], request: CacheRequest
) -> Mapping[int, _LayerCache]:
    """Make all pages equal if layers of several kinds share blocks: smaller ones get more tokens
    per block, or padding (`unify_kv_cache_spec_page_size`). Without the hybrid manager, local
    attention keeps all tokens.
    """
    if not request.hybrid and any(spec.kind == "full" for spec in specs.values()):
        specs = {index: _as_full_attention(spec) for index, spec in specs.items()}
    if len({(spec.kind, spec.window) for spec in specs.values()}) < 2:
        return specs
    largest = max(spec.page for spec in specs.values())
    return {index: _resize_page(spec, largest) for index, spec in specs.items()}


def _element_sixteenths(dtype: str) -> int:
    return _SIXTEENTHS.get(dtype, 16)


def _as_full_attention(spec: _LayerCache) -> _LayerCache:
    return replace(spec, kind="full", window=0) if spec.kind in ("sliding", "chunked") else spec


def _resize_page(spec: _LayerCache, page: int) -> _LayerCache:
    """Return a cache with a page of this size: with more tokens, or padded."""
    factor = page // spec.page if page % spec.page == 0 and spec.kind != "recurrent" else 1
    return replace(spec, page=page, block=spec.block * factor)


def _group_layers(specs: Mapping[int, _LayerCache]) -> list[tuple[int, ...]]:
    """Group layers (`_get_kv_cache_groups_uniform_page_size`) into groups of equal size: the count
    of the rarest kind, or of the commonest if that is less than half as many more.
    """
    kinds: dict[tuple[Kind, int], list[int]] = {}
    for index, spec in specs.items():
        kinds.setdefault((spec.kind, spec.window), []).append(index)
    counts = [len(layers) for layers in kinds.values()] or [1]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for layers in kinds.values():
        group_count = -(-len(layers) // size)
        groups += [tuple(layers[start::group_count]) for start in range(group_count)]
    return groups


def _blocks_per_request(spec: _LayerCache, request: CacheRequest) -> int:
    """Return the blocks of one group for a request of the longest length."""
    if spec.kind == "recurrent":
        return 2 if request.prefix_caching else 1
    if spec.kind == "sliding":
        tokens = min(spec.window - 1 + request.in_flight, request.length)
        return -(-tokens // spec.block) + 1
    if spec.kind == "chunked":
        return -(-min(spec.window + request.in_flight, request.length) // spec.block)
    shard = -(-request.length // request.dcp)
    return -(-shard // spec.block)


def partition_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage: the remainder goes to the stages before the last
    (`get_pp_indices` in vLLM's `distributed/utils.py`).
    """
    counts = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        counts[-index] += 1
    return tuple(counts)


def count_kv_copies(model: Architecture, tp: int) -> int:
    """Return the number of GPUs of a TP group that hold the same KV heads."""
    heads = model.kv_heads
    return tp // gcd(heads, tp) if heads and tp > heads else 1
