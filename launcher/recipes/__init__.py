"""The vLLM project's recipes, and pasted `vllm serve` commands."""

COMMANDS = {
    "recipes": (51, "List and show vLLM recipes"),
}

EXTENSIONS = {"serve": "serve_options:flags"}
