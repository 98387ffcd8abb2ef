"""The form of what the head's agent and `batch/desk.py` answer.

Whoever reads such an answer takes it for granted, so it is looked at once, here; what is not named
here is left to who asked for it.

The rows of Ray's own tables are read by `tools/ray.py` and `tools/serving_judges.py`, and what the
keeper of servers wrote by `tools/servers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.core import decode
from launcher.core.decode import Whole


@dataclass(frozen=True, kw_only=True)
class _Job:
    submission_id: str | None = None
    job_id: str | None = None
    status: str | None = None
    message: str | None = None
    metadata: Mapping[str, str] | None = None
    driver_exit_code: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class _ListedJob(_Job):
    submission_id: str = field()  # else it would have the default of the class before it
    status: str = field()


@dataclass(frozen=True, kw_only=True)
class _Counters:
    status: Whole
    text: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _Said:
    error: str = ""
    status: Whole | str | None = None
    unreachable: tuple[str, ...] = ()
    listening: bool = False
    log: str = ""
    offset: Whole = 0
    submission_id: str = ""
    killed: Whole = 0
    left: tuple[Whole, ...] = ()
    job: _Job = _Job()
    jobs: tuple[_ListedJob, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()
    actors: tuple[Mapping[str, Any], ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()
    apis: Mapping[str, _Counters] = field(default_factory=dict)


def check(said: Mapping[str, Any], whose: str) -> None:
    """Raise UnreadableAnswer for a field that is not what it should be."""
    decode.fit(_Said, said, whose)
