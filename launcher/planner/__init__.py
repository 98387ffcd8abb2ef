"""The memory of a model on every GPU, and the tokens of its KV cache.

Pure: from a model's `config.json`, the bytes of its weights, and the GPUs. The rules are those of
vLLM's own sources, named where they are used; nothing here asks a node.
"""

COMMANDS = {
    "plan": (50, "what to run where, whether it fits, and why"),
}
