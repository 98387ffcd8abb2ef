"""`vlaunch batch` against the engine called directly, two replicas against one, a resume without
work, and the driver's memory.

    python benchmarks/batch.py [INVENTORY] [--rows 2000] [--rounds 3] [--large 1000000] [--only
    speed|memory] [--before VLAUNCH]

The default inventory is the practice cluster's, which must be up with nothing running on it.
`speed` answers the same rows by the same greedy engine in ways that take turns: in one process on
the head (`LLM.generate`, and `AsyncLLM`, which servers and Ray Data LLM use), with one replica,
with two, and with one replica of another `vlaunch` (`--before`: the program of an older checkout).
`memory` sends many rows through a class that does nothing. The jobs, called `bench-…`, are removed
in the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.inventory.load import load
from launcher.model import Inventory

VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
LAB = Path("/var/lib/vlaunch-lab/inventory.yaml")
GOALS = {"answering": 0.95, "whole": 0.85, "memory": 1.5}
MANY = 20_000  # rows from which the goal for a whole job holds
TOKENS = 16
TEXT = "What comes after %d?"
# vLLM on the CPUs of a small machine.
ON_CPU = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 67108864,
    "max_num_seqs": 64,
}
# The engine called directly, on the rows that `rows` makes: seconds to load it, and seconds for all
# rows.
DIRECT = """\
import json, sys, time
began = time.monotonic()
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
llm = LLM(asked["model"], **asked["args"])
prompts = [asked["prompt"].replace("{{ text }}", asked["text"] % n) for n in range(asked["rows"])]
loaded = time.monotonic()
out = llm.generate(prompts, SamplingParams(**asked["sampling"]), use_tqdm=False)
ended = time.monotonic()
tokens = sum(len(each.outputs[0].token_ids) for each in out)
found = {"load": loaded - began, "answer": ended - loaded, "rows": len(out), "tokens": tokens}
print("\\nFOUND" + json.dumps(found))
"""
# The same by the engine class that servers and Ray Data LLM use, as many rows at a time as Ray Data
# LLM lets in.
ASYNC = """\
import asyncio, json, math, sys, time
began = time.monotonic()
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
asked = json.loads(sys.argv[1])

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=asked["model"], **asked["args"]))
    texts = [asked["text"] % number for number in range(asked["rows"])]
    prompts = [asked["prompt"].replace("{{ text }}", text) for text in texts]
    room = asyncio.Semaphore(math.ceil(1.1 * (asked["args"].get("max_num_seqs") or 1024)))

    async def one(number, prompt):
        sampling = SamplingParams(**asked["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
        async with room:
            async for out in llm.generate(prompt, sampling, str(number)):
                pass
        return out

    loaded = time.monotonic()
    out = await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
    ended = time.monotonic()
    tokens = sum(len(each.outputs[0].token_ids) for each in out)
    found = {"load": loaded - began, "answer": ended - loaded, "rows": len(out), "tokens": tokens}
    print("\\nFOUND" + json.dumps(found))
    llm.shutdown()

asyncio.run(main())
"""
# The most memory that the driver ever had, once a second until it is gone.
WATCH = """\
deadline=$(($(date +%s) + 120)) pid=
until [ "$pid" ]; do
  [ "$(date +%s)" -lt $deadline ] || exit 1
  sleep 0.2
  for each in $(grep -lza '/NAME$' /proc/[0-9]*/cmdline 2>/dev/null); do
    each=${each%/cmdline}
    grep -qza '^vlaunch_batch$' "$each/cmdline" && pid=${each#/proc/}
  done
done
while now=$(awk '/VmHWM/ {print $2}' /proc/$pid/status 2>/dev/null) && [ -n "$now" ]; do
    most=$now
    sleep 1
done
echo "$most"
"""
# When the engines of a job were given their first rows, by Ray's own records, in seconds.
GIVEN = """\
import sys
from ray.util.state import list_jobs, list_tasks
jobs = [each for each in list_jobs(detail=True) if sys.argv[1] in (each.submission_id or "")]
job = max(jobs, key=lambda each: each.start_time).job_id
tasks = list_tasks(filters=[("job_id", "=", job)], detail=True, limit=9999)
first = [each for each in tasks if "Replica" in each.name and "submit" in each.name]
print("FOUND", min(each.start_time_ms for each in first) / 1000)
"""
IDLE = """\
class Idle:
    def __call__(self, batch):
        return {"length": [len(text) for text in batch["text"]]}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A cluster, a folder for job files, and what is measured with."""

    inventory: Inventory
    folder: Path
    model: str
    args: dict[str, Any]
    rows: int
    before: str = VLAUNCH  # the program of another checkout, to compare with

    def job(self, name: str, rows: int, **sections: Any) -> Path:
        """Write a job and its input."""
        source = self.folder / f"rows-{rows}.jsonl"
        if not source.exists():
            with source.open("w") as out:
                out.writelines(json.dumps({"id": n, "text": TEXT % n}) + "\n" for n in range(rows))
        write = {"path": f"{name}-out"}
        path = self.folder / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump(
                {"job": name, "read": source.name, "write": write, "keep": ["id"], **sections}
            )
        )
        return path

    def vlaunch(self, *words: str, timeout: float = 3600, program: str = VLAUNCH) -> str:
        """Run `vlaunch` on the cluster, and end the program when it fails."""
        command = [program, words[0], "-i", str(self.inventory.path), *words[1:]]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            said = f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
            sys.exit(f"vlaunch {' '.join(words)[:200]} ended with {done.returncode}:\n{said}")
        return done.stdout

    def summary(self, name: str) -> dict[str, Any]:
        """Return what a job has written about itself."""
        said: dict[str, Any] = json.loads(
            (self.folder / f"{name}-out" / "summary.json").read_text()
        )
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of answering all rows: seconds from the engine's first row to the last answer,
    seconds in all, tokens.
    """

    answering: float
    whole: float
    tokens: int


def prompt(bench: Bench) -> dict[str, Any]:
    """Return what both ways of asking share."""
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": bench.model, "prompt": "Answer: {{ text }}", "sampling": sampling}


def direct(bench: Bench, program: str = DIRECT) -> Run:
    """Answer the rows in one process on the head."""
    asked = {
        **prompt(bench),
        "args": {**bench.args, "disable_log_stats": True},
        "rows": bench.rows,
        "text": TEXT,
    }
    began = time.monotonic()
    out = bench.vlaunch(
        "exec", "--head", "--timeout", "3600", "--", "python3", "-c", program, json.dumps(asked)
    )
    whole = time.monotonic() - began
    said = json.loads(out.rpartition("FOUND")[2].splitlines()[0])
    assert said["rows"] == bench.rows
    return Run(answering=said["answer"], whole=whole, tokens=said["tokens"])


def batch(bench: Bench, replicas: int, program: str = VLAUNCH) -> Run:
    """Answer the rows with `vlaunch batch`."""
    name = f"bench-{replicas}" if program == VLAUNCH else f"bench-{replicas}-before"
    path = bench.job(
        name, bench.rows, engine={"args": bench.args, "replicas": replicas}, **prompt(bench)
    )
    began = time.monotonic()
    bench.vlaunch("batch", str(path), "--restart", program=program)
    whole = time.monotonic() - began
    summary = bench.summary(name)
    assert (summary["done"], summary["errors"]) == (bench.rows, 0)
    out = bench.vlaunch("exec", "--head", "--", "python3", "-c", GIVEN, name)
    given = float(out.rpartition("FOUND")[2].split()[0])
    ended = summary["runs"][-1]["started"] + summary["last_row_after"]
    return Run(answering=ended - given, whole=whole, tokens=summary["tokens_out"])


def speed(bench: Bench, rounds: int) -> None:
    """Compare the ways, then time a run that has nothing to do, and print the tables."""
    ways: dict[str, Callable[[Bench], Run]] = {
        "direct": direct,
        "direct, `AsyncLLM`": lambda bench: direct(bench, ASYNC),
        "one replica": lambda bench: batch(bench, 1),
        "one replica, before": lambda bench: batch(bench, 1, bench.before),
        "two replicas": lambda bench: batch(bench, 2),
    }
    if bench.before == VLAUNCH:
        del ways["one replica, before"]
    if bench.inventory.gpus < 2:
        del ways["two replicas"]
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    again = []
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(ways):
            runs[name].append(ways[name](bench))
            last = runs[name][-1]
            print(
                f"round {number + 1}: {name} {last.answering:.1f} s of {last.whole:.1f} s",
                file=sys.stderr,
            )
        began = time.monotonic()
        bench.vlaunch("batch", str(bench.folder / "bench-1.yaml"))
        again.append(time.monotonic() - began)
    if len({run.tokens for each in runs.values() for run in each}) > 1:
        sys.exit(f"the ways did not do the same work: {runs}")
    print(f"\n{bench.rows:,} rows of {TOKENS} tokens each, {rounds} rounds:\n")
    print(
        "| | rows/s while answering | lowest–highest | against direct | goal | whole, s | against"
        " direct | goal |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, each in runs.items():
        print(f"| {name} | " + " | ".join(figures(bench, name, each, runs["direct"])) + " |")
    print(
        f"\nA run with nothing to do: {statistics.median(again):.1f} s"
        f" ({min(again):.1f}–{max(again):.1f})."
    )


def figures(bench: Bench, name: str, ours: list[Run], direct: list[Run]) -> list[str]:
    """Return the cells of one way, beside the engine called directly in the same rounds."""
    rates = [bench.rows / run.answering for run in ours]
    pairs = list(zip(ours, direct, strict=True))
    answering = statistics.median(theirs.answering / mine.answering for mine, theirs in pairs)
    whole = statistics.median(theirs.whole / mine.whole for mine, theirs in pairs)
    goals = ["", ""]
    if name == "one replica":
        goals[0] = f"≥ {GOALS['answering']} {_met(answering >= GOALS['answering'])}"
        if bench.rows >= MANY:
            goals[1] = f"≥ {GOALS['whole']} {_met(whole >= GOALS['whole'])}"
    return [
        f"{statistics.median(rates):.0f}",
        f"{min(rates):.0f}–{max(rates):.0f}",
        f"{answering:.2f}×",
        goals[0],
        f"{statistics.median(run.whole for run in ours):.1f}",
        f"{whole:.2f}×",
        goals[1],
    ]


def memory(bench: Bench, large: int) -> None:
    """Send few and many rows through a class that does nothing, and print the most memory that the
    driver had.
    """
    (bench.folder / "idle.py").write_text(IDLE)
    found = {}
    for rows in (10_000, large):
        name = f"bench-rows-{rows}"
        path = bench.job(name, rows, predict={"class": "idle.py:Idle", "batch_size": 1000})
        watch = [
            VLAUNCH,
            "exec",
            "-i",
            str(bench.inventory.path),
            "--head",
            "--timeout",
            "3600",
            "--",
            "sh",
            "-c",
            WATCH.replace("NAME", name),
        ]
        with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
            began = time.monotonic()
            bench.vlaunch("batch", str(path), "--restart")
            seconds = time.monotonic() - began
            said = watching.communicate(timeout=60)[0]
        if watching.returncode != 0:
            sys.exit(f"the driver of {name} was not seen")
        assert bench.summary(name)["done"] == rows
        found[rows] = (
            int(said.split()[-1]) / 1024,
            bench.summary(name)["rows_per_second"],
            seconds,
        )
        print(f"{rows:,} rows: {found[rows][0]:.0f} MB, {seconds:.1f} s", file=sys.stderr)
    ratio = found[large][0] / found[10_000][0]
    print("\n| rows | most memory of the driver | rows/s | whole, s |\n|---|---|---|---|")
    for rows, (size, rate, seconds) in found.items():
        print(f"| {rows:,} | {size:.0f} MB | {rate:,.0f} | {seconds:.1f} |")
    goal = f"goal ≤ {GOALS['memory']}× {_met(ratio <= GOALS['memory'])}"
    print(f"\n{large:,} rows take {ratio:.2f}× the memory of 10,000 ({goal}).")


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def main() -> None:
    """Measure, and remove what was made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--large", type=int, default=1_000_000, help="rows of the second measurement of memory"
    )
    parser.add_argument("--before", default=VLAUNCH, help="`vlaunch` of an older checkout")
    parser.add_argument("--model", help="by default the inventory's")
    parser.add_argument("--engine-args", type=json.loads, help="vLLM's engine arguments, as JSON")
    parser.add_argument("--only", choices=("speed", "memory"))
    args = parser.parse_args()
    inventory = load(args.inventory)
    model = args.model or inventory.serve.model
    if model is None:
        sys.exit("no model is named: add --model")
    # On GPUs vLLM chooses well; on CPUs it would take most of the memory.
    given = (
        args.engine_args
        if args.engine_args is not None
        else ON_CPU
        if inventory.accelerator == "cpu"
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            inventory=inventory,
            folder=Path(folder),
            model=model,
            args=given,
            rows=args.rows,
            before=args.before,
        )
        try:
            if args.only != "memory":
                speed(bench, args.rounds)
            if args.only != "speed":
                memory(bench, args.large)
        finally:
            made = [path.stem for path in Path(folder).glob("bench-*.yaml")]
            subprocess.run(
                [
                    VLAUNCH,
                    "jobs",
                    "-i",
                    str(inventory.path),
                    *(word for name in made for word in ("--remove", name)),
                ],
                capture_output=True,
                timeout=300,
                check=False,
            )


if __name__ == "__main__":
    main()
