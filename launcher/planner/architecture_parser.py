"""Architecture of a model from its `config.json`.

Pure. The keys and their defaults are those of vLLM 0.32:
`transformers_utils/model_arch_config_convertor.py`, `model_executor/models/` and, for layers, the
configurations of transformers. Uncertain facts are not guessed: `Architecture.unmodelled_reason`
names them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.planner.architecture import Architecture, Experts, LatentAttention, Recurrent
from launcher.planner.config_fields import ConfigFields
from launcher.planner.families import Family, find_family
from launcher.planner.layers_parser import parse_layers
from launcher.tools.model import EXPERT_FIELDS, count_experts

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """Parse a `config.json`.

    Raises:
        RequestError: fields that are no numbers, or that no model can have; all of them at once.
    """
    fields = ConfigFields(config)
    family = find_family(config, fields.text)
    hidden, heads = fields.read_count("hidden_size"), fields.read_count("num_attention_heads")
    head_dim = fields.read_count("head_dim", "hidden_size_per_head") or hidden // max(1, heads)
    experts = _parse_experts(fields, family)
    architecture = Architecture(
        name=family.name,
        layers=parse_layers(fields, family, head_dim, mixed=experts is not None),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        vocabulary=fields.read_count("vocab_size"),
        width=fields.read_count("intermediate_size", "ffn_hidden_size", "n_inner"),
        context=fields.read_count("max_position_embeddings", "n_positions", "max_seq_len"),
        tied=family.headless or fields.read_flag("tie_word_embeddings", family.tied),
        quantization=_parse_quantization(config, fields.text),
        gated_mlp=family.gated_mlp,
        gated_attention=fields.read_flag("attn_output_gate", family.gated_attention),
        experts=experts,
        latent=_parse_latent_attention(fields) if family.latent else None,
        recurrent=_parse_recurrent(fields, family, hidden),
        mtp_layers=fields.read_count("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        mtp_embeds=fields.read_count("num_nextn_predict_layers") > 0,
        vision_params=_estimate_vision_params(config),
        unmodelled_reason=family.unmodelled_reason,
    )
    fields.raise_if_wrong()
    reason = architecture.unmodelled_reason or _unmodelled_reason(fields, family, architecture)
    return replace(architecture, unmodelled_reason=reason)


def _unmodelled_reason(fields: ConfigFields, family: Family, architecture: Architecture) -> str:
    """Return the missing facts about a model of a known family; "" if there are none."""
    missing = [name for name in _REQUIRED if not fields.read_count(name)]
    if not architecture.head_dim and "hidden_size" not in missing:
        missing.append("head_dim")
    if family.latent and architecture.latent is None:
        missing += ["kv_lora_rank", "qk_rope_head_dim"]
    if missing:
        return f"config.json lacks {', '.join(missing)}"
    return "" if architecture.layers else "its layer types are unknown"


def _parse_experts(fields: ConfigFields, family: Family) -> Experts | None:
    read = fields.read_count
    read(*EXPERT_FIELDS)  # reports a value that is no number
    if not (count := count_experts(fields.text)):
        return None
    width = read("moe_intermediate_size", "expert_ffn_hidden_size")
    width = width or read("intermediate_size", "ffn_hidden_size")
    shared = read("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = shared or width * read("n_shared_experts", "num_shared_experts")
    if family.shares_expert:
        shared = width
    per_token = read("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
    return Experts(count=count, width=width, shared=shared, per_token=per_token)


def _parse_latent_attention(fields: ConfigFields) -> LatentAttention | None:
    rank, rope = fields.read_count("kv_lora_rank"), fields.read_count("qk_rope_head_dim")
    if not rank or not rope:
        return None
    return LatentAttention(
        kv_rank=rank,
        q_rank=fields.read_count("q_lora_rank"),
        rope=rope,
        nope=fields.read_count("qk_nope_head_dim"),
        value=fields.read_count("v_head_dim"),
        indexer=fields.read_count("index_head_dim") if fields.read_count("index_topk") else 0,
        indexer_heads=fields.read_count("index_n_heads"),
    )


def _parse_recurrent(fields: ConfigFields, family: Family, hidden: int) -> Recurrent | None:
    if fields.read_count("linear_num_value_heads"):
        return _parse_gated_delta_net(fields, hidden)
    heads = fields.read_count("mamba_num_heads", "mamba_n_heads")
    if not heads:
        return None
    head_dim = fields.read_count("mamba_head_dim", "mamba_d_head")
    head_dim = (
        head_dim
        or (fields.read_count("mamba_d_ssm") or fields.read_count("mamba_expand") * hidden) // heads
    )
    state = fields.read_count("ssm_state_size", "mamba_d_state")
    groups = fields.read_count("n_groups", "mamba_n_groups") or 1
    inner = heads * head_dim
    return Recurrent(
        channels=inner,
        taps=(fields.read_count("conv_kernel", "mamba_d_conv") or 4) - 1,
        heads=heads,
        head_dim=head_dim,
        state=state,
        groups=groups,
        group_channels=2 * state,
        state_bytes=_state_bytes(fields, "float32" if family.wide_state else ""),
        params=hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden,
    )


def _parse_gated_delta_net(fields: ConfigFields, hidden: int) -> Recurrent:
    keys, values = map(fields.read_count, ("linear_num_key_heads", "linear_num_value_heads"))
    key_dim, value_dim = map(fields.read_count, ("linear_key_head_dim", "linear_value_head_dim"))
    inputs = 2 * keys * key_dim + 2 * values * value_dim + 2 * values
    return Recurrent(
        channels=2 * keys * key_dim + values * value_dim,
        taps=(fields.read_count("linear_conv_kernel_dim") or 4) - 1,
        heads=values,
        head_dim=value_dim,
        state=key_dim,
        groups=0,
        group_channels=0,
        state_bytes=_state_bytes(fields, ""),
        params=hidden * inputs + values * value_dim * hidden,
    )


def _state_bytes(fields: ConfigFields, default: str) -> int:
    """Return the bytes of an element of a state: 4 for float32, else 2."""
    dtype = fields.text.get("mamba_ssm_cache_dtype") or fields.text.get("mamba_ssm_dtype")
    return 4 if (dtype or default) == "float32" else 2


def _estimate_vision_params(config: Mapping[str, Any]) -> int:
    """Estimate a vision tower's parameters from the attention and MLP of its layers."""
    for name in ("vision_config", "visual", "vit_config", "audio_config"):
        section = config.get(name)
        if not isinstance(section, Mapping):
            continue
        flat = {key: value for key, value in section.items() if not isinstance(value, Mapping)}
        fields = ConfigFields(flat)
        hidden = fields.read_count("hidden_size", "embed_dim", "d_model", "width")
        layers = fields.read_count("depth", "num_hidden_layers", "encoder_layers", "layers")
        width = fields.read_count("intermediate_size", "encoder_ffn_dim") or 4 * hidden
        return max(1, layers * (4 * hidden * hidden + 2 * hidden * width))
    return 0


def _parse_quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the quantization of the weights; "" if they have the file's dtype."""
    for part in (config, text):
        for name in ("quantization_config", "compression_config"):
            entry = part.get(name)
            if isinstance(entry, Mapping):
                names = [entry.get("quant_method") or "unknown", entry.get("quant_algo") or ""]
                return " ".join(map(str, names)).strip().lower()
    entry = text.get("quantization")
    return entry.lower() if isinstance(entry, str) else ""
