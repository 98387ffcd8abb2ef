"""The vLLM project's recipes, and pasted `vllm serve` commands."""

EXTENSIONS = {"serve": "serve_options:flags"}
