"""Throughput and start-up time of `vlaunch batch`, compared with the engine called directly.

    python benchmarks/batch.py [INVENTORY] [--only engine|replicas|nothing|idle …] [--rows 2000 …]
    [--idle 20000 …] [--rounds 3] [--minutes M] [--stolen SHARE] [--processor] [--before VLAUNCH]

The default inventory is the lab cluster's, which must be up and idle. The candidates take turns, in
changing order. `engine`: the same greedy engine answers the same rows in one process on the head
(`LLM.generate`; with `--processor` also through Ray Data's processor), as one replica, and as one
replica of another `vlaunch` (`--before`: the program of an older checkout). `replicas`: two
replicas against one, on the first number of `--rows`. `nothing`: the same job once more. `idle`:
rows through a class that does nothing. The jobs, named `bench-…`, are removed at the end. Exits
with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import batch_programs as programs
from benchmarks.batch_report import (
    BEFORE,
    DIRECT,
    MANY,
    MOMENTS,
    ONE_REPLICA,
    PROCESSOR,
    TOKENS,
    TWO_NODES,
    Idle,
    Key,
    Report,
    Results,
    Run,
)
from launcher.core.domain import Inventory
from launcher.inventory.load import load

VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
LAB = Path("/var/lib/vlaunch-lab/inventory.yaml")
PARTS = ("engine", "replicas", "nothing", "idle")
TEXT = "What comes after %d?"
TRIES = 3  # runs of one candidate until the hypervisor leaves it enough CPU time
# vLLM on the CPUs of a small machine.
ON_CPU = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 67108864,
    "max_num_seqs": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A cluster, a folder for job files, and the model; `before` is the program of another
    checkout.
    """

    inventory: Inventory
    folder: Path
    model: str
    args: dict[str, Any]
    before: str = VLAUNCH

    def write_job(self, name: str, rows: int, **sections: Any) -> Path:
        """Write a job and its input; return the job's file."""
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

    def command(self, *arguments: str, program: str = VLAUNCH) -> list[str]:
        """Return the argv of `vlaunch` for this cluster."""
        return [program, arguments[0], "-i", str(self.inventory.path), *arguments[1:]]

    def vlaunch(self, *arguments: str, program: str = VLAUNCH) -> str:
        """Run `vlaunch` on the cluster; exit when it fails."""
        completed = subprocess.run(
            self.command(*arguments, program=program),
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # byte code warm, as for users
        )
        if completed.returncode != 0:
            output = f"{completed.stdout[-2000:]}{completed.stderr[-3000:]}"
            sys.exit(
                f"vlaunch {' '.join(arguments)[:200]} ended with {completed.returncode}:\n{output}"
            )
        return completed.stdout

    def run_on_head(self, program: str, *arguments: str) -> dict[str, Any]:
        """Run a program on the head and return the JSON object that it prints."""
        command = ("--head", "--timeout", "3600", "--", "python3", "-c", program, *arguments)
        output = self.vlaunch("exec", *command)
        payload: dict[str, Any] = json.loads(output.rpartition("FOUND")[2].splitlines()[0])
        return payload

    def read_summary(self, name: str) -> dict[str, Any]:
        """Read a job's summary."""
        path = self.folder / f"{name}-out" / "summary.json"
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary


def shared_settings(bench: Bench) -> dict[str, Any]:
    """Return the settings that both candidates share."""
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": bench.model, "prompt": "Answer: {{ text }}", "sampling": sampling}


def run_direct(bench: Bench, rows: int, program: str = programs.DIRECT) -> Run:
    """Answer rows in one process on the head, without `vlaunch`."""
    args = {**bench.args, "disable_log_stats": True}
    request = {**shared_settings(bench), "args": args, "rows": rows, "text": TEXT}
    began = time.monotonic()
    payload = bench.run_on_head(program, json.dumps(request))
    whole = time.monotonic() - began
    assert payload["rows"] == rows
    return Run(answering=payload["answer"], whole=whole, tokens=payload["tokens"])


