"""Working memory of an engine, beside weights and KV cache.

Pure. vLLM measures it at the start, and it cannot be computed exactly: CUDA and NCCL, the larger
peak of one forward pass of a full batch or of sampling for all sequences (they follow each other),
and CUDA graphs. Here it is a sum of parts, each with a low, a likely and a high factor, fitted to
the logs of some seventy servers (`docs/explanation/planning.md`). Parts vary independently: their
ranges are added in quadrature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.planner import versions
from launcher.planner.architecture import Architecture
from launcher.planner.weights import GIB, ParallelConfig

Factors = tuple[float, float, float]

# Factors (low, likely, high) of parts, whose sizes are GiB, or 1 for parts that exist or not.
FACTORS: dict[str, Factors] = {
    "context": (0.0, 0.15, 0.6),  # CUDA and cuBLAS
    "peers": (0.0, 0.3, 1.2),  # NCCL's and custom all-reduce's buffers
    "many": (0.0, 0.2, 1.1),  # the same, for eight ranks and more
    "nodes": (0.0, 0.5, 1.0),  # NCCL's network buffers
    "forward": (1.0, 1.6, 2.3),  # activations of a dense forward pass
    "experts": (0.5, 2.0, 5.0),  # tokens routed to experts
    "workspace": (0.0, 2.0, 4.5),  # buffers of the same before 0.20, which grew in steps and stayed
    "sampler fused": (2.0, 3.2, 4.5),  # copies of all sequences' logits in float32
    "sampler sorts": (9.0, 9.6, 10.5),
    "sampler either": (2.0, 6.0, 10.5),
    "sampler unsure": (2.0, 3.2, 11.5),
    "graphs": (0.0, 0.3, 1.4),  # MiB per layer and captured size
    "capture": (0.0, 0.4, 1.1),  # remains of measuring the graphs
    "encoder": (0.0, 1.0, 3.2),  # a vision encoder's pass over its largest input
    "unified": (0.0, 2.5, 7.0),  # memory that a GPU shares with its host
    "sparse": (0.5, 3.0, 6.0),  # the indexer's buffers of sparse attention
    "rocm": (0.0, 0.7, 1.5),
    "process": (0.4, 0.65, 1.6),  # a rank on a CPU: Python, torch, and compiled code
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The maximum load of an engine; `stage` counts from 0."""

    parallel: ParallelConfig
    stage: int
    batched_tokens: int
    sequences: int
    nodes: int
    eager: bool
    version: tuple[int, int]
    gpu: str = ""
    flashinfer: bool | None = None

    @property
    def last(self) -> bool:
        """True for the stage that samples."""
        return self.stage == len(self.parallel.stages) - 1


Parts = tuple[tuple[str, float], ...]
# A pass runs the layers, then the sampler: the larger peak counts.
_LAYERS, _SAMPLER = ("forward", "experts"), ("sampler",)


def sum_parts(sizes: Parts, factors: Mapping[str, Factors]) -> Factors:
    """Return the sum of parts; their ranges are added in quadrature."""

    def peak(which: int) -> float:
        return max(
            sum(factors[name][which] * size for name, size in sizes if name.startswith(names))
            for names in (_LAYERS, _SAMPLER)
        )

    spans = [(peak(0), peak(1), peak(2))]
    for name, size in sizes:
        if not name.startswith((*_LAYERS, *_SAMPLER)):
            low, likely, high = factors[name]
            spans.append((low * size, likely * size, high * size))
    total = sum(likely for _, likely, _ in spans)
    below = math.hypot(*(likely - low for low, likely, _ in spans))
    above = math.hypot(*(high - likely for _, likely, high in spans))
    return max(0.0, total - below), total, total + above


def memory_parts(model: Architecture, load: EngineLoad) -> Parts:
    """Return the non-zero parts, by the names of their factors, with their sizes."""
    parallel, latent = load.parallel, model.latent
    ranks = parallel.tp * len(parallel.stages) * parallel.dp
    graphs = versions.counts_graph_memory(load.version) and not load.eager
    layers = parallel.stages[load.stage]
    sizes = {
        "context": 1.0,
        "peers": float(ranks > 1),
        "many": min(1.0, max(0, ranks - 2) / 6),
        "nodes": float(load.nodes > 1),
        "graphs": len(graph_batch_sizes(load)) * layers / 1024 if graphs else 0.0,
        "capture": float(graphs),
        "encoder": float(model.multimodal and load.stage == 0),
        "unified": float("GB10" in load.gpu),
        "sparse": float(latent is not None and latent.indexer > 0),
        "rocm": float(versions.is_amd(load.gpu)),
        **_forward_parts(model, load),
    }
    return tuple((name, size) for name, size in sizes.items() if size)


def _forward_parts(model: Architecture, load: EngineLoad) -> dict[str, float]:
    """Return the sizes of a pass of the largest batch, in GiB."""
    tp, tokens, experts = load.parallel.tp, load.batched_tokens, model.experts
    mlp_width = 0.0 if experts else 2 * model.width / tp
    routed = 0.0
    if experts:
        width = 3 * experts.width / (tp * load.parallel.dp)
        routed = tokens * experts.per_token * 2 * (model.hidden + width) / GIB
    logits = load.sequences * model.vocabulary * 4 / GIB if load.last else 0.0
    sampler = versions.sampler_kind(load.version, load.gpu, load.flashinfer)
    return {
        "forward": tokens * 2 * (2 * model.hidden + mlp_width) / GIB,
        "experts": routed,
        "workspace": routed if load.version < (0, 20) else 0.0,
        f"sampler {sampler}": logits,
    }


def graph_batch_sizes(load: EngineLoad) -> list[int]:
    """Return the batch sizes of CUDA graphs (`_set_cudagraph_sizes` in `config/vllm.py`)."""
    blackwell = any(name in load.gpu for name in ("B200", "B300"))
    limit = min(2 * load.sequences, 1024 if blackwell else 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    return [size for size in sizes if size <= limit]
