"""Ranks that hang on lab hosts: seconds until the server is reported quiet and suspect, and the
rank, node and frame that are named.

    python -m benchmarks.wedge [--backend ray|mp …] [--mode c|python|sleep …] [--runs 5]
    [--stuck SECONDS] [--instance 0-9] [--report]

Ray runs two pipeline stages and mp two tensor-parallel ranks, both over two hosts; three clients
send requests all the time. Odd runs hang rank 1, even runs rank 0. With `--stuck SECONDS` the
supervisor stops the server after so many seconds, and the run lasts until the next answer; without
it, the server is stopped once it is suspect. A run is good when `vlaunch status` exited with 1 in
time and named the right rank and node.
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
from benchmarks.faults.judge import RED_VERDICTS
from benchmarks.faults.testbed import API_KEY, FaultTestbed, wait_until
from benchmarks.faults.traffic import Traffic
from benchmarks.health import SERVE, Watch
from launcher.agent import state
from launcher.lab.host_configs import MODEL

RESULTS = Path(__file__).with_name("faults") / "wedges.jsonl"
PAGE = Path(__file__).parent / "RESULTS.md"
MODES = {"c": "spins in C", "python": "spins in Python", "sleep": "sleeps"}
RED = 150.0  # seconds: the goal
_GRACE = 60.0  # seconds beyond the goal, so that a late verdict is measured too
_RESTART = 300.0  # seconds from the stop of the engine to the next answer
_OUTPUT = 4000  # characters of a command's output in the results
_COLUMNS = (
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
    testbed: FaultTestbed, inventory: str, backend: str, mode: str, number: int, stuck: float
) -> dict[str, Any]:
    """Serve a model, hang a rank, read the verdicts, and stop the server."""
    health.run_command(testbed, inventory, *SERVE[backend])
    rank = number % 2
    delay = random.Random(f"{backend}/{mode}/{number}").uniform(5, 20)
    line: dict[str, Any] = {
        "backend": backend,
        "mode": mode,
        "run": number,
        "rank": rank,
        "stuck": stuck,
    }
    line |= {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": health.read_load()}
    url = f"http://{testbed.head.ip}:8000/v1"
    traffic = Traffic(url, API_KEY, MODEL, clients=3, timeout=900)
    with Watch(testbed, every=0.5) as watch, traffic:
        wait_until(lambda: len(traffic.samples) >= 6, 60)
        time.sleep(delay)
        line["node"], since = _hang_rank(testbed, rank, mode)
        wait_until(lambda: watch.first(since, *RED_VERDICTS), RED + _GRACE)
        line |= _collect_verdicts(testbed, inventory, watch, since)
        if stuck:
            line |= _await_restart(testbed, watch, traffic, since, stuck)
        line["load_after"] = health.read_load()
        testbed.vlaunch(inventory, "stop", timeout=180)
    line["ok"] = is_good(line)
    return line


def _hang_rank(testbed: FaultTestbed, rank: int, mode: str) -> tuple[str, float]:
    """Make a rank hang in its next step; return its node and the time."""
    files = {host.name: health.trigger_file(host) for host in testbed.lab.hosts}
    for file in files.values():
        temporary = file.with_suffix(".new")
        temporary.write_text(f"{rank} {mode}\n")
        temporary.rename(file)
    try:
        if not wait_until(
            lambda: not all(file.exists() for file in files.values()), 60, every=0.05
        ):
            raise SystemExit(f"no rank {rank} took a step")
        return next(name for name, file in files.items() if not file.exists()), time.time()
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)


def _collect_verdicts(
    testbed: FaultTestbed, inventory: str, watch: Watch, since: float
) -> dict[str, Any]:
    """Return the verdicts of the record, `status` and `doctor` on a rank that hangs."""
    quiet, suspect = watch.first(since, "quiet"), watch.first(since, *RED_VERDICTS)
    status = testbed.vlaunch(inventory, "status", timeout=60)
    red = status.ended - since if suspect is not None else None
    document = testbed.vlaunch(inventory, "status", "--json", timeout=60).document
    server = next(iter(document.get("servers") or [{}]))
    doctor = testbed.vlaunch(inventory, "doctor", timeout=240)
    record = testbed.record(state.OBSERVED)
    faults = _faults_since(record, since)
    wedge = (suspect.wedge if suspect else None) or next(iter(faults), {})
    return {
        "quiet": round(quiet.at - since, 1) if quiet else None,
        "suspect": round(suspect.at - since, 1) if suspect else None,
        "red": round(red, 1) if red is not None else None,
        "verdict": suspect.verdict if suspect else "",
        "shown": str(server.get("state", "")),
        "code": status.code,
        "named": {name: wedge.get(name) for name in ("rank", "node", "gpu", "frame")},
        "observations": list(wedge.get("observations") or []),
        "stacks": list(wedge.get("stacks") or []),
        "longest_step": record.get("longest_step"),
        "status": status.out[-_OUTPUT:],
        "doctor": doctor.output[:_OUTPUT],
        "doctor_code": doctor.code,
    }


def _await_restart(
    testbed: FaultTestbed, watch: Watch, traffic: Traffic, since: float, stuck: float
) -> dict[str, Any]:
    """Wait until the supervisor has restarted the server and it answers again."""
    wait_until(lambda: judge.find_outage(list(traffic.samples), since).again, stuck + _RESTART)
    outage = judge.find_outage(list(traffic.samples), since)
    fault: Mapping[str, Any] = next(iter(_faults_since(testbed.record(state.OBSERVED), since)), {})
    return {
        "ended": round(fault["at"] - since, 1) if fault else None,
        "fault": {name: fault.get(name) for name in ("what", "cause", "node", "rank")},
        "answer": round(outage.again - since, 1) if outage.again else None,
        "failed": outage.failed,
        "generations": watch.readings[-1].generation - watch.readings[0].generation,
    }


def _faults_since(record: Mapping[str, Any], since: float) -> list[dict[str, Any]]:
    return [fault for fault in record.get("faults", ()) if fault["at"] >= since]


def is_good(line: Mapping[str, Any]) -> bool:
    """Return whether a run was red in time and named the right rank and node."""
    in_time = line["red"] is not None and line["red"] <= RED and line["code"] == 1
    return bool(in_time and _is_right(line) and (not line["stuck"] or line.get("answer")))


def _is_right(line: Mapping[str, Any]) -> bool:
    named = line["named"]
    return bool(named["node"] == line["node"] and _rank_number(named["rank"]) == line["rank"])


def _rank_number(rank: object) -> int | None:
    """Return the number of a rank such as `PP1`, `DP0 PP0 TP1` or `rank 1`: the last digit."""
    digits = [character for character in str(rank or "") if character.isdigit()]
    return int(digits[-1]) if digits else None


def format_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one row per backend and mode, without and with `--stuck`."""
    rows = health.format_header(_COLUMNS)
    for backend, mode, stops in itertools.product(SERVE, MODES, (False, True)):
        runs = [
            line
            for line in lines
            if (line["backend"], line["mode"], bool(line["stuck"])) == (backend, mode, stops)
        ]
        if runs:
            cells = (
                "Ray, PP 2" if backend == "ray" else "mp, TP 2",
                MODES[mode],
                f"{runs[0]['stuck']:.0f}" if stops else "–",
                str(len(runs)),
                str(sum(bool(line["ok"]) for line in runs)),
                *(_format_times(runs, name) for name in ("quiet", "red")),
                ", ".join(sorted({str(line["code"]) for line in runs})),
                f"{sum(map(_is_right, runs))} of {len(runs)}",
                *(_format_times(runs, name) for name in ("ended", "answer")),
                _format_range([line["load"] for line in runs]),
            )
            rows.append(health.format_row(cells))
    return "\n".join(rows)


