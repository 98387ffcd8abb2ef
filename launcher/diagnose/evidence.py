"""First error of a log without a known failure."""

import re
from collections.abc import Sequence

from launcher import upstream
from launcher.agent.cause import find_exception
from launcher.failures.frames import strip_frame
from launcher.tools import vllm

# Errors of libraries, the kernel, Docker, shells and programs that end: most precede the exception
# that follows from them.
_ERROR = re.compile(
    r"CCL WARN |\bUCX +(?:ERROR|FATAL)|NVRM: Xid|Error response from daemon|OCI runtime \w+ failed"
    r"|nvidia-container-cli: |: (?:command )?not found$|error while loading shared libraries"
    r"|symbol lookup error|fatal error: |^(?:docker|podman|fatal|error|panic)\b[^:]*: |^Killed$"
    r"|Segmentation fault|\bAborted\b|Bus error|terminate called|Check failed|CUDA error"
    r"|core dumped|\blevel=(?:error|fatal)|\bexit(?:ed)? .{0,20}\b137\b|errors? detected"
    rf"|{upstream.text('vllm.died-unexpectedly')}",
    re.IGNORECASE,
)
# Words of other errors, in lines that are no mere information or warning.
_WORD = re.compile(
    r"\b(?:errors?|failed|failure|fatal|timed out|refused|unable to|cannot|could not|killed"
    r"|abort\w*|denied|mismatch|unreachable|died)\b",
    re.IGNORECASE,
)
_MILD = re.compile(
    r"\b(?:INFO|WARN|WARNING|DEBUG|TRACE)\b|level=(?:info|warn|debug)|\[W\d{4} ", re.IGNORECASE
)
_READY = re.compile(vllm.API_READY)


def find_first_error(lines: Sequence[str], *, words: bool) -> int | None:
    """Return the index of the first error after the last start; `None` if there is none. With
    `words`, a line that only sounds like an error is one, too.
    """
    ready = [index for index, line in enumerate(lines) if _READY.search(line)]
    start = ready[-1] + 1 if ready else 0
    rest = [strip_frame(line) for line in lines[start:]]
    errors = [index for index, line in enumerate(rest) if _ERROR.search(line)][:1]
    raised = find_exception(lines[start:])
    if raised is not None:
        errors.append(raised.first)
    if words and not errors:
        indices = (at for at, line in enumerate(rest) if _WORD.search(line))
        errors = [at for at in indices if not _MILD.search(lines[start + at])][:1]
    return start + min(errors) if errors else None
