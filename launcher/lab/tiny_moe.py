"""Make a tiny random mixture of experts with another model's tokenizer; run inside the practice
image, which has the libraries.

usage: python3 tiny_moe.py DIRECTORY OTHER-MODEL

Four experts, two of them for each token: two ranks with expert parallelism hold two experts each.
The CPU kernel divides the experts' sizes by 32.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


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
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