def _format_times(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    times = [line[name] for line in lines if line.get(name) is not None]
    if not times:
        return "–"
    median = f"{statistics.median(times):.0f} s"
    return median if len(times) == 1 else f"{median} ({min(times):.0f}–{max(times):.0f})"


def _format_range(values: Sequence[float]) -> str:
    return f"{min(values):.0f}–{max(values):.0f}" if len(values) > 1 else f"{values[0]:.0f}"


def main() -> int:
    """Run the cases given on the command line; exit with 1 when a run was not good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=list(SERVE))
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    parser.add_argument("--stuck", type=float, default=0.0)
    parser.add_argument("--instance", type=int, default=0, choices=range(10), metavar="0-9")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table")
    args = parser.parse_args()
    if args.report:
        table = format_table(health.read_lines(args.results))
        PAGE.write_text(health.replace_table(PAGE.read_text(), "wedges", table))
        return 0
    all_good = True
    with tempfile.TemporaryDirectory(prefix="wedge-") as temporary:
        testbed = health.prepare_testbed(args.folder or Path(temporary), args.instance)
        policy = {"stuck": args.stuck} if args.stuck else {}
        inventory = health.write_inventory(testbed, "wedge", serve=policy)
        health.run_command(testbed, inventory, "up")
        numbers = range(args.first, args.first + args.runs)
        for number, backend, mode in itertools.product(
            numbers, args.backend or SERVE, args.mode or MODES
        ):
            line = run(testbed, inventory, backend, mode, number, args.stuck)
            health.append_line(args.results, line)
            all_good = all_good and line["ok"]
            print(
                f"{backend} {mode} run {number}: rank {line['rank']} on {line['node']}, quiet"
                f" {line['quiet']}, red {line['red']}, exit {line['code']}, named {line['named']},"
                f" answer {line.get('answer')}: {'good' if line['ok'] else 'NOT GOOD'}",
                file=sys.stderr,
                flush=True,
            )
        health.run_command(testbed, inventory, "down", "--yes")
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
