"""Common parts of the health benchmarks on lab hosts: commands, readings of the supervisor's
record, results and tables.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from benchmarks.faults import verbs
from benchmarks.faults.judge import RED_VERDICTS
from benchmarks.faults.testbed import CommandResult, FaultTestbed, start_hosts
from launcher.agent import state
from launcher.lab import hosts
from launcher.lab.layout import Host

_STALE = 15.0  # seconds after which a record no longer counts
_FOLDER = "wedge"  # below the model cache of the hosts: the patched rank and its trigger
SERVE = {
    "ray": ("serve", "--tp", "1", "--pp", "2", "--skip-network-check"),
    "mp": ("serve", "--backend", "mp", "--tp", "2", "--pp", "1", "--skip-network-check"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of a server's record.

    `still` is G, the seconds without a step so far; `longest` is S, the longest step.
    """

    at: float
    verdict: str
    id: str = ""
    reason: str = ""
    still: float = 0.0
    longest: float = 0.0
    generation: int = 0
    faults: int = 0
    wedge: Mapping[str, Any] | None = None


def parse_record(record: Mapping[str, Any], now: float) -> Reading:
    """Parse a server's record; the verdict of a stale one is `unknown`."""
    stale = now - float(record.get("written") or 0) > _STALE
    verdict = "unknown" if stale else str(record.get("verdict") or record.get("state") or "")
    return Reading(
        at=now,
        verdict=verdict,
        id=str(record.get("id") or ""),
        reason=str(record.get("reason") or ""),
        still=float(record.get("still") or 0),
        longest=float(record.get("longest_step") or 0),
        generation=int(record.get("generation") or 0),
        faults=int(record.get("fault_count") or 0),
        wedge=record.get("wedge"),
    )


@dataclass(slots=True)
class Watch:
    """A thread that reads the record every `every` seconds while the block is entered."""

    testbed: FaultTestbed
    every: float = 1.0
    readings: list[Reading] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        """Start the thread."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(10)

    def _read(self) -> None:
        while not self._over.wait(self.every):
            record = self.testbed.record(state.OBSERVED)
            self.readings.append(parse_record(record, time.time()))

    def first(self, since: float, *verdicts: str) -> Reading | None:
        """Return the first reading since a moment with one of these verdicts."""
        readings = (reading for reading in self.readings if reading.at >= since)
        return next((reading for reading in readings if reading.verdict in verdicts), None)


def summarize(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the longest G, the last S, the number of readings per verdict, and the restarts.

    Readings of an earlier server do not count.
    """
    readings = [reading for reading in readings if reading.id == readings[-1].id]
    first, last = (readings[0], readings[-1]) if readings else (None, None)
    return {
        "longest_g": round(max((reading.still for reading in readings), default=0.0), 1),
        "s": round(last.longest, 2) if last else 0.0,
        "verdicts": dict(Counter(reading.verdict for reading in readings)),
        "red": sum(reading.verdict in RED_VERDICTS for reading in readings),
        "restarts": last.generation - max(1, first.generation) if first and last else 0,
        "faults": last.faults - first.faults if first and last else 0,
    }


def prepare_testbed(folder: Path, instance: int) -> FaultTestbed:
    """Start empty lab hosts and install the patched rank on them."""
    folder.mkdir(parents=True, exist_ok=True)
    testbed = start_hosts(folder, instance)
    verbs.reset_hosts(testbed)
    program = Path(__file__).parent / "faults" / "wedged_rank.py"
    for host in testbed.lab.hosts:
        trigger = trigger_file(host)
        trigger.parent.mkdir(exist_ok=True)
        trigger.unlink(missing_ok=True)
        shutil.copy(program, trigger.with_name("sitecustomize.py"))
    return testbed


def write_inventory(
    testbed: FaultTestbed,
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    engine: Mapping[str, Any] | None = None,
    serve: Mapping[str, Any] | None = None,
) -> str:
    """Write an inventory whose containers load the patched rank, and return its name."""
    document = yaml.safe_load((testbed.folder / "real.yaml").read_text())
    document["env"] |= {"PYTHONPATH": f"{document['hf_home']}/{_FOLDER}", **(env or {})}
    document["engine_args"] |= engine or {}
    document["serve"] |= serve or {}
    (testbed.folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return f"{name}.yaml"


def trigger_file(host: Host) -> Path:
    """Return the path on this machine of the file that makes a rank of a host hang."""
    return hosts.hf_home(host) / _FOLDER / "trigger"


def run_command(
    testbed: FaultTestbed, inventory: str, *arguments: str, timeout: float = 600
) -> CommandResult:
    """Run a `vlaunch` command; exit with its output when it fails."""
    result = testbed.vlaunch(inventory, *arguments, timeout=timeout)
    if result.code != 0:
        command = " ".join(arguments)
        raise SystemExit(f"`vlaunch {command}` exited with {result.code}:\n{result.output[-3000:]}")
    return result


def read_load() -> float:
    """Return this machine's load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line of results to a file."""
    with path.open("a") as results:
        results.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a results file; skip truncated ones. Exit with 1 if no line remains."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(text))
    if not lines:
        raise SystemExit(
            f"error: {path}: no results to report; the table is unchanged\n"
            "hint: run the benchmark without --report, or name another file with --results"
        )
    return lines


def replace_table(page: str, name: str, table: str) -> str:
    """Return a page with a new table between the marks of that name."""
    before, begin, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not begin or not end:
        raise SystemExit(f"the page has no marks for `{name}`")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def format_header(names: Sequence[str]) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [format_row(names), "|" + "---|" * len(names)]


def format_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
