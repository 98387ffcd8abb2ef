"""A rank that stops in its step on lab hosts: seconds until the server is called quiet and suspect,
and which rank, node and frame are named.

    python -m benchmarks.wedge [--backend ray|mp …] [--mode c|python|sleep …] [--runs 5]
    [--stuck SECONDS] [--beside 0-9] [--report]

Ray runs two pipeline stages, mp two tensor-parallel ranks, each over two hosts; three clients ask
all the time. Odd runs wedge rank 1, even ones rank 0. With `--stuck` the server is ended after so
many seconds, and the next answer is waited for; else the server is stopped once it is suspect. A
run is good when `vlaunch status` ended with 1 in time and the right rank and node were named.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import health
from benchmarks.faults import judge
from benchmarks.faults.judge import BAD
from benchmarks.faults.practice import API_KEY, Practice, until
from benchmarks.faults.traffic import Traffic
from benchmarks.health import SERVE, Watch
from launcher.lab.render import MODEL
from launcher.payload.agent import state

RESULTS = Path(__file__).with_name("faults") / "wedges.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
MODES = {"c": "spins in C", "python": "spins in Python", "sleep": "sleeps"}
RED = 150.0  # seconds: the goal
_PATIENCE = 60.0  # seconds more, so that a late verdict is measured
_BACK = 300.0  # seconds after the end of the engine until it must answer
_DOCTOR = 4000  # characters that are kept
_HEAD = (
    "backend",
    "the rank",
    "`stuck`",
    "runs",
    "good",
    "quiet after",
    "red after",
    "exit",
    "rank and node named",
    "ended after",
    "next answer after",
    "load of the machine",
)


def run(
    lab: Practice, inventory: str, backend: str, mode: str, number: int, stuck: float
) -> dict[str, Any]:
    """Serve, wedge a rank, watch, and stop the server."""
    health.must(lab, inventory, *SERVE[backend])
    rank = number % 2
    chance = random.Random(f"{backend}/{mode}/{number}").uniform(5, 20)
    line: dict[str, Any] = {
        "backend": backend,
        "mode": mode,
        "run": number,
        "rank": rank,
        "stuck": stuck,
    }
    line |= {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": health.load()}
    url = f"http://{lab.head.ip}:8000/v1"
    traffic = Traffic(url, API_KEY, MODEL, clients=3, timeout=900)
    with Watch(lab, every=0.5) as watch, traffic:
        until(lambda: len(traffic.samples) >= 6, 60)
        time.sleep(chance)
        line["node"], wedged = _wedge(lab, rank, mode)
        until(lambda: watch.first(wedged, *BAD), RED + _PATIENCE)
        line |= _seen(lab, inventory, watch, wedged)
        if stuck:
            line |= _ended(lab, watch, traffic, wedged, stuck)
        line["load_after"] = health.load()
        lab.vlaunch(inventory, "stop", timeout=180)
    line["ok"] = good(line)
    return line


def _wedge(lab: Practice, rank: int, mode: str) -> tuple[str, float]:
    """Wedge a rank; returns the node that it was on, and when."""
    files = {host.name: health.trigger(host) for host in lab.lab.hosts}
    for file in files.values():
        new = file.with_suffix(".new")
        new.write_text(f"{rank} {mode}\n")
        new.rename(file)
    try:
        if not until(lambda: not all(file.exists() for file in files.values()), 60, every=0.05):
            raise SystemExit(f"no rank {rank} took a step")
        wedged = time.time()
        return next(name for name, file in files.items() if not file.exists()), wedged
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)


def _seen(lab: Practice, inventory: str, watch: Watch, wedged: float) -> dict[str, Any]:
    """Return what the record, `status` and `doctor` say of the wedge."""
    quiet, suspect = watch.first(wedged, "quiet"), watch.first(wedged, *BAD)
    status = lab.vlaunch(inventory, "status", timeout=60)
    red = status.ended - wedged if suspect is not None else None
    document = lab.vlaunch(inventory, "status", "--json", timeout=60).document
    server = next(iter(document.get("servers") or [{}]))
    doctor = lab.vlaunch(inventory, "doctor", timeout=240)
    record = lab.record(state.OBSERVED)
    faults = [each for each in record.get("faults", ()) if each["at"] >= wedged]
    wedge = (suspect.wedge if suspect else None) or next(iter(faults), {})
    return {
        "quiet": round(quiet.at - wedged, 1) if quiet else None,
        "suspect": round(suspect.at - wedged, 1) if suspect else None,
        "red": round(red, 1) if red is not None else None,
        "verdict": suspect.verdict if suspect else "",
        "shown": str(server.get("state", "")),
        "code": status.code,
        "named": {name: wedge.get(name) for name in ("rank", "node", "gpu", "frame")},
        "observations": list(wedge.get("observations") or []),
        "stacks": list(wedge.get("stacks") or []),
        "longest_step": record.get("longest_step"),
        "status": status.out[-_DOCTOR:],
        "doctor": doctor.said[:_DOCTOR],
        "doctor_code": doctor.code,
    }


def _ended(
    lab: Practice, watch: Watch, traffic: Traffic, wedged: float, stuck: float
) -> dict[str, Any]:
    """Wait until the server was ended and answers again."""
    until(lambda: judge.outage(list(traffic.samples), wedged).again, stuck + _BACK)
    out = judge.outage(list(traffic.samples), wedged)
    faults = [each for each in lab.record(state.OBSERVED).get("faults", ()) if each["at"] >= wedged]
    fault: Mapping[str, Any] = faults[0] if faults else {}
    return {
        "ended": round(fault["at"] - wedged, 1) if fault else None,
        "fault": {name: fault.get(name) for name in ("what", "cause", "node", "rank")},
        "answer": round(out.again - wedged, 1) if out.again else None,
        "failed": out.failed,
        "generations": watch.looks[-1].generation - watch.looks[0].generation,
    }


def good(line: Mapping[str, Any]) -> bool:
    """Tell whether a run was red in time and named the right rank and node."""
    in_time = line["red"] is not None and line["red"] <= RED and line["code"] == 1
    named = line["named"]
    right = named["node"] == line["node"] and _number(named["rank"]) == line["rank"]
    return bool(in_time and right and (not line["stuck"] or line.get("answer")))


def _number(rank: object) -> int | None:
    """Return the number of a rank such as `PP1`, `DP0 PP0 TP1` or `rank 1`: the last digit."""
    digits = [each for each in str(rank or "") if each.isdigit()]
    return int(digits[-1]) if digits else None


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each backend, mode and opt-in."""
    rows = health.header(_HEAD)
    for backend, mode, opted in itertools.product(SERVE, MODES, (False, True)):
        found = [
            line
            for line in lines
            if (line["backend"], line["mode"], bool(line["stuck"])) == (backend, mode, opted)
        ]
        if found:
            right = sum(
                line["named"]["node"] == line["node"]
                and _number(line["named"]["rank"]) == line["rank"]
                for line in found
            )
            split = "Ray, PP 2" if backend == "ray" else "mp, TP 2"
            cells = (
                split,
                MODES[mode],
                f"{found[0]['stuck']:.0f}" if opted else "–",
                str(len(found)),
                str(sum(bool(line["ok"]) for line in found)),
                *(_times(found, name) for name in ("quiet", "red")),
                ", ".join(sorted({str(line["code"]) for line in found})),
                f"{right} of {len(found)}",
                *(_times(found, name) for name in ("ended", "answer")),
                _range([line["load"] for line in found]),
            )
            rows.append(health.row(cells))
    return "\n".join(rows)


