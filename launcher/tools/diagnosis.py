"""One question to a node about what went wrong: its containers, servers, their logs, its kernel,
and the records of the supervisor; how its answer is read, and the times of log lines.

The script only reads, and every part of it is bounded: a node may have gigabytes of logs, and what
reads them may hang. Parts stand between lines that begin with a mark that is new for each question,
so that no log can pretend to be another part. The answer may be cut anywhere, and hold anything:
nothing here raises for that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from launcher.agent import state
from launcher.core import shell, untrusted
from launcher.core.domain import Argv

# the parts of an answer
STATE, RECORD, MODELS, KERNEL = "state", "record", "models", "kernel"
INSPECT, ENGINES, LOGS, INSIDE = "inspect", "engines", "logs", "inside"
DIAGNOSIS = (STATE, RECORD, MODELS, KERNEL, ENGINES, LOGS, INSIDE)
DRIVER = "job driver"  # what the log of a batch job's driver is called
_ROLES = ("head", "worker", "probe")
_FILES = ("desired", "observed", "history")
_NAMES = {"models": "models", "kernel": "kernel", "nccl": "NCCL", "driver": DRIVER}
_NAMES |= {"worker": "Ray worker", "ray": "Ray"}
# characters of a line that are looked at: patterns take longer than linear time on lines without an
# end
_LINE = 1000
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)\s?")
# `2026-11-21 20:14:02,123`, `2026-11-21T20:14:02.123456Z`, `2026-11-21T20:14:02,123456+00:00`,
# `…+0000`
_FULL = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
# `INFO 11-21 20:14:02 [core.py:12]`, as vLLM writes it: without a year.
_SHORT = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_DAY = 86400.0
# What stands behind a mark, and its exit status; None where the answer was cut.
_Answer = tuple[str, int | None]
_Parts = Mapping[str, list[_Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What Docker says of a container.

    Times are as Docker writes them; `role` is one of ours, or empty.
    """

    name: str
    role: str
    status: str
    exit_code: int = 0
    oom: bool = False
    error: str = ""
    started: str = ""
    finished: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Lines of one log, oldest first, without terminal codes.

    `part` is its place in the answer, `what` its name for people.

    `stamps` are the times that Docker put before lines, by the line's number; `zone` is how many
    seconds its own times are ahead of UTC.
    """

    part: str
    what: str
    lines: tuple[str, ...]
    stamps: Mapping[int, str] = field(default_factory=dict)
    zone: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a node told. `gaps` are the parts that could not be had, with the reason.

    `kept` are the keeper's files (`desired`, `observed`, `history`) of each server.
    """

    clock: float | None = None
    states: tuple[State, ...] = ()
    logs: tuple[Log, ...] = ()
    kept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inspect: str = ""
    gaps: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """How many lines of logs there are."""
        return sum(len(log.lines) for log in self.logs)


def read(text: str, mark: str) -> Told:
    """Read an answer; what is missing or makes no sense is left out, and said in `gaps` where
    somebody should know.
    """
    parts = _parts(text, mark)
    states = tuple(_states(_first(parts, "state")[0]))
    servers = _first(parts, "servers")[0].split()
    clock = _first(parts, "clock")[0].strip()
    return Told(
        clock=float(clock) if re.fullmatch(r"\d{9,11}", clock) else None,
        states=states,
        logs=tuple(_logs(parts, states, servers)),
        kept={
            name: {
                file: content
                for file in _FILES
                if (content := _json(parts, f"{file}-{number}")) is not None
            }
            for number, name in enumerate(servers, 1)
            if state.NAME.fullmatch(name)
        },
        inspect=_first(parts, "inspect")[0],
        gaps=_gaps(parts),
    )


def _first(parts: _Parts, name: str) -> _Answer:
    """Return the first answer of a name; one that failed where there is none."""
    return parts.get(name, [("", 1)])[0]


def _gaps(parts: _Parts) -> dict[str, str]:
    text, code = _first(parts, "ids")
    reason = words(text) or "the node did not tell which there are"
    gaps = {} if code == 0 else {"containers": reason}
    if "kernel" in parts and _first(parts, "kernel")[1] != 0:
        gaps["kernel log"] = "it may only be read by root there"
    return gaps


def _logs(parts: _Parts, states: tuple[State, ...], servers: Sequence[str]) -> Iterator[Log]:
    """Yield the logs that have a line."""
    zone = _zone(_first(parts, "zone")[0])
    for name, answers in parts.items():
        what = _what(name, states, servers)
        for out, _ in answers if what else ():
            log = log_of(name, what, out, zone)
            if log.lines:
                yield log


def _parts(text: str, mark: str) -> dict[str, list[_Answer]]:
    """Return what stands behind each mark; an answer that was cut has no exit status, and its last
    line may be half of one.
    """
    found: dict[str, list[_Answer]] = {}
    for piece in f"\n{text}".split(f"\n{mark} ")[1:]:
        name, _, body = piece.partition("\n")
        if match := re.fullmatch(r"rc (\d{1,3})", name.strip()):
            for answers in list(found.values())[-1:]:
                if answers[-1][1] is None:
                    answers[-1] = (answers[-1][0], int(match[1]))
        elif re.fullmatch(r"[a-z]{1,12}(?:-\d{1,2})?", name.strip()):
            # Several containers answer to the same names; the newest answer is the last of the
            # dictionary.
            answers = found.pop(name.strip(), [])
            found[name.strip()] = [*answers, (body.removesuffix("\n"), None)]
    return found


