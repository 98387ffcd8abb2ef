"""Commands for `batch/desk.py`, which manages job folders on the head, and parsers of its answers.

The head is not trusted with paths: only names that this program would give are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from launcher.batch.driver.progress import Progress, parse_progress, to_line
from launcher.batch.folder import is_output
from launcher.core import decode, untrusted
from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer
from launcher.tools.follow import log_lines
from launcher.tools.site import serving_judges

_PROGRAM = ("python3", "/opt/vlaunch/batch.pyz")
_MAX_BYTES = 2**53  # bytes; larger than any disk
# A driver's files may be of another version: invalid values become defaults.
_Sentence = Annotated[str, decode.Validator(to_line), decode.Default("")]
_Object = Annotated[Mapping[str, Any], decode.Default({})]
_Size = Annotated[int, decode.in_range(0, _MAX_BYTES), decode.DROP_INVALID]


def build_command(verb: str, *arguments: str, **options: object) -> Argv:
    """Return a command for the program, with `--name VALUE` for each nonempty option."""
    flags = (
        argument
        for name, value in options.items()
        if value != ""
        for argument in (f"--{name}", str(value))
    )
    return (*_PROGRAM, verb, *arguments, *flags)


def outputs_file(work: str) -> str:
    """Return the file list that the verb `outputs` writes."""
    return f"{work}/outputs.json"


def output_file(work: str, output: OutputFile) -> str:
    """Return the path of a committed file in the head's container."""
    return f"{work}/output/{output.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A job's folder on the head.

    `alive`: a driver holds its lock; `inputs`: sizes of shipped files; `written` is False only if
    no row of it is in a file. A listed job has neither `job` nor `inputs`.
    """

    name: _Sentence = ""
    absent: bool = False
    job: _Object = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    alive: Annotated[bool, decode.Default(False)] = False
    inputs: Annotated[Mapping[str, _Size], decode.Default({})] = field(default_factory=dict)
    written: Annotated[bool, decode.Default(True)] = True

    @property
    def digest(self) -> str:
        """Digest of the stored job's identity; empty when it was never prepared."""
        return to_line(self.job.get("digest"))

    @property
    def identity(self) -> Mapping[str, Any]:
        """Identity of the stored job."""
        identity = self.job.get("identity")
        return identity if isinstance(identity, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A committed output file on the head; `path` is relative and validated."""

    path: str
    bytes: Annotated[int, decode.in_range(0, _MAX_BYTES)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _OutputList:
    files: tuple[OutputFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdate:
    """One update on a running job: Ray's status, the driver's progress and new log lines."""

    status: str
    message: str = ""
    exit_code: int | None = None
    progress: Progress = field(default_factory=Progress)
    lines: tuple[str, ...] = ()
    offset: int = 0


def parse_entry(answer: Answer) -> JobEntry:
    """Parse the answer to `look`; raises UnreadableAnswer."""
    payload = parse_answer(answer)
    return JobEntry(absent=True) if payload.get("absent") else _build_entry(payload)


def parse_list(answer: Answer) -> tuple[JobEntry, ...]:
    """Parse the answer to `list`; raises UnreadableAnswer."""
    rows = parse_answer(answer).get("jobs")
    if not isinstance(rows, list):
        raise UnreadableAnswer(
            f"{answer.node}: cannot read the list of batch jobs", evidence=answer.tail
        )
    entries = [_build_entry(item) for item in rows if isinstance(item, dict)]
    # Folders with other names, such as manual ones, are not jobs.
    return tuple(entry for entry in entries if serving_judges.BATCH_NAME.fullmatch(entry.name))


def parse_outputs(node: str, text: str) -> tuple[OutputFile, ...]:
    """Parse the list of committed files.

    Raises UnreadableAnswer, also for a path outside a job's output.
    """
    files = decode.parse_json(_OutputList, text, f"{node}: the list of output files").files
    paths = [file.path for file in files]
    if unknown := [path for path in paths if not is_output(path)]:
        raise UnreadableAnswer(
            f"{node}: lists an output file that no vlaunch job writes; nothing was fetched",
            evidence=repr(unknown[0])[:200],
        )
    if len(set(paths)) < len(paths):
        raise UnreadableAnswer(
            f"{node}: lists an output file twice", evidence=untrusted.excerpt(text)
        )
    return files


def parse_follow(answer: Answer) -> JobUpdate:
    """Parse the answer to `follow`; raises UnreadableAnswer."""
    payload = parse_answer(answer)
    job, offset = payload.get("job"), payload.get("offset")
    if (
        not isinstance(job, dict)
        or not job.get("status")
        or type(offset) is not int
        or not 0 <= offset < _MAX_BYTES
    ):
        reason = to_line(payload.get("error")) or "Ray did not report the job's state"
        raise UnreadableAnswer(f"{answer.node}: {reason}", evidence=answer.tail)
    code, log = job.get("driver_exit_code"), payload.get("log")
    log = log if isinstance(log, str) else ""
    return JobUpdate(
        status=to_line(job.get("status")),
        message=to_line(job.get("message")),
        exit_code=code if type(code) is int else None,
        progress=parse_progress(payload.get("progress")),
        lines=log_lines(log),
        offset=offset,
    )


def parse_answer(answer: Answer) -> dict[str, Any]:
    """Parse the program's JSON object; raises UnreadableAnswer, also for its own `error`."""
    try:
        payload = untrusted.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        payload = None
    if not isinstance(payload, dict):
        raise UnreadableAnswer(
            f"{answer.node}: the head container did not respond", evidence=answer.tail
        )
    if "error" in payload and "job" not in payload:
        raise UnreadableAnswer(
            f"{answer.node}: {to_line(payload['error'])}", evidence=to_line(payload["error"])
        )
    return payload


def _build_entry(payload: Mapping[str, Any]) -> JobEntry:
    entry = decode.validate(JobEntry, {**payload, "absent": False, "progress": {}}, "a batch job")
    return replace(entry, progress=parse_progress(payload.get("progress")))
