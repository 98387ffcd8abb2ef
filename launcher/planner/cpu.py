"""What is different where vLLM's CPU build runs: practice clusters, and servers without GPUs.

Pure. Sources: `platforms/cpu.py`, `v1/worker/cpu_worker.py` and `engine/arg_utils.py` of vLLM 0.32.
Its KV cache is what it is given (`--kv-cache-memory-bytes`, `VLLM_CPU_KVCACHE_SPACE`), else the
node's memory × utilization, less what the rank's process has taken by then.
"""

from __future__ import annotations

NAME = "CPU"
DEFAULTS = (2048, 128)  # batched tokens and sequences, for each rank
BLOCK = 128  # tokens of a block; latent attention has 16, as elsewhere
PARTS = (("process", 1.0),)  # of working memory