def _times(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    found = [line[name] for line in lines if line.get(name) is not None]
    if not found:
        return "–"
    middle = f"{statistics.median(found):.0f} s"
    return middle if len(found) == 1 else f"{middle} ({min(found):.0f}–{max(found):.0f})"


def _range(found: Sequence[float]) -> str:
    return f"{min(found):.0f}–{max(found):.0f}" if len(found) > 1 else f"{found[0]:.0f}"


def main() -> int:
    """Run what is asked for; the exit code is 1 when a run was not good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=list(SERVE))
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    parser.add_argument("--stuck", type=float, default=0.0)
    parser.add_argument("--beside", type=int, default=0, choices=range(10), metavar="0-9")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table")
    args = parser.parse_args()
    if args.report:
        text = table(health.read_lines(args.results))
        PAGE.write_text(health.between(PAGE.read_text(), "wedges", text))
        return 0
    good = True
    with tempfile.TemporaryDirectory(prefix="wedge-") as temporary:
        lab = health.prepare(args.folder or Path(temporary), args.beside)
        policy = {"stuck": args.stuck} if args.stuck else {}
        inventory = health.inventory(lab, "wedge", serve=policy)
        health.must(lab, inventory, "up")
        numbers = range(args.first, args.first + args.runs)
        for number, backend, mode in itertools.product(
            numbers, args.backend or SERVE, args.mode or MODES
        ):
            line = run(lab, inventory, backend, mode, number, args.stuck)
            health.append(args.results, line)
            good = good and line["ok"]
            print(
                f"{backend} {mode} run {number}: rank {line['rank']} on {line['node']}, quiet"
                f" {line['quiet']}, red {line['red']}, exit {line['code']}, named {line['named']},"
                f" answer {line.get('answer')}: {'good' if line['ok'] else 'NOT GOOD'}",
                file=sys.stderr,
                flush=True,
            )
        health.must(lab, inventory, "down")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
