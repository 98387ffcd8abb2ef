"""Errors, warnings and stops in a log without a known failure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher import upstream
from launcher.agent.cause import find_exception
from launcher.failures.frames import strip_frame
from launcher.tools import vllm

# Errors of libraries, the kernel, Docker, shells and programs that end: most precede the exception
# that follows from them.
_ERROR = re.compile(
    r"CCL WARN |\bUCX +(?:ERROR|FATAL)|NVRM: Xid|Error response from daemon|OCI runtime \w+ failed"
    r"|nvidia-container-cli: |: (?:command )?not found$|error while loading shared libraries"
    r"|symbol lookup error|fatal error: |^Killed$"
    r"|^(?:docker|podman|fatal|error|panic)\b[^:]*: (?!\s*Traceback)"
    r"|Segmentation fault|\bAborted\b|Bus error|terminate called|Check failed|CUDA error"
    r"|core dumped|\blevel=(?:error|fatal)|\bexit(?:ed)? .{0,20}\b137\b|errors? detected"
    rf"|{upstream.text('vllm.died-unexpectedly')}",
    re.IGNORECASE,
)
# Words of other errors, in lines that are no mere information or warning.
_WORD = re.compile(
    r"\b(?:errors?|failed|failure|fatal|timed out|refused|unable to|cannot|could not|killed"
    r"|abort\w*|denied|mismatch|unreachable|died|undefined symbol|incompatible|not enough"
    r"|insufficient|less than desired)\b",
    re.IGNORECASE,
)
_MILD = re.compile(
    r"\b(?:INFO|WARN|WARNING|DEBUG|TRACE)\b|level=(?:info|warn|debug)|\[W\d{4} "
    r"|\[\d{4}-\S+ \S+ [WID] \d+ \d+\]|^\[state-dump\]"  # Ray
    # Statistics, and what did not happen.
    r"|\b(?:errors?|failed|failures?|killed|mismatch\w*|aborted)\b[^:=]{0,20}[:=] ?0\b"
    r"|\b(?:0|no|without) (?:\w+ )?(?:errors?|failures?|mismatch\w*)\b"
    r"|^\s*#",
    re.IGNORECASE,
)
# Lines that are no errors, however they sound: information, Python's warnings, and what is harmless
# (a host without Kubernetes or InfiniBand, a driver that was built on the host, a pull).
_INFORMATION = re.compile(
    r"\b(?:INFO|DEBUG) \d\d-\d\d |\[\d{4}-\S+ \S+ [ID] \d+ \d+\]"
    r"|: [A-Z]\w+Warning: |warnings\.warn\(|failed to load cni during init"
    r"|Failed to open libibverbs|module verification failed|Unable to find image '"
)
# Words of lines worth a look in a log without an error.
_SUSPECT = re.compile(
    rf"\bWARN(?:ING)?\b|{_WORD.pattern}"
    r"|\bno(?:t|n-existent)? (?:such|data|found|support\w*|avail\w*|ready|exist|open\w*|match)"
    r"|\b(?:does|did|could|can|will) ?n[o']t\b|\btoo (?:small|large|many|few|long)\b"
    r"|\b(?:missing|unsupported|invalid|unavailable|lost|exceed\w*|expired|reject\w*|unhealthy"
    r"|disabled|fall\w*[ -]?back|retry\w*|BackOff|NotReady|Pending)\b",
    re.IGNORECASE,
)
_FRAME = re.compile(r'\s*File "[^"]+", line \d+, in ')
_TRACEBACK = 100  # lines
_READY = re.compile(vllm.API_READY)
# A stop on purpose, whose effects are no symptoms, and the next start in the same log.
_STOP_OR_START = re.compile(
    r"(\*\*\* SIGTERM received|\[shutdown\] API server: |^INFO: +Shutting down$|^\^C"
    r"|Sending SIG(?:INT|TERM) to)"
    rf"|{upstream.text('vllm.engine-start')}|vlaunch agent: starting the engine"
)


@dataclass(frozen=True, slots=True)
class LogError:
    """Error in a log: the index of its first line, its text, and the last line of the traceback
    before it, which shows the code that raised it.
    """

    line: int
    text: str
    origin: str = ""


def find_first_error(lines: Sequence[str], *, words: bool) -> LogError | None:
    """Return the first error after the last start; `None` if there is none. With `words`, a line
    that only sounds like an error is one, too.
    """
    ready = [index for index, line in enumerate(lines) if _READY.search(line)]
    start = ready[-1] + 1 if ready else 0
    framed = lines[start:]
    certain = (next(_matching_lines(framed, _ERROR), None), _find_raised(framed))
    errors = [error for error in certain if error is not None]
    first = min(errors, key=lambda error: error.line, default=None)
    if first is None and words:
        first = _find_by_words(framed)
    return first and replace(first, line=start + first.line)


def _matching_lines(lines: Sequence[str], pattern: re.Pattern[str]) -> Iterator[LogError]:
    """Yield the lines whose text matches, except mere information."""
    for at, line in enumerate(lines):
        if not _INFORMATION.search(line) and pattern.search(text := strip_frame(line)):
            yield LogError(at, text)


def _find_raised(lines: Sequence[str]) -> LogError | None:
    """Return the exception of a log, with the last line of code in its traceback."""
    raised = find_exception(lines)
    if raised is None:
        return None
    traceback = [strip_frame(line) for line in lines[: raised.last + 1][-_TRACEBACK:]]
    origins = [line for line in traceback if _FRAME.match(line)]
    return LogError(raised.first, raised.text, origins[-1] if origins else "")


def _find_by_words(lines: Sequence[str]) -> LogError | None:
    """Return the first line that sounds like an error, outside of stops on purpose."""
    shutdowns = find_shutdowns(lines)
    for error in _matching_lines(lines, _WORD):
        in_shutdown = any(error.line in numbers for numbers in shutdowns)
        if not in_shutdown and not _MILD.search(lines[error.line]):
            return error
    return None


def find_suspect(lines: Sequence[str]) -> LogError | None:
    """Return the first line that may matter in a log without an error: a warning, or less."""
    suspects = (at for at, line in enumerate(lines) if _SUSPECT.search(line))
    return next((LogError(at, strip_frame(lines[at])) for at in suspects), None)


def find_shutdowns(lines: Sequence[str]) -> list[range]:
    """Return the ranges of lines between a stop on purpose and the next start."""
    ranges, stopped_at = list[range](), -1
    for number, line in enumerate(lines):
        if (match := _STOP_OR_START.search(strip_frame(line))) is None:
            continue
        if match[1]:
            stopped_at = number if stopped_at < 0 else stopped_at
        elif stopped_at >= 0:
            ranges.append(range(stopped_at, number))
            stopped_at = -1
    return ranges if stopped_at < 0 else [*ranges, range(stopped_at, len(lines))]
