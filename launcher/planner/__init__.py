"""How much memory a model takes on each GPU, and how many tokens its KV cache holds.

Pure: from a model's `config.json`, the bytes of its weights, and the GPUs. The rules are those of
vLLM's own sources, named where they are used; nothing here asks a node.
"""
