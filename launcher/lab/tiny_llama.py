"""Build of a tiny random Llama with a tokenizer and a chat template, inside the lab image.

usage: python3 tiny_llama.py DIRECTORY

Four heads and four key-value heads of size 32 can be divided by two tensor-parallel ranks, but not
by three. Two layers allow two pipeline stages. (CPU attention rejects a head size of 16.)
"""

import importlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def main() -> None:
    """Write the model into the directory named on the command line."""
    target = sys.argv[1]
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(target)
    begin, end = SPECIAL[:2]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_train(), bos_token=begin, eos_token=end, pad_token=end
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)


def _train() -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    tokenizer.train([str(path) for path in sources], trainer)
    return tokenizer


if __name__ == "__main__":
    main()
