"""What we say to `payload/desk.py`, which keeps the folders of batch jobs on the head, and how we
read what it answers.

The head's word is not trusted with paths: only names that this program itself would give are taken
from it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv
from launcher.tools import untrusted

_PROGRAM = ("python3", "/opt/vlaunch/desk.py")
# What the metadata of a batch's Ray job tells a later run.
NAME, GPUS = "vlaunch.batch", "vlaunch.gpus"
# What a job's output consists of: nothing else is fetched, and nothing else on this machine is ever
# replaced or removed.
OUTPUT = re.compile(
    r"rows/part-\d{6,12}\.(?:parquet|jsonl)|errors/part-\d{6,12}\.jsonl|summary\.json", re.ASCII
)
# what a page may begin with: a file of the ledger
_PAGE = re.compile(r"part-\d{6,12}\.json", re.ASCII)
_JOB = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?", re.ASCII)
OVER = ("done", "failed", "refused", "stopped")
_LARGEST = 2**53  # bytes of a file, of which no disk has as many
_WARNINGS = 50
_TEXT = 4000  # characters of a sentence that came from the head


def named(metadata: Mapping[str, Any]) -> str:
    """Return the name of a batch that a Ray job's metadata give; empty for a name that no job of
    ours has.
    """
    name = metadata.get(NAME)
    return name if isinstance(name, str) and _JOB.fullmatch(name) else ""


def list_(*roots: str) -> Argv:
    """Ask for every job below folders."""
    return (*_PROGRAM, "list", *roots)


def look(work: str) -> Argv:
    """Ask for one job."""
    return (*_PROGRAM, "look", work)


def put(work: str, path: str, offset: int, last: str = "") -> Argv:
    """Append standard input to a file that is on its way; `last` is the sha256 of all of it, and
    makes it whole.
    """
    return (
        *_PROGRAM,
        "put",
        work,
        path,
        "--offset",
        str(offset),
        *(("--last", last) if last else ()),
    )


def prepare(work: str) -> Argv:
    """Write `job.json` from standard input."""
    return (*_PROGRAM, "prepare", work)


def outputs(work: str, start: str = "") -> Argv:
    """Ask for the files that are committed, with sizes and sha256: one page of them, which begins
    at `start`.
    """
    return (*_PROGRAM, "outputs", work, *(("--from", start) if start else ()))


def get(work: str, path: str, offset: int, count: int) -> Argv:
    """Ask for a piece of an output file."""
    return (*_PROGRAM, "get", work, path, "--offset", str(offset), "--bytes", str(count))


def remove(work: str) -> Argv:
    """Remove a job's folder and its output, unless its driver lives."""
    return (*_PROGRAM, "remove", work)


