"""Bytes of weights on each GPU.

Pure. The checkpoint's size is known; its division is computed: into pipeline stages by layers, and
inside a stage by the tensors that vLLM splits over TP ranks and those that each rank keeps whole
(`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `fused_moe/`, the models' own
files). Quantized tensors have the bytes that the rest of the checkpoint leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from launcher.planner.architecture import Architecture, LatentAttention, Layer

GIB = 1 << 30
_FOUR_BITS = ("fp4", "int4", "awq", "gptq", "w4", "4bit")
# gpt-oss: hidden size and expert width are padded for the kernels (`versions.mxfp4_width`).
_MXFP4_HIDDEN = 256


class Share(Enum):
    """Division of a tensor inside a stage."""

    TP = "split over TP"
    KV = "split over KV heads"
    COPY = "copied to each GPU"
    EXPERTS = "split over all ranks that share experts"


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Parameters of one kind. `linear` ones are those that a quantized checkpoint compresses."""

    share: Share
    params: int
    linear: bool = True
    heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of a model; `stages` is the layers of each pipeline stage, `mxfp4_width` the multiple
    to which the width of mxfp4 experts is padded.
    """

    tp: int = 1
    dp: int = 1
    stages: tuple[int, ...]
    expert_parallel: bool = False
    mxfp4_width: int = 128


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per parameter of linear layers and of others, and all bytes of the vision tower."""

    linear: float
    other: float
    vision: float