def job_name(replicas: int, rows: int, program: str = VLAUNCH) -> str:
    """Return the name of a job."""
    return f"bench-{replicas}-{rows}" + ("" if program == VLAUNCH else "-before")


def run_batch(bench: Bench, rows: int, replicas: int = 1, program: str = VLAUNCH) -> Run:
    """Answer rows with `vlaunch batch`."""
    name = job_name(replicas, rows, program)
    engine = {"args": bench.args, "replicas": replicas}
    path = bench.write_job(name, rows, engine=engine, **shared_settings(bench))
    began = time.time()
    bench.vlaunch("batch", str(path), "--discard-results", "--yes", program=program)
    ended = time.time()
    summary = bench.read_summary(name)
    assert (summary["done"], summary["errors"]) == (rows, 0)
    moments = bench.run_on_head(programs.MOMENTS, name)
    started = summary["runs"][-1]["started"]
    moments |= {
        "driver": started,
        "first": started + summary["first_row_after"],
        "last": started + summary["last_row_after"],
        "done": started + summary["seconds"],
        "end": ended,
    }
    return Run(
        answering=moments["last"] - moments["given"],
        whole=ended - began,
        tokens=summary["tokens_out"],
        moments={moment: moments[moment] - began for moment in MOMENTS},
    )


def run_finished_job(bench: Bench, rows: int) -> float:
    """Run a finished job again, and return the seconds."""
    began = time.monotonic()
    bench.vlaunch("batch", str(bench.folder / f"{job_name(1, rows)}.yaml"))
    return time.monotonic() - began


def run_idle(bench: Bench, rows: int) -> Idle:
    """Send rows through a class that does nothing."""
    (bench.folder / "idle.py").write_text(programs.IDLE)
    name = f"bench-idle-{rows}"
    path = bench.write_job(name, rows, predict={"class": "idle.py:Idle", "batch_size": 1000})
    watch = ("--head", "--timeout", "3600", "--", "sh", "-c", programs.WATCH.replace("NAME", name))
    with subprocess.Popen(
        bench.command("exec", *watch), stdout=subprocess.PIPE, text=True
    ) as watcher:
        began = time.monotonic()
        bench.vlaunch("batch", str(path), "--discard-results", "--yes")
        seconds = time.monotonic() - began
        output = watcher.communicate(timeout=60)[0]
    if watcher.returncode != 0:
        sys.exit(f"the driver of {name} was not seen")
    summary = bench.read_summary(name)
    assert summary["done"] == rows
    return Idle(
        memory=int(output.split()[-1]) / 1024, rate=summary["rows_per_second"], whole=seconds
    )


def read_cpu_times() -> tuple[int, int]:
    """Return the total CPU time of this machine, and the part that its hypervisor took (`user` to
    `steal` of /proc/stat, proc(5)).
    """
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    spent = [int(field) for field in first.split()[1:9]]
    return sum(spent), spent[-1]


def run_undisturbed(candidate: Callable[[], Run], limit: float, log: Callable[[str], None]) -> Run:
    """Return a run in which the hypervisor took at most the share `limit` of the CPU time, else the
    best of three.
    """
    runs: list[Run] = []
    while len(runs) < TRIES:
        before = read_cpu_times()
        run = candidate()
        spent, stolen = (now - then for now, then in zip(read_cpu_times(), before, strict=True))
        runs.append(replace(run, stolen=stolen / max(spent, 1)))
        if runs[-1].stolen <= limit:
            break
        log(f"{run.answering:.1f} s with {runs[-1].stolen:.0%} of the processors stolen")
    return min(runs, key=lambda timed: timed.stolen)


