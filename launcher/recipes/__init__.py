"""The vLLM project's recipes, and pasted `vllm serve` commands."""
