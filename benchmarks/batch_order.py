"""Effect of the order of a batch's rows: the same jobs with `order: prefix` and `order: given`.

    python -m benchmarks.batch_order [INVENTORY] [--rows 2000] [--rounds 3] [--replicas 1]
    [--only shared|crowded|mixed|vectors …]

The default inventory is the lab cluster's, which must be up and idle. The jobs: `shared` has 20
prompts of 300 tokens, each followed by a question of the row's own, in random order; `crowded` is
the same with a KV cache that does not hold 20 of them; `mixed` has prompts of 5 to 400 tokens;
`vectors` is `mixed` for the lab's embedding model. Seconds run from the engines' first row to the
last answer; vLLM itself counts the prompt tokens of each row that came from the cache. The jobs,
named `bench-…`, are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import batch_programs as programs
from benchmarks.batch import LAB, ON_CPU, VLAUNCH, Bench
from launcher.inventory.load import load
from launcher.lab import models
from launcher.lab.layout import HF_HOME

ORDERS = ("given", "prefix")
JOBS = ("shared", "crowded", "mixed", "vectors")
# Each is one token of the lab's tokenizer, with the space before it.
VOCABULARY = (
    "self",
    "return",
    "import",
    "class",
    "not",
    "if",
    "for",
    "in",
    "is",
    "the",
    "None",
    "def",
)
SHARED, PREFIX = 20, 300  # shared prompts, and their tokens
SHORTEST, LONGEST = 5, 400  # tokens of mixed prompts
SAMPLING = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
BLOCK = 32  # tokens of a cache block: vLLM's default for CPUs, 128, is too coarse
CROWDED = 12 * 2**20  # bytes: 6,144 tokens of the lab's model


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One job: its rows, the sections of its job file, and its engine arguments."""

    rows: Callable[[int], Iterator[str]]
    sections: dict[str, Any]
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: seconds from the first row to the last answer and in all, prompt tokens, and those
    that vLLM had in its cache.
    """

    answering: float
    whole: float
    tokens: int
    cached: int


def random_text(rng: random.Random, count: int) -> str:
    """Return a text of `count` tokens."""
    return " ".join(rng.choice(VOCABULARY) for _ in range(count))


def shared_prompts(rows: int) -> Iterator[str]:
    """Yield prompts that share a few long beginnings, in random order."""
    rng = random.Random(17)
    beginnings = [random_text(rng, PREFIX) for _ in range(SHARED)]
    for _ in range(rows):
        yield f"{rng.choice(beginnings)} {random_text(rng, rng.randint(10, 40))}"


def mixed_prompts(rows: int) -> Iterator[str]:
    """Yield prompts of very different lengths, in random order: as many of 5 to 20 tokens as of 100
    to 400.
    """
    rng = random.Random(17)
    for _ in range(rows):
        yield random_text(rng, round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()))


def build_jobs(model: str, args: dict[str, Any]) -> dict[str, Kind]:
    """Return the jobs by name."""
    generate: dict[str, Any] = {"model": model, "sampling": SAMPLING}
    embed = {"task": "embed", "model": f"{HF_HOME}/{models.EMBED}"}
    crowded = {"kv_cache_memory_bytes": CROWDED}
    return {
        "shared": Kind(rows=shared_prompts, sections=generate, args=args),
        "crowded": Kind(rows=shared_prompts, sections=generate, args=args | crowded),
        "mixed": Kind(rows=mixed_prompts, sections=generate, args=args),
        "vectors": Kind(rows=mixed_prompts, sections=embed, args=args),
    }


def run_job(bench: Bench, name: str, kind: Kind, order: str, rows: int, replicas: int) -> Run:
    """Run a job with one of the orders."""
    job = f"bench-{name}-{order}"
    source = bench.folder / f"{name}.jsonl"
    if not source.exists():
        with source.open("w") as out:
            out.writelines(json.dumps({"prompt": text}) + "\n" for text in kind.rows(rows))
    path = bench.folder / f"{job}.yaml"
    document = {
        **kind.sections,
        "job": job,
        "read": source.name,
        "write": f"{job}-out",
        "keep": [],
        "engine": {"args": kind.args, "replicas": replicas, "order": order},
    }
    path.write_text(yaml.safe_dump(document))
    began = time.monotonic()
    bench.vlaunch("batch", str(path), "--discard-results", "--yes")
    whole = time.monotonic() - began
    summary = bench.read_summary(job)
    assert (summary["done"], summary["errors"]) == (rows, 0), summary
    last = summary["runs"][-1]
    ended = last["started"] + summary["last_row_after"]
    return Run(
        answering=ended - bench.run_on_head(programs.MOMENTS, job)["given"],
        whole=whole,
        tokens=last["tokens_in"],
        cached=last["tokens_cached"],
    )


def table_rows(name: str, runs: dict[str, list[Run]], rows: int) -> Iterator[str]:
    """Yield the table rows of one job."""
    for order, group in runs.items():
        seconds = [run.answering for run in group]
        gain = statistics.median(
            other.answering / own.answering for own, other in zip(group, runs["given"], strict=True)
        )
        share = statistics.median(run.cached / run.tokens for run in group)
        cells = [
            name,
            f"`{order}`",
            f"{group[0].tokens / rows:.0f}",
            f"{share:.1%}",
            f"{statistics.median(seconds):.1f}",
            f"{min(seconds):.1f}–{max(seconds):.1f}",
            f"{gain:.2f}×",
            f"{statistics.median(run.whole for run in group):.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print a table, and remove the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--only", action="append", choices=JOBS, help="run only this job (repeatable)"
    )
    args = parser.parse_args()
    inventory = load(args.inventory)
    model = inventory.serve.model
    if model is None:
        sys.exit("the inventory names no model")
    jobs = build_jobs(model, {**ON_CPU, "block_size": BLOCK})
    chosen = {name: jobs[name] for name in args.only or jobs}
    runs: dict[str, dict[str, list[Run]]] = {
        name: {order: [] for order in ORDERS} for name in chosen
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(inventory=inventory, folder=Path(folder), model=model, args={})
        try:
            for number in range(args.rounds):
                for name, kind in chosen.items():
                    for order in ORDERS if number % 2 == 0 else reversed(ORDERS):
                        run = run_job(bench, name, kind, order, args.rows, args.replicas)
                        runs[name][order].append(run)
                        print(f"round {number + 1}: {name}, {order}: {run}", file=sys.stderr)
        finally:
            names = [path.stem for path in bench.folder.glob("bench-*.yaml")]
            inventory = ("-i", str(bench.inventory.path))
            remove = [VLAUNCH, "jobs", "remove", "--yes", *inventory, *names]
            subprocess.run(remove, capture_output=True, timeout=300, check=False)
    many = "one replica" if args.replicas == 1 else f"{args.replicas} replicas"
    print(f"\n{args.rows:,} rows, {many}, {args.rounds} rounds:\n")
    print(
        "| job | order | tokens of a prompt | from the cache | s while answering | lowest–highest |"
        " gain | whole, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, runs_by_order in runs.items():
        for line in table_rows(name, runs_by_order, args.rows):
            print(line)


if __name__ == "__main__":
    main()
