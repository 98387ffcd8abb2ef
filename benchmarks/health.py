"""What the supervisor says of a server while something is done to it, for the benchmarks of health
on lab hosts.
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

from benchmarks.faults import practice, verbs
from benchmarks.faults.judge import BAD
from benchmarks.faults.practice import Practice, Ran
from launcher.lab import hosts
from launcher.lab.layout import Host
from launcher.payload.agent import state

_OLD = 15.0  # seconds after which a record no longer counts
_WEDGE = "wedge"
SERVE = {
    "ray": ("serve", "--tp", "1", "--pp", "2", "--skip-network-check"),
    "mp": ("serve", "--backend", "mp", "--tp", "2", "--pp", "1", "--skip-network-check"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One reading of a server's record; `still` is G, `longest` is S."""

    at: float
    verdict: str
    id: str = ""
    reason: str = ""
    still: float = 0.0
    longest: float = 0.0
    generation: int = 0
    faults: int = 0
    wedge: Mapping[str, Any] | None = None


def look(record: Mapping[str, Any], now: float) -> Look:
    """Read a server's record; what is too old says nothing."""
    old = now - float(record.get("written") or 0) > _OLD
    verdict = "unknown" if old else str(record.get("verdict") or record.get("state") or "")
    return Look(
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
    """Read the record again and again while the block is entered."""

    hosts: Practice
    every: float = 1.0
    looks: list[Look] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(10)

    def _read(self) -> None:
        while not self._over.wait(self.every):
            self.looks.append(look(self.hosts.record(state.OBSERVED), time.time()))

    def first(self, since: float, *verdicts: str) -> Look | None:
        """Return the first look since a moment with one of these verdicts."""
        return next(
            (each for each in self.looks if each.at >= since and each.verdict in verdicts), None
        )


def summary(looks: Sequence[Look]) -> dict[str, Any]:
    """Return the longest G, the last S, how often each verdict was read, and the restarts.

    What was read of an earlier server does not count.
    """
    looks = [each for each in looks if each.id == looks[-1].id]
    return {
        "longest_g": round(max((each.still for each in looks), default=0.0), 1),
        "s": round(looks[-1].longest, 2) if looks else 0.0,
        "verdicts": dict(Counter(each.verdict for each in looks)),
        "red": sum(each.verdict in BAD for each in looks),
        "restarts": looks[-1].generation - max(1, looks[0].generation) if looks else 0,
        "faults": looks[-1].faults - looks[0].faults if looks else 0,
    }


def prepare(folder: Path, beside: int) -> Practice:
    """Start lab hosts with nothing on them, whose containers find the rank that wedges."""
    folder.mkdir(parents=True, exist_ok=True)
    lab = practice.bring_up(folder, beside)
    verbs.clear(lab)
    for host in lab.lab.hosts:
        place = trigger(host).parent
        place.mkdir(exist_ok=True)
        trigger(host).unlink(missing_ok=True)
        shutil.copy(Path(__file__).parent / "faults" / "wedged_rank.py", place / "sitecustomize.py")
    return lab


def inventory(
    lab: Practice,
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    engine: Mapping[str, Any] | None = None,
    serve: Mapping[str, Any] | None = None,
) -> str:
    """Write an inventory whose ranks can be wedged, and return its name."""
    document = yaml.safe_load((lab.folder / "real.yaml").read_text())
    document["env"] |= {"PYTHONPATH": f"{document['hf_home']}/{_WEDGE}", **(env or {})}
    document["engine_args"] |= engine or {}
    document["serve"] |= serve or {}
    (lab.folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return f"{name}.yaml"


def trigger(host: Host) -> Path:
    """Return the file that makes a rank of a host wedge, as this machine sees it."""
    return hosts.hf_home(host) / _WEDGE / "trigger"


def must(lab: Practice, name: str, *words: str, timeout: float = 600) -> Ran:
    """Run a command that has to work; ends the program when it does not."""
    ran = lab.vlaunch(name, *words, timeout=timeout)
    if ran.code != 0:
        raise SystemExit(f"`vlaunch {' '.join(words)}` ended with {ran.code}:\n{ran.said[-3000:]}")
    return ran


def load() -> float:
    """Return the load of this machine in the last minute."""
    return round(os.getloadavg()[0], 1)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Write a line of results."""
    with path.open("a") as results:
        results.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read results; a line that was cut off is passed over."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(text))
    return found


def between(page: str, name: str, text: str) -> str:
    """Return a page with the text between the marks of a table."""
    before, begin, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not begin or not end:
        raise SystemExit(f"the page has no marks for `{name}`")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def header(names: Sequence[str]) -> list[str]:
    """Return the two lines that begin a table."""
    return [row(names), "|" + "---|" * len(names)]


def row(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cells) + " |"
