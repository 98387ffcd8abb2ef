"""Known causes of errors of commands and servers, from their output."""

import re
from dataclasses import dataclass

from launcher.core import untrusted
from launcher.core.errors import NodeError
from launcher.failures.frames import split_lines
from launcher.failures.match import first_failure

_LINE = 400  # characters
# Downloads are optional or repeated, libraries go on after most of their warnings, but Ray logs a
# lost node in plain words.
_RAISED = re.compile(r"(?:Error|Exception)\b|\bERROR \d\d-\d\d |error: ")
_WARNING = re.compile(r"\b(?:WARNING|INFO|DEBUG) \d\d-\d\d \d\d:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Known failure in a text, with its line.

    `fatal` ones do not resolve by waiting; `vague` ones are effects; `batch` is the fix in a batch
    job.
    """

    id: str
    line: str
    cause: str
    fix: str
    fatal: bool
    vague: bool
    batch: str


def explain(text: str, *, mode: str = "*") -> Explanation | None:
    """Return the most likely known failure in an output or a log; `mode` is of a batch job."""
    # Only the end of the log and the start of long lines are searched, which bounds the time.
    bounded = untrusted.truncate(text, last=True)
    lines = [line for raw in split_lines(bounded) if (line := untrusted.sanitize(raw))]
    match = first_failure(lines, mode=mode)
    if match is None:
        return None
    line, failure = lines[match.line], match.failure
    is_raised = bool(_RAISED.search(line)) and not _WARNING.search(line)
    return Explanation(
        id=failure.id,
        line=line.strip()[:_LINE],
        cause=match.cause,
        fix=match.choose_fix(),
        fatal=(
            failure.kind != "possible"
            and failure.layer != "hub"
            and (is_raised or failure.layer == "ray")
        ),
        vague=failure.kind == "effect",
        batch=match.choose_fix(mode=mode),
    )


def docker_error(node: str, text: str) -> NodeError | None:
    """Return the error of a node whose Docker client failed with a known cause."""
    failure = explain(text)
    if failure is None or not failure.id.startswith("docker-"):
        return None
    return NodeError(node, failure.cause, evidence=text, hint=failure.fix)
