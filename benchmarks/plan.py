"""The planner's estimates against the figures that servers printed at their start.

    python -m benchmarks.plan [FILE …] [--cases | --table]

For each case: tokens from the measured KV cache (exact but for the rounding of printed figures),
weights per GPU, and the KV cache from end to end, with the verdict; for comparison, peers'
formulas. The factors of working memory are fitted for each source without that source, so that no
case is judged by constants that it helped to find. Held-out cases are in no fit; a table of their
own judges them by the planner's own factors. `--table` shows instead the chosen layout of each
model on twenty clusters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.plan_case import Case, parse_cases, parse_version
from launcher.core import expectations_file as expectations
from launcher.core.expectations import Expectations
from launcher.planner import working_memory
from launcher.planner.architecture import Architecture
from launcher.planner.choice import Demand, PlanQuestion, choose_layout, judge_estimate
from launcher.planner.cluster import Cluster, ClusterLink, PlanHost
from launcher.planner.estimate import Estimate, GpuModel
from launcher.planner.weights import GIB

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "planner"
_NVLINK = ClusterLink(nvlink=True, rdma=True)
_FAST = ClusterLink(nvlink=True, rdma=True, gbps=46.0, latency_us=6.0)
_PCIE = ClusterLink(nvlink=False)
# nodes, GPUs per node, GPU model, links
CLUSTERS = {
    "1 × T4": (1, 1, "T4", _PCIE),
    "1 × RTX 4090": (1, 1, "RTX 4090", _PCIE),
    "2 × RTX 3090": (1, 2, "RTX 3090", _PCIE),
    "8 × L4": (1, 8, "L4", _PCIE),
    "4 × L40S": (1, 4, "L40S", _PCIE),
    "6 × L40S": (1, 6, "L40S", _PCIE),
    "8 × L40S": (1, 8, "L40S", _PCIE),
    "2 nodes, 4 × L40S": (2, 4, "L40S", _PCIE),
    "8 × A100 40GB": (1, 8, "A100 40GB", _NVLINK),
    "8 × A100 80GB": (1, 8, "A100 80GB", _NVLINK),
    "1 × H100": (1, 1, "H100", _NVLINK),
    "8 × H100": (1, 8, "H100", _NVLINK),
    "2 nodes, 8 × H100": (2, 8, "H100", _NVLINK),
    "2 nodes, 8 × H100, measured": (2, 8, "H100", _FAST),
    "16 nodes, 8 × H100": (16, 8, "H100", _NVLINK),
    "8 × H200": (1, 8, "H200", _NVLINK),
    "8 × B200": (1, 8, "B200", _NVLINK),
    "8 × MI300X": (1, 8, "MI300X", _NVLINK),
    "2 × DGX Spark": (2, 1, "GB10", ClusterLink(rdma=True)),
    "4 × DGX Spark": (4, 1, "GB10", ClusterLink(rdma=True)),
}
_ROUNDS, _STEPS = 3, (0.6, 0.8, 0.9, 1.1, 1.25, 1.6)
PEERS = ("llm-d", "sparkrun", "weights × 1.2", "GPUStack")
_LEAST_SHARE = 0.1  # of the budget: the error of a smaller KV cache does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """A case, and the figures that its server printed."""

    case: Case
    model: Architecture
    name: str
    source: str
    fits: bool | None
    kv_gib: float | None
    model_gib: float | None
    tokens: int | None
    excluded: bool


def read_cases(path: Path) -> Iterator[MeasuredCase]:
    """Yield the modelled cases of a file."""
    text = path.read_text(encoding="utf-8")
    for case, raw in zip(parse_cases(text), yaml.safe_load(text), strict=True):
        model, expect = case.model(), raw["expect"]
        url = raw["source"] if "http" in raw["source"] else raw["model"]
        printed = None if raw.get("speculative") or not expect.get("fits") else expect["kv_tokens"]
        several = len({layer.kind for layer in model.layers}) > 1
        if several and parse_version(case.vllm_version) < (0, 21):  # blocks / groups × block size
            concurrency = expect.get("max_concurrency")
            printed = int(concurrency * case.estimate().length) if concurrency and printed else None
        if not model.unmodelled_reason:
            yield MeasuredCase(
                case=case,
                model=model,
                name=raw["model"],
                source=url,
                fits=expect.get("fits"),
                kv_gib=expect.get("kv_gib"),
                model_gib=expect.get("model_gib_per_gpu"),
                tokens=printed,
                excluded=bool(raw.get("held_out")),
            )


def kv_error(measured: MeasuredCase, estimate: Estimate) -> float | None:
    """Return the error of the KV cache as a share of the measured one; None when it is unknown or
    too small a part of the budget.
    """
    stage = estimate.poorest
    if measured.kv_gib is None or not measured.case.weights_gib:
        return None
    if measured.kv_gib < _LEAST_SHARE * stage.budget:
        return None
    return abs(stage.kv.likely - measured.kv_gib) / measured.kv_gib


@dataclass(frozen=True, slots=True)
class Fit:
    """Inputs of a fit from one case: the memory after the weights, and the measured KV cache, in
    GiB.
    """

    parts: working_memory.Parts
    remaining: float
    kv: float

    def error(self, factors: Mapping[str, working_memory.Factors]) -> float:
        """Return the error as a share, at most 0.5."""
        likely = working_memory.sum_parts(self.parts, factors)[1]
        return min(0.5, abs(self.remaining - likely - self.kv) / self.kv)


def make_fit(measured: MeasuredCase) -> Fit | None:
    """Return the fit inputs of a case; None when its KV cache cannot be judged."""
    estimate = measured.case.estimate()
    if kv_error(measured, estimate) is None or measured.kv_gib is None:
        return None
    stage = estimate.poorest
    return Fit(stage.parts, stage.budget - stage.weights.likely, measured.kv_gib)


def fit_factors(fits: Sequence[Fit]) -> dict[str, working_memory.Factors]:
    """Fit the likely factors by trying steps of each in turn, within their ranges."""
    factors = dict(working_memory.FACTORS)
    best = statistics.fmean(fit.error(factors) for fit in fits)
    for _ in range(_ROUNDS):
        for name, (low, _, high) in working_memory.FACTORS.items():
            for step in _STEPS:
                before = factors[name]
                factors[name] = (low, min(max(before[1] * step, low), high), high)
                loss = statistics.fmean(fit.error(factors) for fit in fits)
                if loss < best:
                    best = loss
                else:
                    factors[name] = before
    return factors


def estimate_cases(cases: Sequence[MeasuredCase]) -> list[tuple[MeasuredCase, Estimate]]:
    """Estimate each case with factors that were fitted to all other sources."""
    factors, results = dict(working_memory.FACTORS), []
    fits = [(measured.source, fit) for measured in cases if (fit := make_fit(measured))]
    for source in dict.fromkeys(measured.source for measured in cases):
        working_memory.FACTORS.update(fit_factors([fit for other, fit in fits if other != source]))
        results += [
            (measured, measured.case.estimate()) for measured in cases if measured.source == source
        ]
        working_memory.FACTORS.update(factors)
    return results


def block_error(measured: MeasuredCase, estimate: Estimate) -> float | None:
    """Return the error in blocks of the tokens of the measured KV cache, less the rounding of the
    printed figures (hundredths of a GiB, and of a request).
    """
    tokens = measured.case.tokens_from_kv()
    if (
        tokens is None
        or not measured.tokens
        or not measured.kv_gib
        or measured.kv_gib < 0
        or not estimate.cache
    ):
        return None
    per_block = estimate.length / estimate.cache.per_request
    rounding = 0.005 * GIB / max(estimate.cache.block_bytes) + 0.005 * estimate.cache.per_request
    return max(0.0, abs(tokens - measured.tokens) / per_block - rounding)


def peer_estimates(measured: MeasuredCase, estimate: Estimate) -> dict[str, tuple[float, bool]]:
    """Return the KV cache in GiB per GPU and "fits" by peers' formulas (benchmarks/RESULTS.md)."""
    case, weights = measured.case, measured.case.weights_gib or 0.0
    ranks = (case.tp or 1) * (case.pp or 1)
    budget = estimate.poorest.budget
    activation = 8.0 if measured.model.experts else 2.5 if measured.model.multimodal else 5.5
    other = 0.6 if ranks > 1 else 0.15
    llm_d = (budget * ranks - weights - activation - other * ranks) / ranks
    sparkrun = budget - weights / ranks
    fifth = budget - weights * 1.2 / ranks
    gpustack = budget * ranks - weights * 1.2 - 2
    return {
        "llm-d": (llm_d, llm_d > 0),
        "sparkrun": (sparkrun, sparkrun > 0),
        "weights × 1.2": (fifth, fifth > 0),
        "GPUStack": (math.nan, gpustack > 0),
    }


