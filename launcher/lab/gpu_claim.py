"""vLLM plugin for simulated GPUs: each rank claims its share of a GPU's memory.

vLLM's own check verifies that enough is free. The claim is an open, empty memory file, which lives
as long as the process and whose name the simulated `nvidia-smi` reads.
"""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any


def register() -> None:
    """Make every rank claim its memory before it initialises its device."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device

    def claim_first(self: Any) -> None:
        claim(self.vllm_config, self.worker.local_rank)
        init_device(self)

    WorkerWrapperBase.init_device = claim_first


def claim(config: Any, local_rank: int) -> None:
    """Claim the configured share of memory on the GPU of a rank."""
    from vllm.v1.worker.utils import request_memory

    gpu = str(_gpu_index(config.parallel_config, local_rank))
    query = ("--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
    answer = subprocess.check_output(("nvidia-smi", "--id", gpu, *query), text=True)
    uuid, total, used = answer.strip().split(", ")
    if total.isdigit():  # a GPU that shares the host's memory reports none
        memory = {"total_memory": int(total) << 20, "free_memory": int(total) - int(used) << 20}
        snapshot = SimpleNamespace(device_=f"cuda:{gpu}", **memory)
        size = request_memory(snapshot, config.cache_config) >> 20
        os.memfd_create(f"gpu-memory:{uuid}:{size}")


def _gpu_index(parallel: Any, local_rank: int) -> int:
    """Return the index of a rank's GPU in the container: Ray's choice, else by the local rank."""
    if assigned := parallel.assigned_physical_gpu_ids:
        return int(assigned[local_rank])
    number = local_rank + (parallel.data_parallel_rank_local or 0) * parallel.world_size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(visible.split(",")[number]) if visible else number
