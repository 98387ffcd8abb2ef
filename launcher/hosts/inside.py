"""The view of a container that will serve: asked in the one that runs, or in a throw-away one with
the same rights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from launcher.core import decode
from launcher.core.domain import Answer, Argv
from launcher.tools import agent_queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A container's view.

    `memlock` is in bytes (`None`: no limit, or not known), `ipc_lock` whether it has the capability
    IPC_LOCK, `libibverbs` the library's path; what is not there is empty.
    """

    python: str
    memlock: int | None = None
    memlock_unlimited: bool = False
    ipc_lock: bool | None = None
    infiniband: tuple[str, ...] = ()
    imex: tuple[str, ...] = ()
    libibverbs: decode.Text = ""
    ray: Annotated[str, decode.Or("")] = ""  # a package that is broken has no version
    error: decode.Text = ""


def look() -> Argv:
    """Print what a container sees, as one JSON object (`hosts/node/inside.py`); to be run inside
    it, with the image's Python.
    """
    return ("python3", "-c", agent_queries.source("inside"))


def parse_look(answer: Answer) -> Inside:
    """Read the answer. A container that cannot be asked is a fact as well: its words are in
    `error`.

    Raises UnreadableAnswer when it answered, but not with what was asked.
    """
    if not answer.ok:
        return Inside(python="", error=answer.tail or f"exit status {answer.code}")
    line = answer.out.strip().rpartition("\n")[2]
    return decode.read(Inside, line, "the container's answer")