def _share(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else math.nan


def summary_lines(results: Sequence[tuple[MeasuredCase, Estimate]]) -> Iterator[str]:
    """Yield the figures."""
    own_errors = [
        value
        for measured, estimate in results
        if (value := kv_error(measured, estimate)) is not None
    ]
    inside = [
        estimate.poorest.kv.low <= measured.kv_gib <= estimate.poorest.kv.high
        for measured, estimate in results
        if measured.kv_gib is not None and measured.case.weights_gib
    ]
    off = [
        value
        for measured, estimate in results
        if (value := block_error(measured, estimate)) is not None
    ]
    loaded = {True: list[float](), False: list[float]()}
    for measured, estimate in results:
        if measured.model_gib and measured.case.weights_gib:
            wrong = abs(estimate.stages[0].weights.likely / measured.model_gib - 1)
            loaded[measured.model.quantization == "mxfp4"].append(wrong)
    decided = [(measured, estimate) for measured, estimate in results if measured.case.weights_gib]
    false = [
        measured
        for measured, estimate in decided
        if not measured.fits and judge_estimate(estimate) == "fits"
    ]
    lost = [
        measured
        for measured, estimate in decided
        if measured.fits and judge_estimate(estimate) == "does-not-fit"
    ]
    yield f"tokens from KV GiB: {sum(value <= 1 for value in off)} of {len(off)} to one block"
    yield f"weights per GPU: p90 {_share(loaded[False], 0.9):.1%} of {len(loaded[False])}, " + (
        f"mxfp4 {_share(loaded[True], 0.9):.1%} of {len(loaded[True])}"
    )
    yield (
        f"KV GiB: median {_share(own_errors, 0.5):.1%}, p90 {_share(own_errors, 0.9):.1%} of"
        f" {len(own_errors)}"
    )
    yield f"range holds the truth: {sum(inside)} of {len(inside)}"
    yield f"fits, but did not start: {len(false)}; started, but does not fit: {len(lost)}"
    for name in PEERS:
        errors, right = [], 0
        for measured, estimate in decided:
            kv, fits = peer_estimates(measured, estimate)[name]
            right += fits == bool(measured.fits)
            if kv_error(measured, estimate) is not None and measured.kv_gib and not math.isnan(kv):
                errors.append(abs(kv - measured.kv_gib) / measured.kv_gib)
        kv = f"KV GiB: median {_share(errors, 0.5):.1%}, p90 {_share(errors, 0.9):.1%}; "
        yield f"{name}: {kv if errors else ''}fits right in {right} of {len(decided)}"


def case_lines(results: Sequence[tuple[MeasuredCase, Estimate]]) -> Iterator[str]:
    """Yield a row for each case."""
    for measured, estimate in results:
        kv = estimate.poorest.kv
        yield (
            f"{measured.case.id:40} KV {kv.low:6.1f} {kv.likely:6.1f} {kv.high:6.1f}, printed"
            f" {measured.kv_gib}; {judge_estimate(estimate)}, started: {measured.fits}; blocks off"
            f" {block_error(measured, estimate)}"
        )


def layout_table(cases: Sequence[MeasuredCase]) -> Iterator[str]:
    """Yield a Markdown table of the chosen layouts: models in rows, clusters in columns.

    The demand is 16 requests of 8,192 tokens; marks: tight (~), does not fit (!).
    """
    gpus = expectations.load_expectations()
    yield "| model, GiB | " + " | ".join(CLUSTERS) + " |"
    yield "|---|" + "---|" * len(CLUSTERS)
    weighed = [measured for measured in cases if measured.case.weights_gib and measured.case.config]
    models = {
        measured.name: measured
        for measured in sorted(weighed, key=lambda sized: sized.case.weights_gib or 0)
    }
    for name, measured in models.items():
        cells = [_cell(measured, *shape, gpus=gpus) for shape in CLUSTERS.values()]
        yield f"| {name}, {measured.case.weights_gib:.0f} | " + " | ".join(cells) + " |"


def _cell(
    measured: MeasuredCase,
    nodes: int,
    count: int,
    gpu: str,
    link: ClusterLink,
    *,
    gpus: Expectations,
) -> str:
    expectation = gpus.gpu(gpu)
    memory = expectation.reported_gib(gpu) if expectation else None
    card = GpuModel(name=gpu, memory_gib=memory or 0.0)
    hosts = tuple(PlanHost(name=f"n{at}", gpus=count, gpu=card) for at in range(nodes))
    planned = choose_layout(
        PlanQuestion(
            model=measured.model,
            weight_bytes=int((measured.case.weights_gib or 0) * GIB),
            cluster=Cluster(hosts=hosts, link=link),
            demand=Demand(context=8192, requests=16),
        )
    )
    layout = planned.layout
    mark = {"fits": "", "tight": " ~", "does-not-fit": " !"}[planned.verdict]
    experts = "E" if layout.experts else ""
    replicas = f"{layout.servers}·" if layout.servers > 1 else ""
    return f"{replicas}{layout.dp}×{layout.tp}×{layout.pp}{experts}{mark}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", type=Path, nargs="*", default=sorted(FIXTURES.glob("*.yaml")))
    parser.add_argument("--cases", action="store_true", help="show each case")
    parser.add_argument("--table", action="store_true", help="show choices, DP × TP × PP")
    options = parser.parse_args()
    cases = [measured for path in options.files for measured in read_cases(path)]
    if options.table:
        for line in layout_table(cases):
            print(line)
        return
    excluded = [(measured, measured.case.estimate()) for measured in cases if measured.excluded]
    results = estimate_cases([measured for measured in cases if not measured.excluded])
    for name, part in (("used for the fit", results), ("held out", excluded)):
        print(f"Cases {name}: {len(part)}")
        for line in (*(case_lines(part) if options.cases else ()), *summary_lines(part)):
            print(f"  {line}")


if __name__ == "__main__":
    main()
