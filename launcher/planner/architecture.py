"""What a model is made of, as far as memory goes. Pure; `architecture_read.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "sliding", "chunked", "mla", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the decoder: its attention, and whether its MLP is a mixture of experts.

    `kv_heads` and `head_dim` are those of the whole layer, before it is split; `window` is in
    tokens, of sliding and chunked attention alone; `mlp` is false of a layer that has none.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    moe: bool = False
    mlp: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: how many there are, how wide each and all shared ones together are, and
    how many a token takes.
    """

    count: int
    width: int
    shared: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks and head sizes; `indexer` is the head size of a sparse
    one's indexer, with its heads.
    """

    kv_rank: int
    q_rank: int
    rope: int
    nope: int
    value: int
    indexer: int = 0
    indexer_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """The state of a Mamba-2 or gated delta net layer, of the whole layer.

    `channels` go through the convolution, which keeps `taps` of each; groups are repeated where TP
    does not divide them (`MambaStateShapeCalculator` in vLLM's `layers/mamba/mamba_utils.py`).
    """

    channels: int
    taps: int
    heads: int
    head_dim: int
    state: int
    groups: int
    group_channels: int
    state_bytes: int
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's shape. Sizes are numbers of elements; `modelled` is "" or what is not."""

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    width: int
    context: int
    tied: bool
    quantization: str
    gated_mlp: bool = True
    gated_attention: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    recurrent: Recurrent | None = None
    mtp_layers: int = 0
    mtp_embeds: bool = False
    vision_params: int = 0
    unmodelled_reason: str = ""

    @property
    def kv_heads(self) -> int:
        """Heads of the KV cache: the fewest of any layer; 1 of latent attention, 0 of none."""
        if self.latent:
            return 1
        return min((layer.kv_heads for layer in self.layers if layer.kv_heads), default=0)

    @property
    def multimodal(self) -> bool:
        """True when something besides text goes in."""
        return self.vision_params > 0 or "ConditionalGeneration" in self.name
