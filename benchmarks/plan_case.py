"""A case of the planner's benchmark: a model, its GPUs and the flags of one measured server.

`tests/fixtures/planner/README.md` describes the file format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from launcher.core.errors import RequestError
from launcher.planner import versions
from launcher.planner.architecture import Architecture
from launcher.planner.architecture_parser import parse_architecture
from launcher.planner.config_fields import MOST_LAYERS
from launcher.planner.estimate import (
    Estimate,
    GpuModel,
    PlannedEngine,
    build_cache_request,
    engine_limits,
    estimate_replica,
)
from launcher.planner.flags import EngineFlags
from launcher.planner.kv_cache import build_cache
from launcher.planner.weights import GIB, estimate_weight_bytes

_Ranks = Annotated[
    int, Field(ge=1, le=4096), BeforeValidator(lambda value: 1 if value is None else value)
]
_Flag = Annotated[bool, BeforeValidator(bool)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 28)]
_Gib = Annotated[float, Field(gt=0, le=1 << 20, allow_inf_nan=False)]
_ALTERNATING = re.compile(r"alternating: *(\w+), *(\w+)")
_COUNTED = re.compile(r"(\d+) (\w+)(?:, *|$)")
_EVERY = re.compile(r"every (\d+)(?:st|nd|rd|th) layer (\w+), the others (\w+)")

_VERSION = re.compile(r"v?0\.(\d{1,3})(?!\d)(\.\d|\.dev)?")
_MONTH = re.compile(r"(20\d\d)-(\d\d)")
# Newest minor release by month, from the logs of `tests/fixtures/planner/`.
_RELEASES = {
    "2025-02": 7,
    "2025-06": 9,
    "2025-08": 10,
    "2025-10": 11,
    "2025-12": 13,
    "2026-01": 14,
    "2026-02": 15,
    "2026-03": 17,
    "2026-04": 19,
    "2026-06": 23,
    "2026-07": 26,
    "2026-08": 27,
    "2026-09": 29,
    "2026-10": 31,
    "2026-11": 32,
}


class _Gpu(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: str = ""
    memory_gib: _Gib


class _Expect(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kv_gib: float | None = Field(default=None, allow_inf_nan=False)


class Case(BaseModel):
    """The inputs that determine the memory, and the measured KV cache."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    id: str = "case"
    vllm_version: Annotated[str, BeforeValidator(lambda value: str(value or ""))] = ""
    config: dict[str, Any]
    weights_gib: _Gib | None = None
    gpu: _Gpu
    gpus: list[_Gpu] = []
    nodes: _Ranks = 1
    tp: _Ranks = 1
    pp: _Ranks = 1
    dp: _Ranks = 1
    expert_parallel: _Flag = False
    decode_context_parallel_size: _Ranks = 1
    pp_layer_partition: list[_Tokens] | None = None
    block_size: _Tokens | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    kv_cache_dtype: str | None = None
    max_model_len: _Tokens | None = None
    max_num_seqs: _Tokens | None = None
    max_num_batched_tokens: _Tokens | None = None
    enforce_eager: _Flag = False
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: _Flag = False
    expect: _Expect = _Expect()

    def model(self) -> Architecture:
        """Read the configuration; raises RequestError."""
        return parse_architecture(_expand_layers(self.config))

    def engine(self, model: Architecture) -> PlannedEngine:
        """Return the engine; raises RequestError for stages that do not fit together."""
        pp = self.pp
        counts = tuple(self.pp_layer_partition or ())
        gpus = self.gpus or [self.gpu] * pp
        if len(gpus) != pp or (counts and (len(counts), sum(counts)) != (pp, len(model.layers))):
            raise RequestError(
                f"{self.id}: {pp} pipeline stages, {len(gpus)} GPUs and layers {list(counts)} do"
                f" not go together with a model of {len(model.layers)} layers"
            )
        return PlannedEngine(
            gpus=tuple(GpuModel(name=gpu.name, memory_gib=gpu.memory_gib) for gpu in gpus),
            tp=self.tp,
            dp=self.dp,
            nodes=self.nodes,
            version=parse_version(self.vllm_version),
            flags=EngineFlags(
                utilization=self.gpu_memory_utilization,
                length=self.max_model_len,
                batched_tokens=self.max_num_batched_tokens,
                sequences=self.max_num_seqs,
                cache_dtype=self.kv_cache_dtype or "auto",
                block=self.block_size or 0,
                dcp=self.decode_context_parallel_size,
                eager=self.enforce_eager,
                prefix_caching=self.enable_prefix_caching is not False,
                hybrid=not self.disable_hybrid_kv_cache_manager,
                expert_parallel=self.expert_parallel,
                partition=counts,
            ),
        )

    def weight_bytes(self, model: Architecture) -> int:
        """Return the bytes of the weights, counted from the architecture where the case has no
        figure; raises RequestError when that fails.
        """
        size = (
            estimate_weight_bytes(model)
            if self.weights_gib is None
            else int(self.weights_gib * GIB)
        )
        if not size:
            raise RequestError(
                f"{self.id}: no estimate is possible: the size of the weights is not known",
                evidence=model.unmodelled_reason or f"quantization: {model.quantization}",
            )
        return size

    def estimate(self) -> Estimate:
        """Estimate the memory; raises RequestError."""
        model = self.model()
        return estimate_replica(model, self.weight_bytes(model), self.engine(model))

    def tokens_from_kv(self) -> int | None:
        """Return the tokens that the measured KV cache holds; None without a measurement."""
        model, kv_gib = self.model(), self.expect.kv_gib
        if kv_gib is None or model.unmodelled_reason:
            return None
        engine = self.engine(model)
        limits = engine_limits(model, engine)
        cache = build_cache(model, build_cache_request(model, engine, limits), limits.counts)
        return cache.tokens(cache.blocks([max(0, int(kv_gib * GIB))] * engine.pp))


