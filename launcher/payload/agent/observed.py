"""A server as it is: what the keeper writes beside `desired.json`, and the launcher reads.

All times are seconds since 1970 unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import records

VERSION = 2
# waiting: for nodes, GPUs, or Ray. starting: the engine runs and has not answered. ready: it has.
# stopping: it is being ended. pausing: until the next start. failed: its first start ended.
# gave-up: no restart is left. stopped: nobody wants it.
STATES = ("waiting", "starting", "ready", "stopping", "pausing", "failed", "gave-up", "stopped")
OVER = ("failed", "gave-up", "stopped")
FAULTS = 20  # that are kept
EVIDENCE = 4000  # characters of one fault's


@dataclass(kw_only=True)
class Fault:
    """Why an engine was ended or had ended.

    `cause` is the engine's first error, empty where it gave none; `lost` is how many requests were
    lost, None where nobody knows. `phases` has how many seconds later its engine was stopped, the
    cluster whole, and the engine started again, `pause` for how long the restart was put off.
    """

    at: float
    what: str
    cause: str = ""
    node: str = ""
    rank: str = ""
    evidence: str = ""
    lost: int | None = None
    pause: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    ready_again_after: float | None = None

    @property
    def summary(self) -> str:
        """What happened, and its cause where one is known."""
        return f"{self.what}: {self.cause}" if self.cause else self.what


@dataclass(frozen=True, kw_only=True)
class Load:
    """What vLLM counts: requests that run and that wait, and tokens per second since the last
    look.
    """

    running: int
    waiting: int
    tokens_per_s: float = 0.0


@dataclass(kw_only=True)
class Observed:
    """How a server is.

    `answered` and `seconds` are of the last canary that came back, `asking` is for how many seconds
    the present one has been on its way, `still` for how many seconds nothing at all has moved.

    `doing` says what is being done or waited for, `warning` what is odd about a server that is
    ready. `restarts` are the times of restarts, `restarts_left` is None where any number is
    allowed, `next_start` is when a pause ends. `first_start` is how many seconds the first start
    took; a server with none has never answered. `ranks` has what each node holds, `task` is
    what the model does (`task.py`), empty until it has answered.
    """

    name: str
    id: str
    asked: float
    model: str = ""
    state: str = "waiting"
    doing: str = ""
    warning: str = ""
    since: float = 0.0
    written: float = 0.0
    generation: int = 0
    ready_at: float | None = None
    first_start: float | None = None
    answered: float | None = None
    seconds: float | None = None
    asking: float = 0.0
    still: float = 0.0
    load: Load | None = None
    task: str = ""
    next_start: float | None = None
    restarts: list[float] = field(default_factory=list)
    restarts_left: int | None = None
    streak: int = 0
    fault_count: int = 0
    faults: list[Fault] = field(default_factory=list)
    ranks: dict[str, list[str]] = field(default_factory=dict)
    alive: dict[str, dict[str, bool]] = field(default_factory=dict)
    container: str = ""
    version: int = VERSION

    @property
    def last_fault(self) -> Fault | None:
        """The newest of its faults; None where it had none."""
        return self.faults[-1] if self.faults else None

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


def read(said: Any) -> Observed:
    """Read plain data; raises ValueError when it is no record of this version.

    Fields that are not known here are left out, so that an older launcher shows what it knows.
    """
    if not isinstance(said, Mapping) or said.get("version") != VERSION:
        raise ValueError("this is no record of a server")
    if said.get("state") not in STATES:
        raise ValueError(f"`state` is {said.get('state')!r:.80}")
    return records.read(Observed, said, "record of a server")
