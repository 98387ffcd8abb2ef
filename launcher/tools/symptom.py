"""What a known failure is: a line that tells of it, its cause, what to do, and where it was met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A pattern, its cause and the fix; `id` is its heading in docs/reference/failures.md, and
    `source` the report or source code.

    `fatal` means that waiting any longer is of no use, `after` that it only tells that something
    else has failed before, and `rdma` that it means something only where the inventory promises
    RDMA. `batch` is the fix where it is a batch job's, and another one.
    """

    id: str
    pattern: str
    cause: str
    fix: str
    source: str
    fatal: bool = True
    after: bool = False
    rdma: bool = False
    batch: str = ""