def stage_bytes(model: Architecture, total: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the bytes of weights on one GPU of each stage; `total` is the checkpoint's bytes.

    A model that is not modelled is divided evenly.
    """
    if model.unmodelled_reason:
        ranks = parallel.tp * len(parallel.stages)
        return (-(-total // ranks),) * len(parallel.stages)
    layers = [_layer_parts(model, layer) for layer in model.layers]
    widths = _widths(model, layers, total)
    width = {True: widths.linear, False: widths.other}
    ends = list(accumulate(parallel.stages))
    bytes_by_stage = []
    for start, end in zip([0, *ends], ends, strict=False):
        parts = [part for layer in layers[start:end] for part in layer]
        tables = _count_embeddings(model, first=start == 0, last=end == ends[-1])
        parts += [_embedding_part(model)] * tables
        size = sum(_params_per_gpu(part, parallel, model) * width[part.linear] for part in parts)
        vision = widths.vision / parallel.tp if start == 0 else 0.0
        bytes_by_stage.append(int(size + vision + _absorbed_bytes(model, end - start, parallel)))
    return tuple(bytes_by_stage)


def estimate_weight_bytes(model: Architecture) -> int:
    """Estimate the bytes of a model's weights from its shape; 0 if it is not modelled, or if its
    weights have several precisions. Four-bit weights have an eighth more for their scales.
    """
    if model.unmodelled_reason or "mixed" in model.quantization:
        return 0
    linear, others = _count_params(model, [_layer_parts(model, layer) for layer in model.layers])
    is_four_bit = any(name in model.quantization for name in _FOUR_BITS)
    quantized_width = 0.5625 if is_four_bit else 1.0
    linear_width = quantized_width if model.quantization else 2.0
    return int(linear * linear_width + others * 2.0 + model.vision_params * 2.0)


def _count_embeddings(model: Architecture, *, first: bool, last: bool) -> int:
    """Return the vocabulary tables of a stage: embedding, head, or one that is both."""
    return 1 if first and last and model.tied else first + last


def _embedding_part(model: Architecture) -> WeightPart:
    return WeightPart(Share.TP, model.vocabulary * model.hidden, linear=False)


def _params_per_gpu(part: WeightPart, parallel: ParallelConfig, model: Architecture) -> float:
    """Return the parameters of one part on one GPU."""
    if part.share is Share.TP:
        return part.params / parallel.tp
    if part.share is Share.KV:
        return part.params / min(parallel.tp, part.heads or parallel.tp)
    if part.share is Share.EXPERTS:
        return part.params / (parallel.tp * parallel.dp) * _padding_factor(model, parallel)
    return part.params


def _padding_factor(model: Architecture, parallel: ParallelConfig) -> float:
    """Return the factor by which padding enlarges experts."""
    if model.quantization != "mxfp4" or not model.experts or model.name != "GptOssForCausalLM":
        return 1.0
    width = model.experts.width / (1 if parallel.expert_parallel else parallel.tp)
    return (_round_up(width, parallel.mxfp4_width) / width) * (
        _round_up(model.hidden, _MXFP4_HIDDEN) / model.hidden
    )


def _round_up(value: float, step: int) -> int:
    return -(-int(value) // step) * step


def _absorbed_bytes(model: Architecture, layers: int, parallel: ParallelConfig) -> float:
    """Return bytes that no checkpoint has: latent attention keeps a second copy of the
    up-projection, for decoding (`process_weights_after_loading` of
    `layers/attention/mla_attention.py`).
    """
    latent = model.latent
    if not latent:
        return 0.0
    return 2.0 * latent.kv_rank * model.heads * (latent.nope + latent.value) * layers / parallel.tp


def _layer_parts(model: Architecture, layer: Layer) -> list[WeightPart]:
    parts = _attention_parts(model, layer)
    if layer.moe and model.experts:
        experts = model.experts
        matrices = 3 if model.gated_mlp else 2
        parts += [
            WeightPart(Share.EXPERTS, experts.count * matrices * model.hidden * experts.width),
            WeightPart(Share.TP, matrices * model.hidden * experts.shared),
            WeightPart(Share.COPY, model.hidden * experts.count, linear=False),
        ]
    elif layer.mlp:
        matrices = 3 if model.gated_mlp else 2
        parts.append(WeightPart(Share.TP, matrices * model.hidden * model.width))
    return parts


def _attention_parts(model: Architecture, layer: Layer) -> list[WeightPart]:
    hidden = model.hidden
    if layer.kind == "mla" and model.latent:
        return _latent_parts(model, model.latent)
    if layer.kind == "recurrent" and model.recurrent:
        return [WeightPart(Share.TP, model.recurrent.params)]
    if layer.kind == "none":
        return []
    query = model.heads * layer.head_dim
    gate = 2 if model.gated_attention else 1
    return [
        WeightPart(Share.TP, hidden * query * (gate + 1)),
        WeightPart(Share.KV, 2 * hidden * layer.kv_heads * layer.head_dim, heads=layer.kv_heads),
    ]


def _latent_parts(model: Architecture, latent: LatentAttention) -> list[WeightPart]:
    hidden, heads = model.hidden, model.heads
    query_width = heads * (latent.nope + latent.rope)
    queries = [WeightPart(Share.TP, (latent.q_rank or hidden) * query_width)]
    if latent.q_rank:
        queries.insert(0, WeightPart(Share.COPY, hidden * latent.q_rank))
    indexer = latent.indexer * (latent.q_rank * latent.indexer_heads + hidden)
    return [
        *queries,
        WeightPart(Share.COPY, hidden * (latent.kv_rank + latent.rope)),
        WeightPart(Share.TP, latent.kv_rank * heads * (latent.nope + latent.value)),
        WeightPart(Share.TP, heads * latent.value * hidden),
        WeightPart(Share.COPY, indexer),
    ]


def _widths(model: Architecture, layers: Sequence[Sequence[WeightPart]], total: int) -> Widths:
    """Divide the checkpoint's bytes by its parameters.

    Tensors outside linear layers have 16 bits. In a quantized checkpoint, linear layers have the
    remaining bytes; in another, all parameters share them, or the vision tower has the rest.
    """
    linear, others = _count_params(model, layers)
    drafts, tables = _count_draft_params(model, layers[-1])
    # Four-bit quantization of experts leaves draft layers unchanged.
    small = model.quantization.startswith("fp8") or not model.quantization
    linear, others = linear + drafts * small, others + tables + drafts * (not small)
    vision = 2.0 * model.vision_params
    if model.quantization:
        return Widths(max(0.0, total - 2.0 * others - vision) / max(1, linear), 2.0, vision)
    rest = total - 2.0 * (linear + others)
    if model.vision_params and rest >= 0:
        return Widths(2.0, 2.0, rest)
    width = max(0.0, total - vision) / max(1, linear + others)
    return Widths(width, width, vision)


def _count_params(model: Architecture, layers: Sequence[Sequence[WeightPart]]) -> tuple[int, int]:
    """Return the parameters of linear layers, and all others with the vocabulary tables."""
    parts = [part for layer in layers for part in layer]
    linear = sum(part.params for part in parts if part.linear)
    tables = _count_embeddings(model, first=True, last=True) * _embedding_part(model).params
    return linear, sum(part.params for part in parts) - linear + tables


def _count_draft_params(model: Architecture, last: Sequence[WeightPart]) -> tuple[int, int]:
    """Return the parameters for speculation only: of linear layers, and of tables."""
    linear = sum(part.params for part in last if part.linear) + 2 * model.hidden**2
    tables = 2 * model.vocabulary * model.hidden if model.mtp_embeds else 0
    return model.mtp_layers * linear, model.mtp_layers * tables
