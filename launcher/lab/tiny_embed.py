"""Make a tiny random model that gives embeddings, with another model's tokenizer; run inside the
practice image, which has the libraries.

usage: python3 tiny_embed.py DIRECTORY OTHER-MODEL

The body of a Llama without its head. vLLM 0.32 takes that for a generator, unless it is told
`--runner pooling` (`_get_default_runner_type` in vllm/config/model.py). Heads and layers are those
of the tiny Llama, so that two ranks divide them in both ways.
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
    transformers.LlamaModel(transformers.AutoConfig.from_pretrained(source)).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    main()
