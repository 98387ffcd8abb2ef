"""Run the campaign, or what is missing of it, and write its table."""

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


def load(path: Path) -> tuple[dict[tuple[str, str, int, str], Run], dict[str, float]]:
    """Read the results: the last run of each key, and how long the commands take.

    A line that was cut off is passed over.
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
            found = judge.read(document)
            runs[found.key] = found
    return runs, durations


def mend(path: Path) -> None:
    """End a last line that was cut off, so that the next one is a line of its own."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as results:
            results.write("\n")


def minutes(clock: str) -> int:
    """Return which minute of the day HH:MM is; raises ValueError when it is none."""
    at = time.strptime(clock, "%H:%M")
    return at.tm_hour * 60 + at.tm_min


def past(end: int, now: int) -> bool:
    """Tell whether a minute of the day is over.

    What is more than half a day ago is to come: campaigns go past midnight.
    """
    return (now - end) % 1440 < 720


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--verb", action="append", choices=VERBS, help="only this command; may be given again"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(cases.BY_ID),
        metavar="FAULT",
        help="only this fault; again",
    )
    parser.add_argument(
        "--seeds", type=int, help="seeds of each fault (default: 3 for up, 2 for batch, else 1)"
    )
    parser.add_argument(
        "--real", action="store_true", help="with vLLM itself, instead of the stand-in"
    )
    parser.add_argument(
        "--again", action="store_true", help="run also what was run before and was not good"
    )
    parser.add_argument(
        "--until",
        type=minutes,
        metavar="HH:MM",
        help="begin no run after this time of the day (UTC)",
    )
    text = (
        "run on hosts of its own, while others run with other numbers; they must not want the same"
        " runs (default: 0)"
    )
    parser.add_argument(
        "--beside", type=int, default=0, choices=range(10), metavar="0-9", help=text
    )
    parser.add_argument(
        "--folder", type=Path, help="keep inventories, jobs and what the commands said here"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing; write the table into benchmarks/RESULTS.md",
    )
    parser.add_argument("--list", action="store_true", help="run nothing; list what would be run")
    return parser.parse_args()


def main() -> int:
    """Run what is missing; the exit code is 1 when a run was not good."""
    args = options()
    runs, durations = load(args.results)
    if args.report:
        PAGE.write_text(table.written(PAGE.read_text(), table.report(list(runs.values()))))
        return 0
    engine = REAL if args.real else STAND_IN
    seeds = 1 if args.real and args.seeds is None else args.seeds
    wanted = [
        case
        for case in cases.campaign(
            verbs=args.verb or VERBS, only=args.only or (), seeds=seeds, engine=engine
        )
        if case.key not in runs or (args.again and not runs[case.key].ok)
    ]
    if args.list:
        print(
            "\n".join(
                f"{case.verb} {case.fault} seed {case.seed} on {case.host}" for case in wanted
            )
        )
        return 0
    return campaign(args, wanted, durations) if wanted else 0


def campaign(
    args: argparse.Namespace, wanted: list[cases.Case], durations: dict[str, float]
) -> int:
    """Bring the hosts up and do one run after the other; each is written down as soon as it is
    over.
    """
    if os.geteuid() != 0:
        sys.exit("practice hosts need root: `sudo make faults`")
    from benchmarks.faults import practice, verbs

    def whole() -> practice.Practice:
        hosts = practice.bring_up(folder, args.beside)
        verbs.clear(hosts)
        return hosts

    good = True
    mend(args.results)
    # so that hosts are put right on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as temporary,
        args.results.open("a") as results,
    ):
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        hosts = whole()
        for number, case in enumerate(wanted):
            now = time.strftime("%H:%M", time.gmtime())
            if args.until is not None and past(args.until, minutes(now)):
                print(f"it is {now}: {len(wanted) - number} runs are left", file=sys.stderr)
                break
            of = f"{case.verb} {case.engine}"
            if of not in durations:
                durations[of] = verbs.measure(hosts, case.verb, case.engine)
                results.write(json.dumps({"of": of, "duration": round(durations[of], 1)}) + "\n")
            began = time.monotonic()
            beyond = ""
            try:
                run = verbs.run(hosts, case, durations[of])
            except verbs.BROKEN as error:
                run, beyond = verbs.about(case, durations[of]), str(error) or type(error).__name__
                run.void = f"the hosts could not be put right: {beyond}"
            results.write(verbs.as_line(run))
            results.flush()
            good = good and run.ok
            about = (
                f"[{number + 1}/{len(wanted)}] {case.verb} {case.fault} seed {case.seed} on"
                f" {case.host}, {run.moment:.1f} s"
            )
            words = "void: " + run.void if run.void else "good" if run.ok else "; ".join(run.why)
            print(
                f"{about}, {time.monotonic() - began:.0f} s: {words}", file=sys.stderr, flush=True
            )
            if beyond:
                hosts = whole()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
