"""The planner against what servers printed at their start.

    python -m benchmarks.plan [FILE …] [--cases | --table]

For each case: tokens from the measured KV cache (the rules, which must be exact but for the
rounding of what was printed), weights per GPU, and the KV cache from end to end, with the verdict.
Beside it what peers' formulas say. The factors of working memory are fitted anew for each source
without that source, so that no case is judged by constants that it helped to find. Cases that are
held out are in no fit; they are judged by the planner as it is, in a table of their own. `--table`
shows instead what is chosen for each model on twenty clusters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.plan_case import Case, read, version_of
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
# nodes, GPUs each, their model, and what connects them
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
_LEAST_SHARE = 0.1  # of the budget, of a KV cache whose error counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A case, and what its server printed."""

    case: Case
    model: Architecture
    name: str
    source: str
    fits: bool | None
    kv_gib: float | None
    model_gib: float | None
    tokens: int | None
    held_out: bool


def known(path: Path) -> Iterator[Known]:
    """Yield the modelled cases of a file."""
    text = path.read_text(encoding="utf-8")
    for case, raw in zip(read(text), yaml.safe_load(text), strict=True):
        model, expect = case.model(), raw["expect"]
        url = raw["source"] if "http" in raw["source"] else raw["model"]
        printed = None if raw.get("speculative") or not expect.get("fits") else expect["kv_tokens"]
        several = len({layer.kind for layer in model.layers}) > 1
        if several and version_of(case.vllm_version) < (0, 21):  # blocks / groups × block size
            held = expect.get("max_concurrency")
            printed = int(held * case.estimated().length) if held and printed else None
        if not model.unmodelled_reason:
            yield Known(
                case=case,
                model=model,
                name=raw["model"],
                source=url,
                fits=expect.get("fits"),
                kv_gib=expect.get("kv_gib"),
                model_gib=expect.get("model_gib_per_gpu"),
                tokens=printed,
                held_out=bool(raw.get("held_out")),
            )


def error(each: Known, found: Estimate) -> float | None:
    """Return the error of the KV cache as a share of the measured one; None where it is too small
    a part of the budget, or not known.
    """
    stage = found.poorest
    if each.kv_gib is None or not each.case.weights_gib:
        return None
    if each.kv_gib < _LEAST_SHARE * stage.budget:
        return None
    return abs(stage.kv.likely - each.kv_gib) / each.kv_gib


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit needs of one case: what is left after the weights, and the measured KV cache."""

    parts: working_memory.Parts
    left: float
    kv: float

    def error(self, factors: Mapping[str, working_memory.Factors]) -> float:
        """Return the error as a share, of which none counts for too much."""
        likely = working_memory.sum_parts(self.parts, factors)[1]
        return min(0.5, abs(self.left - likely - self.kv) / self.kv)


def fit_of(each: Known) -> Fit | None:
    """Return what a case gives to a fit; None when its KV cache is not to be judged."""
    found = each.case.estimated()
    if error(each, found) is None or each.kv_gib is None:
        return None
    stage = found.poorest
    return Fit(stage.parts, stage.budget - stage.weights.likely, each.kv_gib)


def fitted(fits: Sequence[Fit]) -> dict[str, working_memory.Factors]:
    """Fit the likely factors by trying steps of each in turn; they stay in their ranges."""
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


def judged(cases: Sequence[Known]) -> list[tuple[Known, Estimate]]:
    """Work each case out with factors that were fitted to all other sources."""
    begun, results = dict(working_memory.FACTORS), []
    fits = [(each.source, fit) for each in cases if (fit := fit_of(each))]
    for source in dict.fromkeys(each.source for each in cases):
        working_memory.FACTORS.update(fitted([fit for other, fit in fits if other != source]))
        results += [(each, each.case.estimated()) for each in cases if each.source == source]
        working_memory.FACTORS.update(begun)
    return results


def blocks_off(each: Known, found: Estimate) -> float | None:
    """Return how many blocks the tokens of the measured KV cache are off; what was printed is
    rounded to hundredths of a GiB, and of a request.
    """
    tokens = each.case.tokens_from_kv()
    if tokens is None or not each.tokens or not each.kv_gib or each.kv_gib < 0 or not found.cache:
        return None
    per_block = found.length / found.cache.per_request
    rounding = 0.005 * GIB / max(found.cache.block_bytes) + 0.005 * found.cache.per_request
    return max(0.0, abs(tokens - each.tokens) / per_block - rounding)


def peers(each: Known, found: Estimate) -> dict[str, tuple[float, bool]]:
    """Return KV GiB for each GPU and "fits" by others' formulas (benchmarks/RESULTS.md)."""
    case, weights = each.case, each.case.weights_gib or 0.0
    ranks = (case.tp or 1) * (case.pp or 1)
    budget = found.poorest.budget
    activation = 8.0 if each.model.experts else 2.5 if each.model.multimodal else 5.5
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


