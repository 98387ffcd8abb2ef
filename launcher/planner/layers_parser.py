"""Layers of a decoder, from the lists in its `config.json`, else from the model's family.

Pure. Keys: the configurations of transformers, and the models in vLLM's `model_executor/models/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from launcher.planner.architecture import Kind, Layer
from launcher.planner.config_fields import MOST_LAYERS, ConfigFields
from launcher.planner.families import Family

_TYPES: Mapping[str, Kind] = {
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
# Nemotron-H: a layer is a Mamba, an attention, an MLP or a mixture of experts, never two of them.
_LETTERS: Mapping[str, Kind] = {"M": "recurrent", "*": "full", "-": "none", "E": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """KV heads and their size, and those of full attention, which may differ."""

    kv: int
    size: int
    full_kv: int
    full_size: int
    window: int

    def build_layer(self, kind: Kind, *, moe: bool, mlp: bool) -> Layer:
        """Return a layer of this kind."""
        if kind == "full":
            return Layer(kind, self.full_kv, self.full_size, moe=moe, mlp=mlp)
        if kind in ("sliding", "chunked"):
            return Layer(kind, self.kv, self.size, self.window, moe=moe, mlp=mlp)
        return Layer(kind, int(kind == "mla"), moe=moe, mlp=mlp)


def parse_layers(
    fields: ConfigFields, family: Family, head_dim: int, *, mixed: bool
) -> tuple[Layer, ...]:
    """Return the decoder's layers; () if a kind is unknown. `mixed`: it has experts."""
    count = fields.read_count("num_hidden_layers", "n_layer")
    kinds = _layer_kinds(fields, family, count) if 0 < count <= MOST_LAYERS else ()
    if len(kinds) != count or not kinds:
        return ()
    heads = _parse_heads(fields, head_dim)
    letters = fields.text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        moe = [letter == "E" for letter in letters]
    else:
        moe = _moe_layers(fields, count) if mixed else [False] * count
    mlp = ["none"] if isinstance(letters, str) else kinds  # kinds of layers with an MLP
    layers = zip(kinds, moe, strict=True)
    return tuple(heads.build_layer(kind, moe=is_moe, mlp=kind in mlp) for kind, is_moe in layers)


def _parse_heads(fields: ConfigFields, head_dim: int) -> Heads:
    kv = fields.read_count(
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_heads",
    )
    if not kv and fields.read_count("num_attention_heads"):
        fields.wrong["num_key_value_heads"] = kv
    return Heads(
        kv=kv,
        size=head_dim,
        full_kv=fields.read_count("num_global_key_value_heads") or kv,
        full_size=fields.read_count("global_head_dim") or head_dim,
        window=fields.read_count("sliding_window") or fields.read_count("attention_chunk_size"),
    )


def _layer_kinds(fields: ConfigFields, family: Family, count: int) -> Sequence[Kind]:
    """Return each layer's kind; the result is shorter if some are unknown."""
    if family.latent:
        return ["mla"] * count
    listed = fields.read_strings("layer_types") or fields.read_strings("layers_block_type")
    letters = fields.text.get("hybrid_override_pattern")
    if listed:
        return [kind for name in listed[:count] if (kind := _TYPES.get(name))]
    if isinstance(letters, str):
        return [kind for letter in letters[:count] if (kind := _LETTERS.get(letter))]
    if family.other_kind:
        return _periodic_kinds(fields, family, count)
    return _windowed_kinds(fields, family, count)


def _periodic_kinds(fields: ConfigFields, family: Family, count: int) -> Sequence[Kind]:
    """Return full attention for every nth layer, and the family's other kind between."""
    every = (
        fields.read_count("full_attention_interval")
        or fields.read_count("sliding_window_pattern", "_sliding_window_pattern")
        or family.full_every
    )
    other = family.other_kind
    if not other or (other == "sliding" and not fields.read_count("sliding_window")):
        return ["full"] * count
    period: list[Kind] = [*[other] * (every - 1), "full"]
    return list(islice(cycle(period), count))


def _windowed_kinds(fields: ConfigFields, family: Family, count: int) -> Sequence[Kind]:
    """Return full attention, or a window in all layers or after the first ones (Qwen2)."""
    used = fields.read_flag("use_sliding_window", not family.window_opt_in)
    if not fields.read_count("sliding_window") or not used:
        return ["full"] * count
    first = fields.read_count("max_window_layers")
    return ["full" if index < first else "sliding" for index in range(count)]


def _moe_layers(fields: ConfigFields, count: int) -> list[bool]:
    """Return a flag per layer for mixtures of experts: every nth layer, or all but the first."""
    step = fields.read_count("decoder_sparse_step", "interleave_moe_layer_step")
    if step:
        listed = fields.text.get("mlp_only_layers")
        dense = set(map(str, listed)) if isinstance(listed, list) else set()
        return [(index + 1) % step == 0 and str(index) not in dense for index in range(count)]
    first = fields.read_count("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    step = fields.read_count("moe_layer_freq") or 1
    return [index >= first and index % step == 0 for index in range(count)]
