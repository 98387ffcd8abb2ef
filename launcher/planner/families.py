"""Model families whose layers are modelled, as data.

The architecture's name in `config.json`, as in vLLM's registry
(`model_executor/models/registry.py`, 0.32), decides the family. For a model of no family, only its
weights are judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts that `config.json` leaves to the model's code.

    `full_every`: every nth layer has full attention, the rest `other_kind`. `wide_state`: the
    recurrent state is float32 by default. `shares_expert`: one more expert, which all tokens use.
    `window_opt_in`: a sliding window counts only with `use_sliding_window`. `headless`: an
    embedding without a language model's head.
    """

    name: str = ""
    unmodelled_reason: str = ""
    latent: bool = False
    tied: bool = False
    gated_mlp: bool = True
    gated_attention: bool = False
    full_every: int = 0
    other_kind: Literal["", "sliding", "chunked", "recurrent"] = ""
    wide_state: bool = False
    shares_expert: bool = False
    window_opt_in: bool = False
    headless: bool = False


_PLAIN = Family()
_LATENT = Family(latent=True)
_GEMMA3 = Family(tied=True, full_every=6, other_kind="sliding")
_DELTA = Family(full_every=4, other_kind="recurrent", gated_attention=True)

_NAMES: tuple[tuple[Family, str], ...] = (
    (
        _PLAIN,
        """LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Ministral3ForCausalLM
        InternLM2ForCausalLM InternLM3ForCausalLM Phi3ForCausalLM PhiMoEForCausalLM
        GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM
        Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM OlmoeForCausalLM Olmo2ForCausalLM
        Olmo3ForCausalLM ExaoneForCausalLM Exaone4ForCausalLM MiniMaxM2ForCausalLM
        Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM SolarForCausalLM OrionForCausalLM
        BailingMoeForCausalLM BailingMoeV2ForCausalLM HunYuanDenseV1ForCausalLM
        HunYuanMoEV1ForCausalLM SeedOssForCausalLM Dots1ForCausalLM MiMoForCausalLM
        ArceeForCausalLM DbrxForCausalLM
        Mistral3ForConditionalGeneration InternVLChatModel
        InternVLForConditionalGeneration InternS1ForConditionalGeneration
        LlavaForConditionalGeneration LlavaNextForConditionalGeneration
        LlavaOnevisionForConditionalGeneration PixtralForConditionalGeneration
        Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
        AfmoeForCausalLM""",
    ),
    (
        Family(window_opt_in=True),
        """Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
        Qwen2AudioForConditionalGeneration Qwen2_5OmniForConditionalGeneration
        Qwen3OmniMoeForConditionalGeneration""",
    ),
    (Family(full_every=2, other_kind="sliding"), "GptOssForCausalLM"),
    (
        Family(gated_mlp=False),
        """NemotronForCausalLM StarCoder2ForCausalLM Starcoder2ForCausalLM PhiForCausalLM
        GPTNeoXForCausalLM GPT2LMHeadModel OPTForCausalLM FalconForCausalLM""",
    ),
    (Family(tied=True), "GemmaForCausalLM CohereForCausalLM"),
    (Family(tied=True, full_every=2, other_kind="sliding"), "Gemma2ForCausalLM"),
    (_GEMMA3, "Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3TextModel"),
    (_GEMMA3, "Gemma4ForCausalLM Gemma4ForConditionalGeneration"),
    (Family(tied=True, full_every=4, other_kind="sliding"), "Cohere2ForCausalLM"),
    (
        Family(full_every=4, other_kind="chunked", shares_expert=True),
        "Llama4ForCausalLM Llama4ForConditionalGeneration",
    ),
    (
        _LATENT,
        """DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM
        Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM KimiK25ForConditionalGeneration
        KimiVLForConditionalGeneration PanguUltraMoEForCausalLM AXK1ForCausalLM
        LongcatFlashForCausalLM""",
    ),
    (
        _DELTA,
        """Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration""",
    ),
    (Family(wide_state=True, gated_mlp=False), "NemotronHForCausalLM"),
    (Family(), "GraniteMoeHybridForCausalLM BambaForCausalLM"),
)
_FAMILIES = {name: family for family, names in _NAMES for name in names.split()}


# The same layers without the head of a language model: embeddings, classes, rewards
# (`model_executor/models/adapters.py`).
_POOLING = ("Model", "ForSequenceClassification", "ForRewardModel")


def find_family(config: Mapping[str, Any], text: Mapping[str, Any]) -> Family:
    """Return the family of a model; `unmodelled_reason` is set if it has none."""
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if not names:
        return Family(name="unknown", unmodelled_reason="config.json names no architecture")
    for name in names:
        if (family := _lookup_family(name)) is not None:
            reason = ""
            if family.latent and "compress_ratios" in text:
                reason = f"{name} with compressed attention is not modelled"
            return replace(family, name=name, unmodelled_reason=reason)
    return Family(name=names[0], unmodelled_reason=f"the architecture {names[0]} is not modelled")


def _lookup_family(name: str) -> Family | None:
    if name in _FAMILIES:
        return _FAMILIES[name]
    for suffix in _POOLING:
        decoder_name = name.removesuffix(suffix) + "ForCausalLM"
        if name.endswith(suffix) and decoder_name in _FAMILIES:
            return replace(_FAMILIES[decoder_name], headless=True)
    return None
