"""LoRA adapters of a job, by name: their ranks, and vLLM's arguments and requests for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..job import PlacedJob
from .job_file import Refused

CONFIGURATION = "adapter_config.json"
SMALLEST_RANK = 8  # vLLM's `max_lora_rank` is a power of two from here on


def adapter_arguments(job: PlacedJob) -> dict[str, Any]:
    """Return vLLM's arguments for a job's adapters; those of `vllm serve` name them.

    Raises:
        Refused: an adapter's configuration cannot be read.
    """
    if not job.lora:
        return {}
    rank = max(read_rank(name, path) for name, path in job.lora.items())
    arguments = {
        "enable_lora": True,
        "max_loras": len(job.lora),
        "max_lora_rank": max(SMALLEST_RANK, 1 << (rank - 1).bit_length()),
    }
    if job.row_kind == "request":
        modules = [f"{name}={path}" for name, path in job.lora.items()]
        return {**arguments, "lora_modules": modules}
    return arguments


def read_rank(name: str, path: str) -> int:
    """Return the largest rank of an adapter.

    Raises:
        Refused: its configuration is missing, or has no rank.
    """
    try:
        file = os.path.join(path, CONFIGURATION)
        if not os.path.isabs(path):
            from transformers.utils import cached_file

            file = cached_file(path, CONFIGURATION)
        with open(file, encoding="utf-8") as opened:
            config = json.load(opened)
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        return max(map(int, ranks))
    except Exception as problem:  # of the hub's library, too
        raise Refused(
            f"the LoRA adapter {name} cannot be read from {path}",
            f"{type(problem).__name__}: {problem}",
            f"check it with `vlaunch exec -- ls {path}`: every node needs the adapter's folder",
        ) from problem


def adapter_request(lora: Mapping[str, str] | None) -> Any:
    """Return vLLM's request for the only adapter; None without one."""
    if not lora:
        return None
    from vllm.lora.request import LoRARequest

    ((name, path),) = lora.items()
    return LoRARequest(name, 1, path)
