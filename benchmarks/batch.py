"""`vlaunch batch` against the engine called directly, two replicas against one, what comes before
the first row, a run that has nothing to do, and a predictor that does nothing.

    python benchmarks/batch.py [INVENTORY] [--only engine|replicas|nothing|idle …] [--rows 2000 …]
    [--idle 20000 …] [--rounds 3] [--minutes M] [--stolen SHARE] [--async] [--before VLAUNCH]

The default inventory is the practice cluster's, which must be up with nothing running on it. All
ways take turns, in changing order. `engine`: the same greedy engine answers the same rows in one
process on the head (`LLM.generate`; with `--async` also `AsyncLLM`, which servers and Ray Data LLM
use), as one replica, and as one replica of another `vlaunch` (`--before`: the program of an older
checkout). `replicas`: two replicas against one, on as many rows as `--rows` has first. `nothing`:
the same job once more. `idle`: so many rows through a class that does nothing. The jobs, called
`bench-…`, are removed in the end. Ends with 1 when a goal is missed.
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
from pathlib import Path
from typing import Any

import yaml

from benchmarks import batch_programs as programs
from benchmarks.batch_report import (
    ASYNC,
    BEFORE,
    DIRECT,
    MANY,
    MOMENTS,
    ONE,
    TOKENS,
    TWO_NODES,
    Found,
    Idle,
    Key,
    Report,
    Run,
)
from launcher.core.domain import Inventory
from launcher.inventory.load import load

VLAUNCH = str(Path(sys.executable).parent / "vlaunch")
LAB = Path("/var/lib/vlaunch-lab/inventory.yaml")
PARTS = ("engine", "replicas", "nothing", "idle")
TEXT = "What comes after %d?"
TRIES = 3  # runs of one way, at most, until one has the processors
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
    """A cluster, a folder for job files, and what is measured with; `before` is the program of
    another checkout.
    """

    inventory: Inventory
    folder: Path
    model: str
    args: dict[str, Any]
    before: str = VLAUNCH

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

    def command(self, *words: str, program: str = VLAUNCH) -> list[str]:
        """Return a command line of `vlaunch` for this cluster."""
        return [program, words[0], "-i", str(self.inventory.path), *words[1:]]

    def vlaunch(self, *words: str, program: str = VLAUNCH) -> str:
        """Run `vlaunch` on the cluster, and end the program when it fails."""
        done = subprocess.run(
            self.command(*words, program=program),
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # as anybody's second command
        )
        if done.returncode != 0:
            said = f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
            sys.exit(f"vlaunch {' '.join(words)[:200]} ended with {done.returncode}:\n{said}")
        return done.stdout

    def on_head(self, program: str, *words: str) -> dict[str, Any]:
        """Run a program on the head and return what it has found."""
        asked = ("--head", "--timeout", "3600", "--", "python3", "-c", program, *words)
        out = self.vlaunch("exec", *asked)
        said: dict[str, Any] = json.loads(out.rpartition("FOUND")[2].splitlines()[0])
        return said

    def summary(self, name: str) -> dict[str, Any]:
        """Return what a job has written about itself."""
        path = self.folder / f"{name}-out" / "summary.json"
        said: dict[str, Any] = json.loads(path.read_text())
        return said


def prompt(bench: Bench) -> dict[str, Any]:
    """Return what both ways of asking share."""
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": bench.model, "prompt": "Answer: {{ text }}", "sampling": sampling}


def direct(bench: Bench, rows: int, program: str = programs.DIRECT) -> Run:
    """Answer rows in one process on the head."""
    args = {**bench.args, "disable_log_stats": True}
    asked = {**prompt(bench), "args": args, "rows": rows, "text": TEXT}
    began = time.monotonic()
    said = bench.on_head(program, json.dumps(asked))
    whole = time.monotonic() - began
    assert said["rows"] == rows
    return Run(answering=said["answer"], whole=whole, tokens=said["tokens"])


def named(replicas: int, rows: int, program: str = VLAUNCH) -> str:
    """Return the name of a job."""
    return f"bench-{replicas}-{rows}" + ("" if program == VLAUNCH else "-before")


def batch(bench: Bench, rows: int, replicas: int = 1, program: str = VLAUNCH) -> Run:
    """Answer rows with `vlaunch batch`."""
    name = named(replicas, rows, program)
    engine = {"args": bench.args, "replicas": replicas}
    path = bench.job(name, rows, engine=engine, **prompt(bench))
    began = time.time()
    bench.vlaunch("batch", str(path), "--discard-results", "--yes", program=program)
    ended = time.time()
    summary = bench.summary(name)
    assert (summary["done"], summary["errors"]) == (rows, 0)
    found = bench.on_head(programs.MOMENTS, name)
    started = summary["runs"][-1]["started"]
    found |= {
        "driver": started,
        "first": started + summary["first_row_after"],
        "last": started + summary["last_row_after"],
        "done": started + summary["seconds"],
        "end": ended,
    }
    return Run(
        answering=found["last"] - found["given"],
        whole=ended - began,
        tokens=summary["tokens_out"],
        moments={each: found[each] - began for each in MOMENTS},
    )


def nothing(bench: Bench, rows: int) -> float:
    """Run a job again of which every row is accounted for, and return the seconds."""
    began = time.monotonic()
    bench.vlaunch("batch", str(bench.folder / f"{named(1, rows)}.yaml"))
    return time.monotonic() - began


def idle(bench: Bench, rows: int) -> Idle:
    """Send rows through a class that does nothing."""
    (bench.folder / "idle.py").write_text(programs.IDLE)
    name = f"bench-idle-{rows}"
    path = bench.job(name, rows, predict={"class": "idle.py:Idle", "batch_size": 1000})
    watch = ("--head", "--timeout", "3600", "--", "sh", "-c", programs.WATCH.replace("NAME", name))
    with subprocess.Popen(
        bench.command("exec", *watch), stdout=subprocess.PIPE, text=True
    ) as watching:
        began = time.monotonic()
        bench.vlaunch("batch", str(path), "--discard-results", "--yes")
        seconds = time.monotonic() - began
        said = watching.communicate(timeout=60)[0]
    if watching.returncode != 0:
        sys.exit(f"the driver of {name} was not seen")
    summary = bench.summary(name)
    assert summary["done"] == rows
    return Idle(memory=int(said.split()[-1]) / 1024, rate=summary["rows_per_second"], whole=seconds)


def processors() -> tuple[int, int]:
    """Return how much time the processors of this machine had, and what its host kept of it for
    others (`user` to `steal` of /proc/stat, proc(5)).
    """
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    spent = [int(each) for each in first.split()[1:9]]
    return sum(spent), spent[-1]


def calm(way: Callable[[], Run], bearable: float, tell: Callable[[str], None]) -> Run:
    """Return a run in which the host stole no larger a share of the processors than is bearable, or
    else the one of three with the smallest.
    """
    taken: list[Run] = []
    while len(taken) < TRIES:
        before = processors()
        run = way()
        spent, stolen = (now - then for now, then in zip(processors(), before, strict=True))
        taken.append(replace(run, stolen=stolen / max(spent, 1)))
        if taken[-1].stolen <= bearable:
            break
        tell(f"{run.answering:.1f} s with {taken[-1].stolen:.0%} of the processors stolen")
    return min(taken, key=lambda each: each.stolen)


def ways(
    bench: Bench, parts: Sequence[str], rows: Sequence[int], *, with_async: bool
) -> dict[Key, Callable[[], Run]]:
    """Return the ways that take turns, of the parts that are asked for."""
    made: dict[Key, Callable[[], Run]] = {}
    for count in rows if "engine" in parts else ():
        made[DIRECT, count] = lambda count=count: direct(bench, count)
        if with_async:
            made[ASYNC, count] = lambda count=count: direct(bench, count, programs.ASYNC)
        if bench.before != VLAUNCH:
            made[BEFORE, count] = lambda count=count: batch(bench, count, 1, bench.before)
        made[ONE, count] = lambda count=count: batch(bench, count)
    if not {"replicas", "nothing"}.isdisjoint(parts):
        made[ONE, rows[0]] = lambda: batch(bench, rows[0])
    if "replicas" in parts and bench.inventory.gpus > 1:
        made[TWO_NODES, rows[0]] = lambda: batch(bench, rows[0], 2)
    return made


def measure(
    bench: Bench, asked: argparse.Namespace, parts: Sequence[str], tell: Callable[[str], None]
) -> Found:
    """Run all that is asked for, round after round; no round is begun that would not be over in
    time.
    """
    found, began = Found(), time.monotonic()
    turns = ways(bench, parts, asked.rows, with_async=asked.with_async)
    for number in range(asked.rounds):
        spent = (time.monotonic() - began) / 60
        if number and asked.minutes and spent * (number + 1) / number > asked.minutes:
            tell(f"round {number + 1} would not be over in time and is left out")
            break
        for key in list(turns) if number % 2 == 0 else reversed(turns):
            found.runs.setdefault(key, []).append(run := calm(turns[key], asked.stolen, tell))
            tell(
                f"{key[0]}, {key[1]:,} rows: {run.answering:.1f} s of {run.whole:.1f} s,"
                f" {run.stolen:.0%} of the processors stolen"
            )
        if "nothing" in parts:
            found.nothing.append(nothing(bench, asked.rows[0]))
            tell(f"nothing to do: {found.nothing[-1]:.2f} s")
        for rows in asked.idle if "idle" in parts else ():
            found.idle.setdefault(rows, []).append(one := idle(bench, rows))
            tell(f"idle, {rows:,} rows: {one.memory:.0f} MB, {one.rate:,.0f} rows/s")
    for rows in asked.rows:
        if (
            len({run.tokens for key, each in found.runs.items() if key[1] == rows for run in each})
            > 1
        ):
            sys.exit(f"the ways did not do the same work: {found.runs}")
    return found


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; again for another")
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, MANY])
    parser.add_argument("--idle", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="leave out rounds that would end later")
    parser.add_argument(
        "--stolen",
        type=float,
        default=1.0,
        help="take runs anew in which a virtual machine's host kept more of the processors for"
        " others, as 0.05",
    )
    parser.add_argument("--async", action="store_true", dest="with_async", help="`AsyncLLM`, too")
    parser.add_argument("--before", default=VLAUNCH, help="`vlaunch` of an older checkout")
    parser.add_argument("--model", help="by default the inventory's")
    parser.add_argument("--engine-args", type=json.loads, help="vLLM's engine arguments, as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, and remove what was made."""
    asked = options()
    inventory = load(asked.inventory)
    model = asked.model or inventory.serve.model
    if model is None:
        sys.exit("no model is named: add --model")
    # On GPUs vLLM chooses well; on CPUs it would take most of the memory.
    chosen = ON_CPU if inventory.accelerator == "cpu" else {}
    given = chosen if asked.engine_args is None else asked.engine_args

    def tell(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            inventory=inventory, folder=Path(folder), model=model, args=given, before=asked.before
        )
        try:
            report = Report(measure(bench, asked, asked.only or PARTS, tell))
        finally:
            made = [path.stem for path in bench.folder.glob("bench-*.yaml")]
            remove = bench.command(
                "jobs", "--yes", *(word for name in made for word in ("--remove", name))
            )
            subprocess.run(remove, capture_output=True, timeout=300, check=False)
    print("\n".join(report.lines()))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
