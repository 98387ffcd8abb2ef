"""Inspection of a serving container, or of a temporary one with the same rights."""

from dataclasses import dataclass
from typing import Annotated

from launcher.core import decode
from launcher.core.domain import Answer, Argv
from launcher.hosts.node import program_source

# Broken packages have no version.
_Version = Annotated[str, decode.Default("")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerView:
    """A container's view of itself; missing items are empty.

    `memlock` is in bytes (None: unlimited or unknown), `ipc_lock` the capability IPC_LOCK, `files`
    and `pids` the limits on open files and on threads (None: unlimited or unknown), `libibverbs`
    the library's path.
    """

    python: str
    memlock: int | None = None
    memlock_unlimited: bool = False
    ipc_lock: bool | None = None
    files: int | None = None
    pids: int | None = None
    infiniband: tuple[str, ...] = ()
    imex: tuple[str, ...] = ()
    libibverbs: decode.Text = ""
    ray: _Version = ""
    vllm: _Version = ""
    error: decode.Text = ""


def view_argv() -> Argv:
    """Return the argv for the image's Python that prints the view (`hosts/node/inside.py`)."""
    return ("python3", "-c", program_source("inside"))


def parse_view(answer: Answer) -> ContainerView:
    """Parse the view. A failed command is a result too, with its output in `error`.

    Raises UnreadableAnswer for unexpected output.
    """
    if not answer.ok:
        return ContainerView(python="", error=answer.tail or f"exit status {answer.code}")
    line = answer.out.strip().rpartition("\n")[2]
    return decode.parse_json(ContainerView, line, "the container's answer")
