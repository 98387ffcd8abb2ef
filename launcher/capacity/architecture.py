"""What a model is made of, as far as memory goes: read from its `config.json`.

Pure. The keys and their defaults are those of vLLM 0.32: `transformers_utils/
model_arch_config_convertor.py`, `model_executor/models/` and, for layers, the configurations of
transformers. What is not known to be right is not guessed: `modelled` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal

from launcher.capacity.families import Family, family_of
from launcher.errors import RequestError

Kind = Literal["full", "sliding", "chunked", "mla", "recurrent", "none"]

_LARGEST = 1 << 24
_MOST_LAYERS = 1024
_LAYER_TYPES: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "mlp": "none",
    "moe": "none",
}
_PATTERN: Mapping[str, Kind] = {"M": "recurrent", "*": "full", "-": "none", "E": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
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
class Latent:
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
    value_dim: int
    vocabulary: int
    width: int
    context: int
    tied: bool
    quantization: str
    gated_mlp: bool = True
    gated_attention: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    mtp_layers: int = 0
    mtp_embeds: bool = False
    vision_params: int = 0
    modelled: str = ""

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


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Read a `config.json`.

    Raises:
        RequestError: fields that are no numbers, or that no model can have; all of them at once.
    """
    fields = _Fields(config)
    family = family_of(config, fields.text)
    layers, hidden = fields.count("num_hidden_layers", "n_layer"), fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    vocabulary = fields.count("vocab_size")
    latent = _latent(fields) if family.latent else None
    head_dim = fields.count("head_dim", "hidden_size_per_head") or (hidden // heads if heads else 0)
    experts = _experts(fields)
    recurrent = _recurrent(fields, family, hidden)
    built = Architecture(
        name=family.name,
        layers=_layers(fields, family, layers, heads, head_dim, experts),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        value_dim=latent.value if latent else head_dim,
        vocabulary=vocabulary,
        width=fields.count("intermediate_size", "ffn_hidden_size", "n_inner"),
        context=fields.count("max_position_embeddings", "n_positions", "max_seq_len"),
        tied=fields.flag("tie_word_embeddings", family.tied),
        quantization=_quantization(config, fields.text),
        gated_mlp=family.gated_mlp,
        gated_attention=fields.flag("attn_output_gate", family.gated_attention),
        experts=experts,
        latent=latent,
        recurrent=recurrent,
        mtp_layers=fields.count("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        mtp_embeds=fields.count("num_nextn_predict_layers") > 0,
        vision_params=_vision(fields, config),
        modelled=family.unknown,
    )
    fields.refuse()
    missing = [
        name
        for name, value in (
            ("num_hidden_layers", layers),
            ("hidden_size", hidden),
            ("num_attention_heads", heads),
            ("head_dim", head_dim),
            ("vocab_size", vocabulary),
        )
        if not value
    ]
    if missing and not built.modelled:
        return replace(built, modelled=f"config.json does not say {', '.join(missing)}")
    if family.latent and latent is None and not built.modelled:
        return replace(built, modelled="config.json does not say kv_lora_rank and qk_rope_head_dim")
    if not built.layers and not built.modelled:
        return replace(built, modelled="the kinds of its layers are not known")
    return built


class _Fields:
    """A `config.json` with its text part; wrong values are collected, not raised one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        parts = (
            part
            for name in ("text_config", "llm_config", "language_config", "thinker_config")
            if isinstance(part := config.get(name), Mapping)
        )
        inner = next(parts, {})
        nested = inner.get("text_config")
        inner = {**inner, **nested} if isinstance(nested, Mapping) else inner
        self.text: Mapping[str, Any] = {**config, **inner}
        self.wrong: dict[str, object] = {}

    def count(self, *names: str, most: int = _LARGEST) -> int:
        """Return the first of these fields as a number from 0; 0 when none is there."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, list) and value and len(set(map(str, value))) == 1:
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                self.wrong[name] = value
                return 0
            return value
        return 0

    def flag(self, name: str, otherwise: bool) -> bool:
        """Return a yes or no."""
        value = self.text.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            self.wrong[name] = value
            return otherwise
        return value

    def words(self, name: str) -> list[str]:
        """Return a list of words; [] when there is none."""
        value = self.text.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.wrong[name] = value
            return []
        return value

    def refuse(self) -> None:
        """Raise what is wrong, all of it."""
        layers = self.text.get("num_hidden_layers")
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            self.wrong["num_hidden_layers"] = layers
        if self.wrong:
            raise RequestError(
                "the model's config.json has fields that no model can have",
                evidence=[f"{name}: {_short(value)}" for name, value in self.wrong.items()],
                hint="take the file that lies beside the model's weights",
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _layers(
    fields: _Fields,
    family: Family,
    count: int,
    heads: int,
    head_dim: int,
    experts: Experts | None,
) -> tuple[Layer, ...]:
    """Return the decoder's layers in order; () where their kinds cannot be told."""
    if not 0 < count <= _MOST_LAYERS:
        return ()
    kinds = _kinds(fields, family, count)
    if len(kinds) != count:
        return ()
    kv_heads = (
        fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        or heads
    )
    window = fields.count("sliding_window") or fields.count("attention_chunk_size")
    wide = fields.count("global_head_dim") or head_dim
    wide_heads = fields.count("num_global_key_value_heads") or kv_heads
    moe = _moe_layers(fields, count) if experts else (False,) * count
    letters = fields.text.get("hybrid_override_pattern")
    made = []
    for index, kind in enumerate(kinds):
        full = kind == "full"
        attends = kind in ("full", "sliding", "chunked")
        made.append(
            Layer(
                kind=kind,
                kv_heads=(wide_heads if full else kv_heads) if attends else int(kind == "mla"),
                head_dim=(wide if full else head_dim) if attends else 0,
                window=window if kind in ("sliding", "chunked") else 0,
                moe=letters[index] == "E" if isinstance(letters, str) else moe[index],
                mlp=kind == "none" if isinstance(letters, str) else True,
            )
        )
    return tuple(made)


def _kinds(fields: _Fields, family: Family, count: int) -> Sequence[Kind]:
    """Return each layer's kind: what the file lists, else the family's rule."""
    listed = fields.words("layer_types") or fields.words("layers_block_type")
    if listed and not family.latent:
        known = [_LAYER_TYPES.get(word) for word in listed[:count]]
        return [kind for kind in known if kind]
    letters = fields.text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return [_PATTERN[letter] for letter in letters if letter in _PATTERN]
    if family.latent:
        return ["mla"] * count
    every = fields.count("full_attention_interval") or family.full_every
    if every and family.others:
        if family.others == "sliding" and not fields.count("sliding_window"):
            return ["full"] * count
        every = fields.count("sliding_window_pattern", "_sliding_window_pattern") or every
        period: list[Kind] = [*[family.others] * (every - 1), "full"]
        if family.full_first:
            period.reverse()
        return list(islice(cycle(period), count))
    if fields.count("sliding_window") and fields.text.get("use_sliding_window") is not False:
        first = fields.count("max_window_layers") if fields.text.get("use_sliding_window") else 0
        return ["full" if index < first else "sliding" for index in range(count)]
    return ["full"] * count


def _moe_layers(fields: _Fields, count: int) -> tuple[bool, ...]:
    """Tell which layers are mixtures: all but the first ones, or every so many."""
    first = fields.count("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    step = fields.count("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    only = fields.text.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) else set()
    if fields.text.get("interleave_moe_layer_step") is not None or "decoder_sparse_step" in (
        fields.text
    ):
        return tuple((index + 1) % step == 0 and index not in dense for index in range(count))
    return tuple(index >= first and index % step == 0 for index in range(count))


def _experts(fields: _Fields) -> Experts | None:
    count = fields.count("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
    if not count:
        return None
    width = fields.count("moe_intermediate_size", "expert_ffn_hidden_size") or fields.count(
        "intermediate_size", "ffn_hidden_size"
    )
    shared = fields.count("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = shared or width * fields.count("n_shared_experts", "num_shared_experts")
    if "Llama4" in str(fields.config.get("architectures")):
        shared = width
    return Experts(
        count=count,
        width=width,
        shared=shared,
        per_token=fields.count("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k"),
    )


def _latent(fields: _Fields) -> Latent | None:
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if not rank or not rope:
        return None
    return Latent(
        kv_rank=rank,
        q_rank=fields.count("q_lora_rank"),
        rope=rope,
        nope=fields.count("qk_nope_head_dim"),
        value=fields.count("v_head_dim"),
        indexer=fields.count("index_head_dim") if fields.count("index_topk") else 0,
        indexer_heads=fields.count("index_n_heads"),
    )


def _recurrent(fields: _Fields, family: Family, hidden: int) -> Recurrent | None:
    if fields.count("linear_num_value_heads"):
        return _gated_delta_net(fields, hidden)
    heads = fields.count("mamba_num_heads", "mamba_n_heads")
    if not heads:
        return None
    head_dim = fields.count("mamba_head_dim", "mamba_d_head")
    if not head_dim:
        inner = fields.count("mamba_d_ssm") or fields.count("mamba_expand") * hidden
        head_dim = inner // heads
    state = fields.count("ssm_state_size", "mamba_d_state")
    groups = fields.count("n_groups", "mamba_n_groups") or 1
    inner = heads * head_dim
    said = fields.text.get("mamba_ssm_cache_dtype") or fields.text.get("mamba_ssm_dtype")
    wide = said or ("float32" if family.wide_state else "")
    return Recurrent(
        channels=inner,
        taps=(fields.count("conv_kernel", "mamba_d_conv") or 4) - 1,
        heads=heads,
        head_dim=head_dim,
        state=state,
        groups=groups,
        group_channels=2 * state,
        state_bytes=4 if wide == "float32" else 2,
        params=hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden,
    )


def _gated_delta_net(fields: _Fields, hidden: int) -> Recurrent:
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    wide = fields.text.get("mamba_ssm_dtype") or fields.text.get("mamba_ssm_cache_dtype")
    inputs = 2 * keys * key_dim + 2 * values * value_dim + 2 * values
    return Recurrent(
        channels=2 * keys * key_dim + values * value_dim,
        taps=(fields.count("linear_conv_kernel_dim") or 4) - 1,
        heads=values,
        head_dim=value_dim,
        state=key_dim,
        groups=0,
        group_channels=0,
        state_bytes=4 if wide == "float32" else 2,
        params=hidden * inputs + values * value_dim * hidden,
    )


def _vision(fields: _Fields, config: Mapping[str, Any]) -> int:
    """Estimate a vision tower's parameters: attention and MLP of its layers, nothing else."""
    for name in ("vision_config", "visual", "vit_config", "audio_config"):
        part = config.get(name)
        if not isinstance(part, Mapping):
            continue
        inner = _Fields({key: part[key] for key in part if not isinstance(part[key], Mapping)})
        hidden = inner.count("hidden_size", "embed_dim", "d_model", "width")
        layers = inner.count("depth", "num_hidden_layers", "encoder_layers", "layers")
        width = inner.count("intermediate_size", "encoder_ffn_dim") or 4 * hidden
        return max(1, layers * (4 * hidden * hidden + 2 * hidden * width))
    return 0


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Name the quantization of the weights; "" of weights as the file's dtype has them."""
    for part in (config, text):
        for name in ("quantization_config", "compression_config"):
            found = part.get(name)
            if isinstance(found, Mapping):
                return str(found.get("quant_method") or "unknown").lower()
    found = text.get("quantization")
    return found.lower() if isinstance(found, str) else ""