def parse_cases(text: str) -> list[Case]:
    """Parse a list of cases; raises pydantic's ValidationError."""
    return TypeAdapter(list[Case]).validate_python(yaml.safe_load(text))


def parse_version(text: str | None) -> tuple[int, int]:
    """Return major and minor of a version in free text, or of the newest release in the month of a
    date; today's without either.

    YAML turns 0.10 into 0.1; a build without tags calls itself `0.1.dev7`.
    """
    match = _VERSION.search(text or "")
    if match and not (match[2] == ".dev" and match[1] == "1"):
        minor = int(match[1])
        return (0, minor * 10 if minor < 4 and not match[2] else minor)
    if month := _MONTH.search(text or ""):
        minors = [minor for when, minor in _RELEASES.items() if when <= month[0]]
        return (0, minors[-1]) if minors else (0, min(_RELEASES.values()))
    return versions.CURRENT


def _expand_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand `layer_types` that is a text."""
    layer_types, count = config.get("layer_types"), config.get("num_hidden_layers")
    if not isinstance(layer_types, str) or not isinstance(count, int):
        return config
    kinds = _parse_layers(layer_types, min(count, MOST_LAYERS))
    rest = {key: value for key, value in config.items() if key != "layer_types"}
    return {**rest, "layer_types": kinds} if kinds else rest


def _parse_layers(text: str, count: int) -> list[str]:
    """Return the kind of each layer; [] for an unknown text."""
    if match := _ALTERNATING.match(text):
        return [match[1 + index % 2] for index in range(count)]
    if match := _EVERY.match(text):
        every = max(1, int(match[1]))
        return [match[3] if (index + 1) % every else match[2] for index in range(count)]
    counted = [(int(number), kind) for number, kind in _COUNTED.findall(text)]
    if sum(number for number, _ in counted) != count:
        return []
    return [kind for number, kind in counted for _ in range(number)]