def _what(name: str, states: tuple[State, ...], servers: Sequence[str]) -> str:
    kind, _, number = name.partition("-")
    place = int(number or 0) - 1
    if kind == "log" and number:
        role = states[place].role if 0 <= place < len(states) else ""
        return "probe container" if role == "probe" else "container"
    if kind == "engine":
        name = servers[place] if 0 <= place < len(servers) else ""
        return server_log(name) if state.NAME.fullmatch(name) else ""
    return _NAMES.get(kind, "")


def server_log(name: str) -> str:
    """Return what the log of a server's engine is called."""
    return f"server {name}"


def log_of(name: str, what: str, text: str, zone: float = 0.0) -> Log:
    """Return a log from its text: whole lines, cut where they are too long to be searched."""
    lines, stamps = list[str](), dict[int, str]()
    for line in untrusted.plain(text.replace("\r", "\n")).split("\n"):
        if not line.strip():
            continue
        if name.startswith("log-") and (match := _STAMP.match(line)):
            stamps[len(lines)] = match[1] + match[2]
            line = line[match.end() :]  # noqa: PLW2901 - the line without its stamp
        lines.append(line[:_LINE])
    return Log(
        part=name,
        what=what,
        lines=tuple(lines),
        stamps=stamps,
        zone=0.0 if name.startswith("log-") else zone,
    )


def _states(text: str) -> list[State]:
    errors = ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
    states = []
    for line in text.splitlines():
        with contextlib.suppress(*errors):
            raw = untrusted.loads(line)
            docker = raw["state"]
            states.append(
                State(
                    name=words(str(raw["name"]).lstrip("/")),
                    role=raw["role"] if raw["role"] in _ROLES else "",
                    status=words(str(docker["Status"])),
                    exit_code=int(docker.get("ExitCode") or 0),
                    oom=docker.get("OOMKilled") is True,
                    error=words(str(docker.get("Error") or "")),
                    started=str(docker.get("StartedAt") or ""),
                    finished=str(docker.get("FinishedAt") or ""),
                    restarts=int(raw.get("restarts") or 0),
                )
            )
    return states


def _json(parts: _Parts, name: str) -> Any:
    out, code = _first(parts, name)
    try:
        return untrusted.loads(out) if code == 0 else None
    except (ValueError, RecursionError):
        return None


def _zone(text: str) -> float:
    match = re.fullmatch(r"([+-])(\d\d)(\d\d)", text.strip())
    seconds = int(match[2]) * 3600.0 + int(match[3]) * 60 if match else 0.0
    return -seconds if match and match[1] == "-" else seconds


def words(text: str) -> str:
    """Return a tool's words on one line, cut where they are too long to be shown."""
    return untrusted.plain(" ".join(text.split()))[:300]


def line_times(log: Log, now: float) -> list[float | None]:
    """Return when each line was written, in seconds since 1970; one that does not say so has the
    time of the line above it.
    """
    times: list[float | None] = []
    last: float | None = None
    for place, line in enumerate(log.lines):
        stamp = log.stamps.get(place)
        written = parse_time(line, log.zone, now) if stamp is None else parse_time(stamp, 0.0, now)
        last = last if written is None else written
        times.append(last)
    return times


def parse_time(text: str, zone: float, now: float) -> float | None:
    """Read the first time in a text; `zone` is how far one without a zone is ahead of UTC, `now`
    says which year it is.
    """
    try:
        if match := _FULL.search(text):
            when = (
                datetime.fromisoformat(f"{match[1]}T{match[2]}")
                .replace(tzinfo=timezone.utc)
                .timestamp()
            )
            when -= _offset(match[3]) if match[3] else zone
            # Docker's word for never is the year 1; nobody writes tomorrow.
            return when if 0 < when <= now + _DAY else None
        if match := _SHORT.search(text):
            year = datetime.fromtimestamp(now, timezone.utc).year
            when = _short(match, year) - zone
            return when if when <= now + _DAY else _short(match, year - 1) - zone
    except (ValueError, OverflowError, OSError):
        return None
    return None


def _short(match: re.Match[str], year: int) -> float:
    month, day, hour, minute, second = (int(each) for each in match.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()


def _offset(text: str) -> float:
    if text == "Z":
        return 0.0
    digits = text[1:].replace(":", "")
    span = timedelta(hours=int(digits[:2]), minutes=int(digits[2:])).total_seconds()
    return span if text[0] == "+" else -span


def format_time(at: float) -> str:
    """Return a time as a log would have it."""
    try:
        return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


def ask_diagnosis(
    docker: Argv,
    *,
    mark: str,
    cluster: str,
    state_dir: str,
    hf_home: str = "",
    parts: tuple[str, ...] = DIAGNOSIS,
    lines: int = 2000,
    size: int = 500_000,
    since: float | None = None,
) -> Argv:
    """Ask a node for some parts; it changes nothing.

    Args:
        docker: what starts docker there.
        mark: begins the lines between parts; nobody may be able to guess it.
        cluster: whose containers.
        state_dir: where the launcher's folder is on the node, when not in the login's home.
        hf_home: the Hugging Face home, for models that are not finished.
        parts: what to tell; the containers' states always come.
        lines: the last of each log.
        size: bytes of each log, at most.
        since: seconds that the containers' logs go back, or all of it.
    """
    back = "" if since is None else f"{since:.0f}s"
    return (
        "sh",
        "-c",
        shell.program("diagnosis"),
        "doctor",
        mark,
        cluster,
        state_dir,
        hf_home,
        str(lines),
        str(size),
        back,
        " ".join(parts),
        shell.program("diagnosis_inside"),
        *docker,
    )
