"""How many bytes of weights each GPU holds.

Pure. The checkpoint's size is known; what is computed is how it divides: into pipeline stages by
layers, and inside a stage by what vLLM splits over TP ranks and what each of them keeps whole
(`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `fused_moe/`, the models' own
files). What is quantized takes what the rest of the checkpoint leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.capacity.architecture import Architecture, Latent, Layer

GIB = 1 << 30
# gpt-oss: hidden size and expert width are padded for the kernels
# (`fused_moe/oracle/mxfp4.py`, Marlin's forms).
_MXFP4_HIDDEN, _MXFP4_WIDTH = 256, 128


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
    """How many ranks a model is divided over; `stages` is the layers of each pipeline stage."""

    tp: int = 1
    dp: int = 1
    stages: tuple[int, ...]
    expert_parallel: bool = False


def stage_bytes(model: Architecture, total: int, split: Split) -> tuple[int, ...]:
    """Return the bytes of weights on one GPU of each stage; `total` is the checkpoint's bytes.

    A model that is not modelled is divided evenly.
    """
    if model.modelled or not model.layers:
        ranks = split.tp * len(split.stages)
        return (-(-total // ranks),) * len(split.stages)
    layers = [_layer_parts(model, layer) for layer in model.layers]
    widths = _element_bytes(model, layers, total)
    ends = [sum(split.stages[: index + 1]) for index in range(len(split.stages))]
    starts = [0, *ends[:-1]]
    held = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        parts = [part for parts in layers[start:end] for part in parts]
        last = index == len(ends) - 1
        if index == 0:
            parts.append(_embedding(model))
        if last and (not model.tied or index > 0):
            parts.append(_embedding(model))
        size = sum(_held(part, split, model) * widths[part.linear] for part in parts)
        if index == 0:
            size += widths["vision"] / split.tp
        held.append(int(size + _extra(model, range(start, end), split)))
    return tuple(held)


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
    return (_up(width, _MXFP4_WIDTH) / width) * (_up(model.hidden, _MXFP4_HIDDEN) / model.hidden)


def _up(value: float, step: int) -> int:
    return -(-int(value) // step) * step


def _extra(model: Architecture, layers: range, split: Split) -> float:
    """Return bytes that no checkpoint has: latent attention keeps the up-projection a second time,
    for decoding (`process_weights_after_loading` of `layers/attention/mla_attention.py`).
    """
    latent = model.latent
    if not latent:
        return 0.0
    up = latent.kv_rank * model.heads * (latent.nope + latent.value)
    return 2.0 * up * len(layers) / split.tp


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


def _element_bytes(
    model: Architecture, layers: Sequence[Sequence[Part]], total: int
) -> Mapping[bool | str, float]:
    """Return bytes per parameter of linear layers and of others, and the vision tower's bytes.

    The checkpoint's other tensors are 16 bits wide. In a quantized one linear layers have what is
    left; in another all parameters share it, or the vision tower has it.
    """
    linear = sum(part.params for parts in layers for part in parts if part.linear)
    others = sum(part.params for parts in layers for part in parts if not part.linear)
    others += model.vocabulary * model.hidden * (1 if model.tied else 2)
    drafts = model.mtp_layers * (
        sum(part.params for part in layers[-1] if part.linear) + 2 * model.hidden**2
    )
    if model.mtp_embeds:
        others += model.mtp_layers * 2 * model.vocabulary * model.hidden
    if model.quantization and not model.quantization.startswith("fp8"):
        others += drafts  # what quantizes experts to 4 bits leaves these layers as they were
    else:
        linear += drafts
    vision = 2.0 * model.vision_params
    if model.quantization:
        each = max(0.0, total - 2.0 * others - vision) / linear if linear else 0.0
        return {True: each, False: 2.0, "vision": vision}
    if model.vision_params:
        rest = total - 2.0 * (linear + others)
        if rest >= 0:
            return {True: 2.0, False: 2.0, "vision": rest}
    each = (total - vision) / (linear + others) if linear + others else 0.0
    return {True: each, False: each, "vision": vision}