def table(results: Sequence[tuple[Known, Estimate]]) -> Iterator[str]:
    """Yield the figures as a table."""
    mine = [found for each, estimate in results if (found := error(each, estimate)) is not None]
    inside = [
        estimate.poorest.kv.low <= each.kv_gib <= estimate.poorest.kv.high
        for each, estimate in results
        if each.kv_gib is not None and each.case.weights_gib
    ]
    off = [found for each, estimate in results if (found := blocks_off(each, estimate)) is not None]
    loaded = {True: list[float](), False: list[float]()}
    for each, estimate in results:
        if each.model_gib and each.case.weights_gib:
            wrong = abs(estimate.stages[0].weights.likely / each.model_gib - 1)
            loaded[each.model.quantization == "mxfp4"].append(wrong)
    decided = [(each, estimate) for each, estimate in results if each.case.weights_gib]
    false = [
        each for each, estimate in decided if not each.fits and judge_estimate(estimate) == "fits"
    ]
    lost = [
        each
        for each, estimate in decided
        if each.fits and judge_estimate(estimate) == "does-not-fit"
    ]
    yield f"tokens from KV GiB: {sum(found <= 1 for found in off)} of {len(off)} to one block"
    yield f"weights per GPU: p90 {_share(loaded[False], 0.9):.1%} of {len(loaded[False])}, " + (
        f"mxfp4 {_share(loaded[True], 0.9):.1%} of {len(loaded[True])}"
    )
    yield f"KV GiB: median {_share(mine, 0.5):.1%}, p90 {_share(mine, 0.9):.1%} of {len(mine)}"
    yield f"range holds the truth: {sum(inside)} of {len(inside)}"
    yield f"fits, but did not start: {len(false)}; started, but does not fit: {len(lost)}"
    for name in PEERS:
        errors, right = [], 0
        for each, estimate in decided:
            kv, fits = peers(each, estimate)[name]
            right += fits == bool(each.fits)
            if error(each, estimate) is not None and each.kv_gib and not math.isnan(kv):
                errors.append(abs(kv - each.kv_gib) / each.kv_gib)
        kv = f"KV GiB: median {_share(errors, 0.5):.1%}, p90 {_share(errors, 0.9):.1%}; "
        yield f"{name}: {kv if errors else ''}fits right in {right} of {len(decided)}"


def rows(results: Sequence[tuple[Known, Estimate]]) -> Iterator[str]:
    """Yield a row for each case."""
    for each, estimate in results:
        kv = estimate.poorest.kv
        yield (
            f"{each.case.id:40} KV {kv.low:6.1f} {kv.likely:6.1f} {kv.high:6.1f}, printed"
            f" {each.kv_gib}; {judge_estimate(estimate)}, started: {each.fits}; blocks off"
            f" {blocks_off(each, estimate)}"
        )


def choices(cases: Sequence[Known]) -> Iterator[str]:
    """Yield a table in Markdown: models of the cases in rows, clusters in columns, and in each cell
    what is chosen for 16 requests of 8,192 tokens, with a mark where it is tight (~) or does not
    fit (!).
    """
    gpus = expectations.load_expectations()
    yield "| model, GiB | " + " | ".join(CLUSTERS) + " |"
    yield "|---|" + "---|" * len(CLUSTERS)
    weighed = [each for each in cases if each.case.weights_gib and each.case.config]
    models = {
        each.name: each for each in sorted(weighed, key=lambda one: one.case.weights_gib or 0)
    }
    for name, each in models.items():
        cells = [_cell(each, *shape, gpus=gpus) for shape in CLUSTERS.values()]
        yield f"| {name}, {each.case.weights_gib:.0f} | " + " | ".join(cells) + " |"


def _cell(
    each: Known, nodes: int, count: int, gpu: str, link: ClusterLink, *, gpus: Expectations
) -> str:
    known_gpu = gpus.gpu(gpu)
    memory = known_gpu.reported_gib(gpu) if known_gpu else None
    card = GpuModel(name=gpu, memory_gib=memory or 0.0)
    hosts = tuple(PlanHost(name=f"n{at}", gpus=count, gpu=card) for at in range(nodes))
    planned = choose_layout(
        PlanQuestion(
            model=each.model,
            weight_bytes=int((each.case.weights_gib or 0) * GIB),
            cluster=Cluster(hosts=hosts, link=link),
            demand=Demand(context=8192, requests=16),
        )
    )
    option = planned.layout
    mark = {"fits": "", "tight": " ~", "does-not-fit": " !"}[planned.verdict]
    experts = "E" if option.experts else ""
    several = f"{option.servers}·" if option.servers > 1 else ""
    return f"{several}{option.dp}×{option.tp}×{option.pp}{experts}{mark}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", type=Path, nargs="*", default=sorted(FIXTURES.glob("*.yaml")))
    parser.add_argument("--cases", action="store_true", help="show each case")
    parser.add_argument("--table", action="store_true", help="show choices, DP × TP × PP")
    asked = parser.parse_args()
    cases = [each for path in asked.files for each in known(path)]
    if asked.table:
        for line in choices(cases):
            print(line)
        return
    held_out = [(each, each.case.estimated()) for each in cases if each.held_out]
    results = judged([each for each in cases if not each.held_out])
    for name, part in (("used for the fit", results), ("held out", held_out)):
        print(f"Cases {name}: {len(part)}")
        for line in (*(rows(part) if asked.cases else ()), *table(part)):
            print(f"  {line}")


if __name__ == "__main__":
    main()