def build_candidates(
    bench: Bench, parts: Sequence[str], rows: Sequence[int], *, with_processor: bool
) -> dict[Key, Callable[[], Run]]:
    """Return the candidates of the chosen parts."""
    candidates: dict[Key, Callable[[], Run]] = {}
    for count in rows if "engine" in parts else ():
        candidates[DIRECT, count] = lambda count=count: run_direct(bench, count)
        if with_processor:
            candidates[PROCESSOR, count] = partial(run_direct, bench, count, programs.PROCESSOR)
        if bench.before != VLAUNCH:
            candidates[BEFORE, count] = lambda count=count: run_batch(bench, count, 1, bench.before)
        candidates[ONE_REPLICA, count] = lambda count=count: run_batch(bench, count)
    if not {"replicas", "nothing"}.isdisjoint(parts):
        candidates[ONE_REPLICA, rows[0]] = lambda: run_batch(bench, rows[0])
    if "replicas" in parts and bench.inventory.gpus > 1:
        candidates[TWO_NODES, rows[0]] = lambda: run_batch(bench, rows[0], 2)
    return candidates


def measure(
    bench: Bench, options: argparse.Namespace, parts: Sequence[str], log: Callable[[str], None]
) -> Results:
    """Run all candidates, round after round; start no round that would exceed the time limit."""
    results, began = Results(), time.monotonic()
    candidates = build_candidates(bench, parts, options.rows, with_processor=options.with_processor)
    for number in range(options.rounds):
        spent = (time.monotonic() - began) / 60
        if number and options.minutes and spent * (number + 1) / number > options.minutes:
            log(f"round {number + 1} would not be over in time and is left out")
            break
        for key in list(candidates) if number % 2 == 0 else reversed(candidates):
            results.runs.setdefault(key, []).append(
                run := run_undisturbed(candidates[key], options.stolen, log)
            )
            log(
                f"{key[0]}, {key[1]:,} rows: {run.answering:.1f} s of {run.whole:.1f} s,"
                f" {run.stolen:.0%} of the processors stolen"
            )
        if "nothing" in parts:
            results.nothing.append(run_finished_job(bench, options.rows[0]))
            log(f"nothing to do: {results.nothing[-1]:.2f} s")
        for rows in options.idle if "idle" in parts else ():
            results.idle.setdefault(rows, []).append(result := run_idle(bench, rows))
            log(f"idle, {rows:,} rows: {result.memory:.0f} MB, {result.rate:,.0f} rows/s")
    for rows in options.rows:
        if (
            len(
                {
                    run.tokens
                    for key, group in results.runs.items()
                    if key[1] == rows
                    for run in group
                }
            )
            > 1
        ):
            sys.exit(f"the ways did not do the same work: {results.runs}")
    return results


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="run only this part (repeatable)"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, MANY])
    parser.add_argument("--idle", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="skip rounds that would end later")
    parser.add_argument(
        "--stolen",
        type=float,
        default=1.0,
        help="repeat runs in which the hypervisor took a larger share of the CPU time, as 0.05",
    )
    parser.add_argument(
        "--processor", action="store_true", dest="with_processor", help="Ray Data's processor, too"
    )
    parser.add_argument("--before", default=VLAUNCH, help="`vlaunch` of an older checkout")
    parser.add_argument("--model", help="by default the inventory's")
    parser.add_argument("--engine-args", type=json.loads, help="vLLM's engine arguments, as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, print a report, and remove the jobs."""
    args = parse_options()
    inventory = load(args.inventory)
    model = args.model or inventory.serve.model
    if model is None:
        sys.exit("no model is named: add --model")
    # On CPUs vLLM's defaults would take most of the memory.
    defaults = ON_CPU if inventory.accelerator == "cpu" else {}
    engine_args = defaults if args.engine_args is None else args.engine_args

    def tell(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            inventory=inventory,
            folder=Path(folder),
            model=model,
            args=engine_args,
            before=args.before,
        )
        try:
            report = Report(measure(bench, args, args.only or PARTS, tell))
        finally:
            names = [path.stem for path in bench.folder.glob("bench-*.yaml")]
            inventory = ("-i", str(bench.inventory.path))
            remove = [VLAUNCH, "jobs", "remove", "--yes", *inventory, *names]
            subprocess.run(remove, capture_output=True, timeout=300, check=False)
    print("\n".join(report.lines()))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
