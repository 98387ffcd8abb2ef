"""Run the campaign, or its missing runs, and write its table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults import cases, judge, table
from benchmarks.faults.cases import REAL, STAND_IN, VERBS
from benchmarks.faults.judge import Run

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = ROOT / "benchmarks" / "RESULTS.md"


def load_results(path: Path) -> tuple[dict[tuple[str, str, int, str], Run], dict[str, float]]:
    """Read the results: the last run of each key, and the duration of each command. Truncated lines
    are skipped.
    """
    runs: dict[tuple[str, str, int, str], Run] = {}
    durations: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            document: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if "duration" in document:
            durations[document["of"]] = float(document["duration"])
        else:
            run = judge.parse_run(document)
            runs[run.key] = run
    return runs, durations


def complete_last_line(path: Path) -> None:
    """Complete a truncated last line, so that the next line starts on its own."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as results:
            results.write("\n")


def parse_minutes(clock: str) -> int:
    """Return the minute of the day of HH:MM; raises ValueError."""
    at = time.strptime(clock, "%H:%M")
    return at.tm_hour * 60 + at.tm_min


def is_past(end: int, now: int) -> bool:
    """Return whether a minute of the day has passed.

    More than half a day ago counts as the future: campaigns run past midnight.
    """
    return (now - end) % 1440 < 720


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--verb", action="append", choices=VERBS, help="only this command (repeatable)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(cases.BY_ID),
        metavar="FAULT",
        help="only this fault (repeatable)",
    )
    parser.add_argument(
        "--seeds", type=int, help="seeds per fault (default: 3 for up, 2 for batch, else 1)"
    )
    parser.add_argument(
        "--real", action="store_true", help="run vLLM itself instead of the stand-in"
    )
    parser.add_argument(
        "--retry", action="store_true", help="also repeat the bad runs of earlier campaigns"
    )
    parser.add_argument(
        "--until",
        type=parse_minutes,
        metavar="HH:MM",
        help="start no run after this time of the day (UTC)",
    )
    text = (
        "number of a concurrent campaign, with its own hosts; campaigns must not share runs"
        " (default: 0)"
    )
    parser.add_argument(
        "--instance", type=int, default=0, choices=range(10), metavar="0-9", help=text
    )
    parser.add_argument(
        "--folder", type=Path, help="keep inventories, jobs and the commands' output here"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--report",
        action="store_true",
        help="only write the table into benchmarks/RESULTS.md",
    )
    parser.add_argument("--list", action="store_true", help="only list the pending runs")
    return parser.parse_args()


def main() -> int:
    """Run the missing cases; return 1 when a run failed."""
    args = parse_options()
    runs, durations = load_results(args.results)
    if args.report:
        PAGE.write_text(table.replace_part(PAGE.read_text(), table.report(list(runs.values()))))
        return 0
    engine = REAL if args.real else STAND_IN
    seeds = 1 if args.real and args.seeds is None else args.seeds
    pending = [
        case
        for case in cases.list_cases(
            verbs=args.verb or VERBS, only=args.only or (), seeds=seeds, engine=engine
        )
        if case.key not in runs or (args.retry and not runs[case.key].ok)
    ]
    if args.list:
        print(
            "\n".join(
                f"{case.verb} {case.fault} seed {case.seed} on {case.host}" for case in pending
            )
        )
        return 0
    return run_campaign(args, pending, durations) if pending else 0


def run_campaign(
    args: argparse.Namespace, pending: list[cases.Case], durations: dict[str, float]
) -> int:
    """Start the hosts and run one case after the other; each result is written at once."""
    if os.geteuid() != 0:
        sys.exit("lab hosts need root: `sudo make faults`")
    from benchmarks.faults import verbs
    from benchmarks.faults.testbed import FaultTestbed, start_hosts

    def start_testbed() -> FaultTestbed:
        testbed = start_hosts(folder, args.instance)
        verbs.reset_hosts(testbed)
        return testbed

    good = True
    complete_last_line(args.results)
    # so that hosts are repaired on exit
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as temporary,
        args.results.open("a") as results,
    ):
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        hosts = start_testbed()
        for number, case in enumerate(pending):
            now = time.strftime("%H:%M", time.gmtime())
            if args.until is not None and is_past(args.until, parse_minutes(now)):
                print(f"it is {now}: {len(pending) - number} runs are left", file=sys.stderr)
                break
            command = f"{case.verb} {case.engine}"
            if command not in durations:
                durations[command] = verbs.measure_duration(hosts, case.verb, case.engine)
                results.write(
                    json.dumps({"of": command, "duration": round(durations[command], 1)}) + "\n"
                )
            began = time.monotonic()
            host_error = ""
            try:
                run = verbs.run_case(hosts, case, durations[command])
            except verbs.HOST_ERRORS as error:
                run, host_error = (
                    verbs.new_run(case, durations[command]),
                    str(error) or type(error).__name__,
                )
                run.void = f"the hosts could not be put right: {host_error}"
            results.write(verbs.format_line(run))
            results.flush()
            good = good and run.ok
            title = (
                f"[{number + 1}/{len(pending)}] {case.verb} {case.fault} seed {case.seed} on"
                f" {case.host}, {run.moment:.1f} s"
            )
            outcome = (
                "void: " + run.void if run.void else "good" if run.ok else "; ".join(run.defects)
            )
            print(
                f"{title}, {time.monotonic() - began:.0f} s: {outcome}", file=sys.stderr, flush=True
            )
            if host_error:
                hosts = start_testbed()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
