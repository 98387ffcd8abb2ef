"""Query of a node for a diagnosis: containers, servers, logs, kernel messages and the supervisor's
records; the parser of its output, and the times of log lines.

The script only reads, and limits the size and duration of all parts: a node may have gigabytes of
logs, and reading them may hang. Lines with a mark that is random for each query separate the parts,
so that no log can imitate another part. The output may be truncated or contain anything; the parser
does not raise for that.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from launcher.agent import state
from launcher.core import shell, untrusted
from launcher.core.domain import Argv
from launcher.failures.frames import split_lines

# parts of the output
STATE, RECORD, MODELS, KERNEL = "state", "record", "models", "kernel"
INSPECT, ENGINES, LOGS, INSIDE = "inspect", "engines", "logs", "inside"
STACKS = "stacks"  # files of vLLM's watchdog: evidence to read, not searched for failures
DIAGNOSIS = (STATE, RECORD, MODELS, KERNEL, ENGINES, LOGS, INSIDE)
DRIVER = "job driver"  # title of the log of a batch job's driver
_ROLES = ("head", "worker", "front", "probe")
_FILES = ("desired", "observed", "history")
_NAMES = {"models": "models", "kernel": "kernel", "nccl": "NCCL", "driver": DRIVER}
_NAMES |= {"worker": "Ray worker", "ray": "Ray"}
_LINE = 1000  # characters searched per line: patterns can take more than linear time
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)\s?")
# `2026-11-21 20:14:02,123`, `2026-11-21T20:14:02.123456Z`, `2026-11-21T20:14:02,123456+00:00`,
# `…+0000`
_FULL = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:?\d\d)?")
# `INFO 11-21 20:14:02 [core.py:12]`, as vLLM writes it: without a year.
_SHORT = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_DAY = 86400.0
# Output and exit status; None where the output was truncated.
_PartOutput = tuple[str, int | None]
_Parts = Mapping[str, list[_PartOutput]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """State of a container; times are in Docker's format, `role` may be empty."""

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
    """Lines of a log, oldest first, without terminal codes.

    `part` is its part of the output, `title` its name for display. `stamps` has Docker's times by
    line number; `zone` is the offset of the log's own times from UTC in seconds.
    """

    part: str
    title: str
    lines: tuple[str, ...]
    stamps: Mapping[int, str] = field(default_factory=dict)
    zone: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Parsed output of a node; `gaps` has the unavailable parts with reasons.

    `supervisor_files` has the files `desired`, `observed` and `history` by server.
    """

    clock: float | None = None
    states: tuple[ContainerState, ...] = ()
    logs: tuple[Log, ...] = ()
    supervisor_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inspect: str = ""
    gaps: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """Total number of log lines."""
        return sum(len(log.lines) for log in self.logs)


def parse_report(text: str, mark: str) -> NodeReport:
    """Parse the output of a node; skips missing and invalid parts, and lists important ones in
    `gaps`.
    """
    parts = _split_parts(text, mark)
    states = tuple(_parse_states(_first_output(parts, "state")[0]))
    servers = _first_output(parts, "servers")[0].split()
    clock = _first_output(parts, "clock")[0].strip()
    return NodeReport(
        clock=float(clock) if re.fullmatch(r"\d{9,11}", clock) else None,
        states=states,
        logs=tuple(_logs(parts, states, servers)),
        supervisor_files={
            name: {
                file: content
                for file in _FILES
                if (content := _parse_json(parts, f"{file}-{number}")) is not None
            }
            for number, name in enumerate(servers, 1)
            if state.NAME.fullmatch(name)
        },
        inspect=_first_output(parts, "inspect")[0],
        gaps=_gaps(parts),
    )


def _first_output(parts: _Parts, name: str) -> _PartOutput:
    """Return the first output of a part; a failed one if it is missing."""
    return parts.get(name, [("", 1)])[0]


def _gaps(parts: _Parts) -> dict[str, str]:
    text, code = _first_output(parts, "ids")
    reason = shorten(text) or "the node did not list its containers"
    gaps = {} if code == 0 else {"containers": reason}
    if "kernel" in parts and _first_output(parts, "kernel")[1] != 0:
        gaps["kernel log"] = "only root can read it on this node"
    return gaps


def _logs(
    parts: _Parts, states: tuple[ContainerState, ...], servers: Sequence[str]
) -> Iterator[Log]:
    """Yield the logs that are not empty."""
    zone = _parse_zone(_first_output(parts, "zone")[0])
    for name, answers in parts.items():
        title = _log_title(name, states, servers)
        for out, _ in answers if title else ():
            log = make_log(name, title, out, zone)
            if log.lines:
                yield log


def _split_parts(text: str, mark: str) -> dict[str, list[_PartOutput]]:
    """Return the outputs of all parts by name.

    A truncated one has no exit status, and its last line may be incomplete.
    """
    parts: dict[str, list[_PartOutput]] = {}
    for piece in f"\n{text}".split(f"\n{mark} ")[1:]:
        name, _, body = piece.partition("\n")
        if match := re.fullmatch(r"rc (\d{1,3})", name.strip()):
            for answers in list(parts.values())[-1:]:
                if answers[-1][1] is None:
                    answers[-1] = (answers[-1][0], int(match[1]))
        elif re.fullmatch(r"[a-z]{1,12}(?:-\d{1,2})?", name.strip()):
            # Several containers use the same names; the most recent one must be last.
            answers = parts.pop(name.strip(), [])
            parts[name.strip()] = [*answers, (body.removesuffix("\n"), None)]
    return parts


def _log_title(name: str, states: tuple[ContainerState, ...], servers: Sequence[str]) -> str:
    kind, _, number = name.partition("-")
    index = int(number or 0) - 1
    if kind == "log" and number:
        role = states[index].role if 0 <= index < len(states) else ""
        return "probe container" if role == "probe" else "container"
    if kind in ("engine", "stacks"):
        name = servers[index] if 0 <= index < len(servers) else ""
        title = server_log_title(name) if state.NAME.fullmatch(name) else ""
        return f"stacks of {title}" if title and kind == "stacks" else title
    return _NAMES.get(kind, "")


def server_log_title(name: str) -> str:
    """Return the title of the log of a server's engine."""
    return f"server {name}"


