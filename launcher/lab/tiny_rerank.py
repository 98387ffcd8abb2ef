"""Make a tiny random cross-encoder, which gives a pair of texts a score, with another model's
tokenizer; run inside the practice image, which has the libraries.

usage: python3 tiny_rerank.py DIRECTORY OTHER-MODEL

A BERT with one label: vLLM 0.32 ranks with models of exactly one (`enable_scoring_api` in
vllm/entrypoints/pooling/utils.py). Four heads of 32 let two tensor-parallel ranks divide them.
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
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(target)
    tokenizer.chat_template = None  # it is given texts, and no conversation
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
