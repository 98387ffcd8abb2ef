"""How many bytes of weights each GPU holds.

Pure. The checkpoint's size is known; what is computed is how it divides: into pipeline stages by
layers, and inside a stage by what vLLM splits over TP ranks and what each of them keeps whole
(`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `fused_moe/`, the models' own
files). What is quantized takes what the rest of the checkpoint leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from launcher.planner.architecture import Architecture, Latent, Layer

GIB = 1 << 30
_FOUR_BITS = ("fp4", "int4", "awq", "gptq", "w4", "4bit")
# gpt-oss: hidden size and expert width are padded for the kernels (`versions.mxfp4_width`).
_MXFP4_HIDDEN = 256


class Share(Enum):
    """How a tensor is divided inside a stage."""

    TP = "split over TP"
    KV = "split over KV heads"
    COPY = "whole on each GPU"
    EXPERTS = "split over all ranks that share experts"


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one kind. `linear` ones are those that a quantized checkpoint stores small."""

    share: Share
    params: int
    linear: bool = True
    heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many ranks a model is divided over; `stages` is the layers of each pipeline stage,
    `mxfp4_width` what the width of experts in mxfp4 is padded to a multiple of.
    """

    tp: int = 1
    dp: int = 1
    stages: tuple[int, ...]
    expert_parallel: bool = False
    mxfp4_width: int = 128


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of a parameter of linear layers and of others, and all of the vision tower's."""

    linear: float
    other: float
    vision: float