def make_log(name: str, title: str, text: str, zone: float = 0.0) -> Log:
    """Create a log from its text; truncates lines to the length that is searched."""
    lines, stamps = list[str](), dict[int, str]()
    for raw in split_lines(untrusted.sanitize(text.replace("\r", "\n"))):
        line = raw if raw.isprintable() else untrusted.sanitize(raw)  # JSON hides codes
        if not line.strip():
            continue
        if name.startswith("log-") and (match := _STAMP.match(line)):
            stamps[len(lines)] = match[1] + match[2]
            line = line[match.end() :]
        lines.append(line[:_LINE])
    return Log(
        part=name,
        title=title,
        lines=tuple(lines),
        stamps=stamps,
        zone=0.0 if name.startswith("log-") else zone,
    )


def _parse_states(text: str) -> list[ContainerState]:
    errors = ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
    states = []
    for line in text.splitlines():
        with contextlib.suppress(*errors):
            raw = untrusted.loads(line)
            docker = raw["state"]
            states.append(
                ContainerState(
                    name=shorten(str(raw["name"]).lstrip("/")),
                    role=raw["role"] if raw["role"] in _ROLES else "",
                    status=shorten(str(docker["Status"])),
                    exit_code=int(docker.get("ExitCode") or 0),
                    oom=docker.get("OOMKilled") is True,
                    error=shorten(str(docker.get("Error") or "")),
                    started=str(docker.get("StartedAt") or ""),
                    finished=str(docker.get("FinishedAt") or ""),
                    restarts=int(raw.get("restarts") or 0),
                )
            )
    return states


def _parse_json(parts: _Parts, name: str) -> Any:
    out, code = _first_output(parts, name)
    try:
        return untrusted.loads(out) if code == 0 else None
    except (ValueError, RecursionError):
        return None


def _parse_zone(text: str) -> float:
    match = re.fullmatch(r"([+-])(\d\d)(\d\d)", text.strip())
    seconds = int(match[2]) * 3600.0 + int(match[3]) * 60 if match else 0.0
    return -seconds if match and match[1] == "-" else seconds


def shorten(text: str) -> str:
    """Return a tool's output on one line, truncated for display."""
    return untrusted.sanitize(" ".join(text.split()))[:300]


def line_times(log: Log, lines: Iterable[int], now: float) -> dict[int, float | None]:
    """Return the times of lines, by index, in seconds since 1970; lines without one inherit the
    time of the previous line.
    """
    times: dict[int, float | None] = {}
    before, last = -1, None
    for line in sorted(set(lines)):
        for index in range(line, before, -1):
            stamp = log.stamps.get(index)
            text, zone = (log.lines[index], log.zone) if stamp is None else (stamp, 0.0)
            if (written := parse_time(text, zone, now)) is not None:
                last = written
                break
        times[line] = last
        before = line
    return times


def parse_time(text: str, zone: float, now: float) -> float | None:
    """Parse the first time in a text; `zone` is the offset from UTC of times without a zone, `now`
    supplies a missing year.
    """
    try:
        if match := _FULL.search(text):
            seconds = (
                datetime.fromisoformat(f"{match[1]}T{match[2]}")
                .replace(tzinfo=timezone.utc)
                .timestamp()
            )
            seconds -= _utc_offset(match[3]) if match[3] else zone
            # Docker's value for "never" is the year 1; times in the future are invalid.
            return seconds if 0 < seconds <= now + _DAY else None
        if match := _SHORT.search(text):
            year = datetime.fromtimestamp(now, timezone.utc).year
            seconds = _parse_short_time(match, year) - zone
            return seconds if seconds <= now + _DAY else _parse_short_time(match, year - 1) - zone
    except (ValueError, OverflowError, OSError):
        return None
    return None


def _parse_short_time(match: re.Match[str], year: int) -> float:
    month, day, hour, minute, second = (int(group) for group in match.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()


def _utc_offset(text: str) -> float:
    if text == "Z":
        return 0.0
    digits = text[1:].replace(":", "")
    span = timedelta(hours=int(digits[:2]), minutes=int(digits[2:])).total_seconds()
    return span if text[0] == "+" else -span


def format_time(at: float) -> str:
    """Format a time as in logs."""
    try:
        return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


def query_diagnosis(
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
    """Query some parts of a node's state without changing anything.

    Args:
        docker: command prefix of docker on the node.
        mark: unguessable start of the lines between parts.
        cluster: its containers are queried.
        state_dir: parent of the launcher's folder on the node, unless in the user's home.
        hf_home: the Hugging Face home, for unfinished models.
        parts: parts to include; the containers' states are always included.
        lines: maximum number of lines per log, from the end.
        size: maximum number of bytes per log.
        since: age limit of containers' logs in seconds; None for all.
    """
    since_argument = "" if since is None else f"{since:.0f}s"
    return (
        "sh",
        "-c",
        shell.program_text("diagnosis"),
        "doctor",
        mark,
        cluster,
        state_dir,
        hf_home,
        str(lines),
        str(size),
        since_argument,
        " ".join(parts),
        shell.program_text("diagnosis_inside"),
        *docker,
    )