def follow(work: str, job: str, offset: int, dashboard: int) -> Argv:
    """Ask how a running job stands, and what its log gained since `offset` bytes."""
    return (
        *_PROGRAM,
        "follow",
        work,
        "--job",
        job,
        "--offset",
        str(offset),
        "--dashboard",
        str(dashboard),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a driver ended, in its own words."""

    message: str
    evidence: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is, as its driver wrote it down last.

    `rows` of None: the input has not been counted yet.
    """

    state: str = ""
    text: str = ""
    submission: str = ""
    started: float = 0.0
    updated: float = 0.0
    rows: int | None = None
    done: int = 0
    errors: int = 0
    before: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    eta: float | None = None
    ready: int = 0
    wanted: int = 0
    restarts: int = 0
    warnings: tuple[str, ...] = ()
    error: Trouble | None = None

    @property
    def over(self) -> bool:
        """True when the driver wrote down its own end."""
        return self.state in OVER

    @property
    def accounted(self) -> int:
        """Rows that have an answer or an error row."""
        return self.done + self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A job's folder on the head.

    `alive` means that a driver holds its lock; `inputs` are shipped files with their sizes.

    `written` is False when it is known that no row of it is in a file. Of a job in a list `job`,
    `summary` and `inputs` are not told.
    """

    name: str = ""
    absent: bool = False
    job: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    summary: Mapping[str, Any] = field(default_factory=dict)
    alive: bool = False
    inputs: Mapping[str, int] = field(default_factory=dict)
    written: bool = True

    @property
    def digest(self) -> str:
        """The digest of the identity of the job there; empty when it was never prepared."""
        return _text(self.job.get("digest"))

    @property
    def identity(self) -> Mapping[str, Any]:
        """What may not change between runs of the job there."""
        return _object(self.job.get("meaning"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A committed file of a job's output, on the head; `path` is relative and one of ours."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdate:
    """One look at a running job: Ray's word on its process, the driver's own progress, and new
    lines of its log.
    """

    status: str
    message: str = ""
    exit_code: int | None = None
    progress: Progress = field(default_factory=Progress)
    lines: tuple[str, ...] = ()
    offset: int = 0


def parse_entry(answer: Answer) -> Entry:
    """Read the answer to `look`; raises UnreadableAnswer."""
    said = parse(answer)
    return Entry(absent=True) if said.get("absent") else _entry(said)


def parse_list(answer: Answer) -> tuple[Entry, ...]:
    """Read the answer to `list`; raises UnreadableAnswer."""
    said = parse(answer).get("jobs")
    if not isinstance(said, list):
        raise UnreadableAnswer(
            f"{answer.node}: the list of batch jobs cannot be read", evidence=answer.tail
        )
    found = [_entry(each) for each in said if isinstance(each, dict)]
    # A folder of another name, or one that somebody made by hand, is no job of ours.
    return tuple(each for each in found if _JOB.fullmatch(each.name))


def parse_outputs(answer: Answer) -> tuple[tuple[Output, ...], str]:
    """Read the answer to `outputs`: files, and where the next page begins, if there is one.

    Raises UnreadableAnswer, also for a path that no output of ours has.
    """
    said = parse(answer)
    after = said.get("next", "")
    try:
        found = tuple(
            Output(path=each["path"], bytes=each["bytes"], sha256=each["sha256"])
            for each in said.get("files") or ()
        )
    except (KeyError, TypeError):
        raise UnreadableAnswer(
            f"{answer.node}: the list of output files cannot be read", evidence=answer.tail
        ) from None
    if not _is_page(after):
        raise UnreadableAnswer(
            f"{answer.node}: the list of output files cannot be read",
            evidence=untrusted.shown(after),
        )
    for each in found:
        if not _is_ours(each):
            raise UnreadableAnswer(
                f"{answer.node}: names an output file that no job of vlaunch writes; nothing of it"
                " was taken",
                evidence=repr(each.path)[:200],
            )
    if len({each.path for each in found}) < len(found):
        raise UnreadableAnswer(
            f"{answer.node}: names an output file twice", evidence=answer.tail[:300]
        )
    return found, after


def _is_page(after: object) -> TypeGuard[str]:
    return isinstance(after, str) and (not after or _PAGE.fullmatch(after) is not None)


def _is_ours(output: Output) -> bool:
    """True for a file as jobs of vlaunch write it; what a node names can be of any type."""
    path = isinstance(output.path, str) and OUTPUT.fullmatch(output.path) is not None
    size = type(output.bytes) is int and 0 <= output.bytes < _LARGEST
    return path and size and isinstance(output.sha256, str)


def parse_piece(answer: Answer) -> tuple[bytes, int]:
    """Read the answer to `get`: bytes, and how many the whole file has; raises UnreadableAnswer."""
    said = parse(answer)
    try:
        return base64.b64decode(said["data"], validate=True), int(said["size"])
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        raise UnreadableAnswer(f"{answer.node}: a piece of the output cannot be read") from None


def parse_follow(answer: Answer) -> JobUpdate:
    """Read the answer to `follow`; raises UnreadableAnswer."""
    said = parse(answer)
    job, offset = said.get("job"), said.get("offset")
    if (
        not isinstance(job, dict)
        or not job.get("status")
        or type(offset) is not int
        or not 0 <= offset < _LARGEST
    ):
        raise UnreadableAnswer(
            f"{answer.node}: {_text(said.get('error')) or 'Ray does not say how the job stands'}",
            evidence=answer.tail,
        )
    code, log = job.get("driver_exit_code"), said.get("log")
    log = log if isinstance(log, str) else ""
    return JobUpdate(
        status=_text(job.get("status")),
        message=_text(job.get("message")),
        exit_code=code if type(code) is int else None,
        progress=parse_progress(said.get("progress")),
        lines=tuple(each for each in re.split(r"[\r\n]+", untrusted.cut(log)) if each.strip()),
        offset=offset,
    )


def parse_progress(said: object) -> Progress:
    """Read a driver's progress as it was written; what has no sense is left at its default."""
    given = _object(said)
    replicas, error, warnings = (
        _object(given.get("replicas")),
        _object(given.get("error")),
        given.get("warnings"),
    )
    warnings = warnings if isinstance(warnings, list) else []
    said_rows, eta = given.get("rows"), given.get("eta")
    return Progress(
        state=_text(given.get("state")),
        text=_text(given.get("text")),
        submission=_text(given.get("submission")),
        started=_number(given.get("started")),
        updated=_number(given.get("updated")),
        rows=None if said_rows is None else _count(said_rows),
        done=_count(given.get("done")),
        errors=_count(given.get("errors")),
        before=_count(given.get("before")),
        tokens_in=_count(given.get("tokens_in")),
        tokens_out=_count(given.get("tokens_out")),
        rows_per_second=_number(given.get("rows_per_second")),
        tokens_per_second=_number(given.get("tokens_per_second")),
        eta=None if eta is None else _number(eta),
        ready=_count(replicas.get("ready")),
        wanted=_count(replicas.get("wanted")),
        restarts=_count(given.get("restarts")),
        warnings=tuple(_text(each) for each in warnings[-_WARNINGS:] if isinstance(each, str)),
        error=(
            Trouble(
                message=_text(error.get("message")),
                evidence=_lines(error.get("evidence")),
                hint=_lines(error.get("hint")),
            )
            if error
            else None
        ),
    )


def parse(answer: Answer) -> dict[str, Any]:
    """Read the one JSON object that the program prints; raises UnreadableAnswer, also for its own
    `error`.
    """
    try:
        said = untrusted.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = None
    if not isinstance(said, dict):
        raise UnreadableAnswer(
            f"{answer.node}: the head container gave no answer", evidence=answer.tail
        )
    if "error" in said and "job" not in said:
        raise UnreadableAnswer(
            f"{answer.node}: {_text(said['error'])}", evidence=_text(said["error"])
        )
    return said


def _entry(said: Mapping[str, Any]) -> Entry:
    job, inputs = _object(said.get("job")), _object(said.get("inputs"))
    return Entry(
        name=_text(said.get("name")),
        job=job,
        progress=parse_progress(said.get("progress")),
        summary=_object(said.get("summary")),
        alive=said.get("alive") is True,
        inputs={
            name: size
            for name, size in inputs.items()
            if isinstance(name, str) and type(size) is int and size >= 0
        },
        written=said.get("written") is not False,
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return " ".join(value.split())[:_TEXT] if isinstance(value, str) else ""


def _lines(value: object) -> str:
    if isinstance(value, list):
        value = "\n".join(each for each in value if isinstance(each, str))
    return value[:_TEXT].strip() if isinstance(value, str) else ""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    # No count and no time is as large; an integer may be too large even to be looked at.
    return float(value) if 0 <= value < 1e18 else 0.0


def _count(value: object) -> int:
    return int(_number(value))
