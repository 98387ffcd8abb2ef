"""Type of a known failure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Known failure: the pattern of a log line, its cause and fix; `id` is its heading in
    docs/reference/failures.md, `source` the place of a report.

    `fatal` failures do not resolve by waiting, `after` ones are consequences of earlier failures,
    and `rdma` ones matter only if the inventory requires RDMA. `batch` is the fix for batch jobs,
    if different.
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
