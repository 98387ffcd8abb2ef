"""What a model's `config.json` says about how the model can be split.

Pure. Names of keys: vLLM's `get_num_experts` and the configurations of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's `config.json` says about how it can be split; `None` where it says nothing."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    experts: int | None = None


def shape_of(config: Mapping[str, Any] | None) -> ModelShape:
    """Read heads and layers from a `config.json`; a multimodal model keeps its language part under
    `text_config`.
    """
    if not config:
        return ModelShape()
    parts: list[Mapping[str, Any]] = [config]
    parts += [
        part
        for name in ("text_config", "llm_config", "language_config")
        if isinstance(part := config.get(name), Mapping)
    ]

    def number(*names: str) -> int | None:
        found = (
            part[name]
            for part in reversed(parts)
            for name in names
            if _is_whole_number(part.get(name))
        )
        return next((value for value in found if value > 0), None)

    heads = number("num_attention_heads", "n_head", "n_heads")
    return ModelShape(
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        experts=_experts(config) if heads is not None else None,
    )


def _experts(config: Mapping[str, Any]) -> int:
    """Count a model's experts, wherever in its parts they are named (vLLM's `get_num_experts`); 0
    of a dense one.
    """
    found = [0]
    for name, value in config.items():
        if isinstance(value, Mapping):
            found.append(_experts(value))
        elif isinstance(value, list) and name == "block_configs":
            found += [_experts(block) for block in value if isinstance(block, Mapping)]
        elif name in _EXPERTS:
            numbers = value if isinstance(value, list) else [value]
            found += filter(_is_whole_number, numbers)
    return max(found)


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
