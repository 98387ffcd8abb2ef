"""The vLLM project's recipes, and pasted `vllm serve` commands."""

COMMANDS = {
    "recipes": (60, "the vLLM project's recipes: list, show"),
}

EXTENSIONS = {"serve": "serve_options:flags"}
