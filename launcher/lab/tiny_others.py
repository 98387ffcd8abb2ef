"""Build of tiny random models of other kinds with another model's tokenizer, inside the lab image.

usage: python3 tiny_others.py DIRECTORY OTHER-MODEL

The directory's name selects the kind. As in the tiny Llama, two tensor-parallel ranks or two
pipeline stages are possible.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    """Write the model into the first directory named on the command line, with the tokenizer of the
    second.
    """
    target, source = sys.argv[1:3]
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    KINDS[Path(target).name](transformers, tokenizer, source).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _moe(transformers: Any, tokenizer: Any, _: str) -> Any:
    """Build a mixture of four experts, two per token, for two ranks with expert parallelism.

    The CPU kernel needs expert sizes divisible by 32.
    """
    config = transformers.Qwen3MoeConfig(
        **_SIZES,
        **_token_ids(tokenizer),
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _token_ids(tokenizer: Any) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _embed(transformers: Any, _: Any, source: str) -> Any:
    """Build a Llama without its head, which vLLM 0.32 serves for embeddings
    (vllm/model_executor/models/registry.py).
    """
    return transformers.LlamaModel(transformers.AutoConfig.from_pretrained(source))


def _rerank(transformers: Any, tokenizer: Any, _: str) -> Any:
    """Build a BERT with one label, which vLLM 0.32 requires for scoring pairs of texts
    (`enable_scoring_api` in vllm/entrypoints/pooling/utils.py).
    """
    config = transformers.BertConfig(
        **_SIZES, **_token_ids(tokenizer), max_position_embeddings=512, num_labels=1
    )
    tokenizer.chat_template = None  # inputs are texts, not conversations
    return transformers.BertForSequenceClassification(config)


KINDS: Mapping[str, Callable[[Any, Any, str], Any]] = {
    "tiny-moe": _moe,
    "tiny-embed": _embed,
    "tiny-rerank": _rerank,
}


if __name__ == "__main__":
    main()
