"""vLLM engine arguments by name, as in inventories for servers and batch jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Arguments derived from a batch job, with the keys to use instead; servers have theirs in `serve:`.
OWNED_ARGUMENTS = {
    "model": "write `model` at the top level",
    "tensor_parallel_size": "write `engine.tp`",
    "pipeline_parallel_size": "write `engine.pp`",
    "distributed_executor_backend": "it is derived from `mode` and `engine.placement`",
    "enable_return_routed_experts": "results have no column for it",
    "headless": "vlaunch starts the ranks",
    "hf_token": "give the token to the containers with `secrets` in the inventory",
    "api_key": "a batch job has no endpoint",
    "nnodes": "vlaunch places the replicas",
    "node_rank": "vlaunch places the replicas",
    "master_addr": "vlaunch chooses the ranks' rendezvous",
    "master_port": "vlaunch chooses the ranks' rendezvous",
    "device_ids": "Ray gives each replica its GPUs",
    "skip_tokenizer_init": "results are text",
    "stream_interval": "a batch job does not stream",
    "runner": "it is derived from `task`, which is written at the top level",
    "convert": "it follows from the model and from `task`, which is written at the top level",
    "task": "write `task` at the top level",
}
SHORT_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
}


def python_name(argument: str) -> str:
    """Return the Python name of an engine argument: `--max-model-len` → `max_model_len`."""
    return argument.removeprefix("--").replace("-", "_")


def to_flags(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the equivalent flags of `vllm serve`, converted like vLLM's own configuration files."""
    for argument, value in args.items():
        name = python_name(argument).replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}", *(_flag_value(item) for item in value))
        elif value is not None:
            yield from (f"--{name}", _flag_value(value))


def _flag_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
