"""Architecture of a model, as far as it affects memory. Pure; parsed from `config.json`."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "sliding", "chunked", "mla", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its attention and the kind of its MLP.

    `kv_heads` and `head_dim` are those of the whole layer, before tensor parallelism; `window` is
    in tokens, for sliding and chunked attention only; `moe` marks a mixture of experts; `mlp` is
    false for a layer without one.
    """

    kind: Kind
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    moe: bool = False
    mlp: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: their number, the width of each and of all shared ones together, and
    the experts per token.
    """

    count: int
    width: int
    shared: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks and head sizes. `indexer` is the head size of a sparse
    attention's indexer, with its heads.
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
    """State of a whole Mamba-2 or gated delta net layer.

    `channels` pass through the convolution, which keeps `taps` of each; groups are repeated if TP
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
    """A model's shape. Sizes are numbers of elements; `unmodelled_reason` is "" if modelled."""

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
        """Heads of the KV cache: the fewest of any layer; 1 for latent attention, 0 without a
        cache.
        """
        if self.latent:
            return 1
        return min((layer.kv_heads for layer in self.layers if layer.kv_heads), default=0)

    @property
    def multimodal(self) -> bool:
        """True if the model takes inputs besides text."""
        return self.vision_params > 0 or "ConditionalGeneration" in self.name
