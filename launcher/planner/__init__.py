"""Memory of a model on every GPU, and the capacity of its KV cache in tokens.

Pure: computed from a model's `config.json`, the bytes of its weights, and the GPUs. The rules are
those of vLLM's own sources, named where they are used; nothing here queries a node.
"""
