"""What the order of a batch's rows brings: the same jobs with `order: prefix` and `order: given`.

    python -m benchmarks.batch_order [INVENTORY] [--rows 2000] [--rounds 3] [--replicas 1]
    [--only shared|crowded|mixed|vectors …]

The default inventory is the practice cluster's, which must be up with nothing running on it. The
jobs: `shared` has 20 prompts of 300 tokens, each followed by a question of the row's own, in any
order; `crowded` is the same with a KV cache that does not hold 20 of them; `mixed` has prompts of 5
to 400 tokens; `vectors` is `mixed` for the practice hosts' embedding model. Seconds are those from
the engines' first row to the last answer; how many tokens of prompts came from the cache is vLLM's
own count, of each row. The jobs, called `bench-…`, are removed in the end.
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
from benchmarks.batch import LAB, ON_CPU, Bench
from launcher.inventory.load import load
from launcher.lab import models
from launcher.lab.layout import HF_HOME

ORDERS = ("given", "prefix")
JOBS = ("shared", "crowded", "mixed", "vectors")
# Words that are a token each for the practice hosts' tokenizer, with the space before them.
WORDS = ("self", "return", "import", "class", "not", "if", "for", "in", "is", "the", "None", "def")
SHARED, PREFIX = 20, 300  # shared prompts, and their tokens
SHORTEST, LONGEST = 5, 400  # tokens of mixed prompts
SAMPLING = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
BLOCK = 32  # tokens of a block of the cache: vLLM's own choice for CPUs, 128, is too coarse here
CROWDED = 12 * 2**20  # bytes: 6,144 tokens of the practice hosts' model


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One job: its rows, and what of the job file is its own."""

    rows: Callable[[int], Iterator[str]]
    sections: dict[str, Any]
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Seconds from the first row to the last answer and in all, tokens of prompts, and how many of
    them vLLM had in its cache.
    """

    answering: float
    whole: float
    tokens: int
    cached: int


def words(mix: random.Random, count: int) -> str:
    """Return so many words."""
    return " ".join(mix.choice(WORDS) for _ in range(count))


def shared(rows: int) -> Iterator[str]:
    """Yield prompts that begin with one of few, in any order."""
    mix = random.Random(17)
    begins = [words(mix, PREFIX) for _ in range(SHARED)]
    for _ in range(rows):
        yield f"{mix.choice(begins)} {words(mix, mix.randint(10, 40))}"


def mixed(rows: int) -> Iterator[str]:
    """Yield prompts of very different lengths, in any order: as many of 5 to 20 tokens as of 100 to
    400.
    """
    mix = random.Random(17)
    for _ in range(rows):
        yield words(mix, round(SHORTEST * (LONGEST / SHORTEST) ** mix.random()))


def kinds(model: str, args: dict[str, Any]) -> dict[str, Kind]:
    """Return the jobs by their names."""
    asked: dict[str, Any] = {"model": model, "sampling": SAMPLING}
    embed = {"task": "embed", "model": f"{HF_HOME}/{models.EMBED}"}
    crowded = {"kv_cache_memory_bytes": CROWDED}
    return {
        "shared": Kind(rows=shared, sections=asked, args=args),
        "crowded": Kind(rows=shared, sections=asked, args=args | crowded),
        "mixed": Kind(rows=mixed, sections=asked, args=args),
        "vectors": Kind(rows=mixed, sections=embed, args=args),
    }


def measured(bench: Bench, name: str, kind: Kind, order: str, rows: int, replicas: int) -> Run:
    """Run a job in one of the orders."""
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
    summary = bench.summary(job)
    assert (summary["done"], summary["errors"]) == (rows, 0), summary
    last = summary["runs"][-1]
    ended = last["started"] + summary["last_row_after"]
    return Run(
        answering=ended - bench.on_head(programs.MOMENTS, job)["given"],
        whole=whole,
        tokens=last["tokens_in"],
        cached=last["tokens_cached"],
    )


def table(name: str, runs: dict[str, list[Run]], rows: int) -> Iterator[str]:
    """Yield the lines of one job."""
    for order, each in runs.items():
        seconds = [run.answering for run in each]
        gain = statistics.median(
            theirs.answering / mine.answering
            for mine, theirs in zip(each, runs["given"], strict=True)
        )
        share = statistics.median(run.cached / run.tokens for run in each)
        cells = [
            name,
            f"`{order}`",
            f"{each[0].tokens / rows:.0f}",
            f"{share:.1%}",
            f"{statistics.median(seconds):.1f}",
            f"{min(seconds):.1f}–{max(seconds):.1f}",
            f"{gain:.2f}×",
            f"{statistics.median(run.whole for run in each):.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and remove what was made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--only", action="append", choices=JOBS, help="a job; again for another")
    args = parser.parse_args()
    inventory = load(args.inventory)
    model = inventory.serve.model
    if model is None:
        sys.exit("the inventory names no model")
    found = kinds(model, {**ON_CPU, "block_size": BLOCK})
    chosen = {name: found[name] for name in args.only or found}
    runs: dict[str, dict[str, list[Run]]] = {
        name: {order: [] for order in ORDERS} for name in chosen
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(inventory=inventory, folder=Path(folder), model=model, args={})
        try:
            for number in range(args.rounds):
                for name, kind in chosen.items():
                    for order in ORDERS if number % 2 == 0 else reversed(ORDERS):
                        run = measured(bench, name, kind, order, args.rows, args.replicas)
                        runs[name][order].append(run)
                        print(f"round {number + 1}: {name}, {order}: {run}", file=sys.stderr)
        finally:
            made = [path.stem for path in bench.folder.glob("bench-*.yaml")]
            remove = bench.command(
                "jobs", "--yes", *(word for name in made for word in ("--remove", name))
            )
            subprocess.run(remove, capture_output=True, timeout=300, check=False)
    many = "one replica" if args.replicas == 1 else f"{args.replicas} replicas"
    print(f"\n{args.rows:,} rows, {many}, {args.rounds} rounds:\n")
    print(
        "| job | order | tokens of a prompt | from the cache | s while answering | lowest–highest |"
        " gain | whole, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, found_runs in runs.items():
        for line in table(name, found_runs, args.rows):
            print(line)


if __name__ == "__main__":
    main()