def stage_bytes(model: Architecture, total: int, split: Split) -> tuple[int, ...]:
    """Return the bytes of weights on one GPU of each stage; `total` is the checkpoint's bytes.

    A model that is not modelled is divided evenly.
    """
    if model.modelled:
        ranks = split.tp * len(split.stages)
        return (-(-total // ranks),) * len(split.stages)
    layers = [_layer_parts(model, layer) for layer in model.layers]
    widths = _widths(model, layers, total)
    ends = list(accumulate(split.stages))
    held = []
    for start, end in zip([0, *ends], ends, strict=False):
        parts = [part for layer in layers[start:end] for part in layer]
        parts += [_embedding(model)] * _embeddings(model, first=start == 0, last=end == ends[-1])
        size = sum(
            _held(part, split, model) * (widths.linear if part.linear else widths.other)
            for part in parts
        )
        vision = widths.vision / split.tp if start == 0 else 0.0
        held.append(int(size + vision + _absorbed(model, end - start, split)))
    return tuple(held)


def counted(model: Architecture) -> int:
    """Return about how many bytes of weights a model has, from its shape; 0 where that does not
    tell: it is not modelled, or its weights are of several precisions. Weights of four bits have an
    eighth more for their scales.
    """
    if model.modelled or "mixed" in model.quantization:
        return 0
    linear, others = _params(model, [_layer_parts(model, layer) for layer in model.layers])
    small = any(word in model.quantization for word in _FOUR_BITS)
    quantized = 0.5625 if small else 1.0
    each = quantized if model.quantization else 2.0
    return int(linear * each + others * 2.0 + model.vision_params * 2.0)


def _embeddings(model: Architecture, *, first: bool, last: bool) -> int:
    """Return how many tables of the vocabulary a stage holds: the embedding, the head, or one that
    is both.
    """
    return 1 if first and last and model.tied else first + last


def _embedding(model: Architecture) -> Part:
    return Part(Share.TP, model.vocabulary * model.hidden, linear=False)


def _held(part: Part, split: Split, model: Architecture) -> float:
    """Return the parameters of one part that one GPU holds."""
    if part.share is Share.TP:
        return part.params / split.tp
    if part.share is Share.KV:
        return part.params / min(split.tp, part.heads or split.tp)
    if part.share is Share.EXPERTS:
        return part.params / (split.tp * split.dp) * _padding(model, split)
    return part.params


def _padding(model: Architecture, split: Split) -> float:
    """Return how much larger experts become by padding, as a factor."""
    if model.quantization != "mxfp4" or not model.experts or model.name != "GptOssForCausalLM":
        return 1.0
    width = model.experts.width / (1 if split.expert_parallel else split.tp)
    return (_up(width, split.mxfp4_width) / width) * (
        _up(model.hidden, _MXFP4_HIDDEN) / model.hidden
    )


def _up(value: float, step: int) -> int:
    return -(-int(value) // step) * step


def _absorbed(model: Architecture, layers: int, split: Split) -> float:
    """Return bytes that no checkpoint has: latent attention keeps the up-projection a second time,
    for decoding (`process_weights_after_loading` of `layers/attention/mla_attention.py`).
    """
    latent = model.latent
    if not latent:
        return 0.0
    return 2.0 * latent.kv_rank * model.heads * (latent.nope + latent.value) * layers / split.tp


def _layer_parts(model: Architecture, layer: Layer) -> list[Part]:
    """Return the tensors of one layer."""
    parts = _attention(model, layer)
    if layer.moe and model.experts:
        experts = model.experts
        matrices = 3 if model.gated_mlp else 2
        parts += [
            Part(Share.EXPERTS, experts.count * matrices * model.hidden * experts.width),
            Part(Share.TP, matrices * model.hidden * experts.shared),
            Part(Share.COPY, model.hidden * experts.count, linear=False),
        ]
    elif layer.mlp:
        matrices = 3 if model.gated_mlp else 2
        parts.append(Part(Share.TP, matrices * model.hidden * model.width))
    return parts


def _attention(model: Architecture, layer: Layer) -> list[Part]:
    hidden = model.hidden
    if layer.kind == "mla" and model.latent:
        return _latent(model, model.latent)
    if layer.kind == "recurrent" and model.recurrent:
        return [Part(Share.TP, model.recurrent.params)]
    if layer.kind == "none":
        return []
    query = model.heads * layer.head_dim
    gate = 2 if model.gated_attention else 1
    return [
        Part(Share.TP, hidden * query * (gate + 1)),
        Part(Share.KV, 2 * hidden * layer.kv_heads * layer.head_dim, heads=layer.kv_heads),
    ]


def _latent(model: Architecture, latent: Latent) -> list[Part]:
    hidden, heads = model.hidden, model.heads
    wide = heads * (latent.nope + latent.rope)
    queries = (
        [Part(Share.COPY, hidden * latent.q_rank), Part(Share.TP, latent.q_rank * wide)]
        if latent.q_rank
        else [Part(Share.TP, hidden * wide)]
    )
    indexer = latent.indexer * (latent.q_rank * latent.indexer_heads + hidden)
    return [
        *queries,
        Part(Share.COPY, hidden * (latent.kv_rank + latent.rope)),
        Part(Share.TP, latent.kv_rank * heads * (latent.nope + latent.value)),
        Part(Share.TP, heads * latent.value * hidden),
        Part(Share.COPY, indexer),
    ]


def _widths(model: Architecture, layers: Sequence[Sequence[Part]], total: int) -> Widths:
    """Divide the checkpoint's bytes by its parameters.

    Tensors that are not of linear layers are 16 bits wide. In a quantized checkpoint linear layers
    have what is left; in another all parameters share it, or the vision tower has it.
    """
    linear, others = _params(model, layers)
    drafts, tables = _drafts(model, layers[-1])
    # What quantizes experts to four bits leaves draft layers as they were.
    small = model.quantization.startswith("fp8") or not model.quantization
    linear, others = linear + drafts * small, others + tables + drafts * (not small)
    vision = 2.0 * model.vision_params
    if model.quantization:
        return Widths(max(0.0, total - 2.0 * others - vision) / max(1, linear), 2.0, vision)
    rest = total - 2.0 * (linear + others)
    if model.vision_params and rest >= 0:
        return Widths(2.0, 2.0, rest)
    each = max(0.0, total - vision) / max(1, linear + others)
    return Widths(each, each, vision)


def _params(model: Architecture, layers: Sequence[Sequence[Part]]) -> tuple[int, int]:
    """Return the parameters of linear layers, and all others with the tables of the vocabulary."""
    parts = [part for layer in layers for part in layer]
    linear = sum(part.params for part in parts if part.linear)
    tables = _embeddings(model, first=True, last=True) * _embedding(model).params
    return linear, sum(part.params for part in parts) - linear + tables


def _drafts(model: Architecture, last: Sequence[Part]) -> tuple[int, int]:
    """Return the parameters of layers that only speculation loads: linear ones, and tables of the
    vocabulary.
    """
    linear = sum(part.params for part in last if part.linear) + 2 * model.hidden**2
    tables = 2 * model.vocabulary * model.hidden if model.mtp_embeds else 0
    return model.mtp_layers * linear, model.mtp_layers * tables
