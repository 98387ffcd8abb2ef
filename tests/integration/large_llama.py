"""Create a Llama of 2 GB of random weights from the tiny one; runs in the lab's image.

usage: python3 - TINY-MODEL DIRECTORY   (this program on standard input)
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, LAYERS, HEADS = 2048, 8192, 16, 32


def main() -> None:
    """Write configuration, tokenizer and weights, one file per quarter of the layers."""
    source, target = map(Path, sys.argv[1:3])
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (target / "config.json").write_text(json.dumps(config))
    torch: Any = importlib.import_module("torch")
    save: Any = importlib.import_module("safetensors.torch").save_file
    index: dict[str, str] = {}
    for part in range(4):
        tensors = {}
        for number in range(part * LAYERS // 4, (part + 1) * LAYERS // 4):
            tensors |= layer_tensors(torch, number)
        if part == 0:
            tensors["model.embed_tokens.weight"] = random_tensor(
                torch, config["vocab_size"], HIDDEN
            )
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        name = f"model-{part + 1:05}-of-00004.safetensors"
        save(tensors, target / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    index_file = {"metadata": {}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(json.dumps(index_file))


def random_tensor(torch: Any, *shape: int) -> Any:
    """Return small random numbers."""
    return torch.randint(-64, 64, shape, dtype=torch.int8).to(torch.bfloat16) / 4096


def layer_tensors(torch: Any, number: int) -> dict[str, Any]:
    """Return the weights of a layer by name."""
    shapes = {
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    ones = {name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    tensors = {name: random_tensor(torch, *shape) for name, shape in shapes.items()} | ones
    return {f"model.layers.{number}.{name}.weight": value for name, value in tensors.items()}


if __name__ == "__main__":
    main()
