"""Status of a server: the supervisor writes it beside `desired.json`, and the launcher reads it.

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
# gave-up: no restart is left. stopped: its spec was removed.
STATES = ("waiting", "starting", "ready", "stopping", "pausing", "failed", "gave-up", "stopped")
# Health, of a server that is ready, and of one that is not.
VERDICTS = (
    *("answering", "busy", "quiet", "suspect", "resting", "unknown"),
    *("waiting", "starting", "stopping", "recovering", "failed", "gave-up", "stopped"),
)
OVER = ("failed", "gave-up", "stopped")
MAX_FAULTS = 20  # in a record; the oldest is dropped
UNKNOWN = "rank unknown"
# characters of a fault's evidence; stacks of an engine that hung may add more
MAX_EVIDENCE, MAX_STACKS = 4000, 12_000


@dataclass(kw_only=True)
class Fault:
    """Reason why an engine was stopped or had exited.

    `cause` is the engine's first error, empty without one; `lost` the number of lost requests
    (None: unknown). `phases` has the seconds until its engine was `stopped`, the cluster `whole`
    (complete), and the engine `started` again, `pause` the delay of the restart.
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
        """The event, and its cause if known."""
        return f"{self.what}: {self.cause}" if self.cause else self.what


@dataclass(frozen=True, kw_only=True)
class Load:
    """Counters of vLLM: running and waiting requests, and tokens per second since the last one."""

    running: int
    waiting: int
    tokens_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FirstAnswer:
    """First answer of a model: of a completion its text and fingerprint, else a description
    (`came`).

    `refused` has the answers to requests of other tasks, if no task suits the model; `replicas` the
    seconds of each of several replicas.
    """

    model: str
    fingerprint: str = ""
    text: str = ""
    came: str = ""
    refused: str = ""
    task: str = ""
    seconds: float = 0.0
    replicas: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Last answer of a model that has refused all requests so far; status 0 without an answer."""

    status: int
    error: str
    task: str = ""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class EndpointHealth:
    """Verdict on one endpoint, its reason, and the duration of the last answer."""

    verdict: str
    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Wedge:
    """Place where an engine hangs, from two samples of all its ranks.

    `since` is the time of its last step, `frame` the rank's position; `rank` is empty if the
    samples do not name one. `stacks` are those of all ranks.
    """

    since: float
    rank: str = ""
    node: str = ""
    gpu: str = ""
    frame: str = ""
    observations: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)

    @property
    def location(self) -> str:
        """The hung rank, with its node, GPU and frame, or UNKNOWN."""
        gpu = f" (GPU {self.gpu})" if self.gpu else ""
        return f"rank {self.rank} on {self.node}{gpu} in {self.frame}" if self.rank else UNKNOWN

    @property
    def details(self) -> str:
        """The same without the rank and its node."""
        gpu = f" of GPU {self.gpu}" if self.gpu else ""
        return f"the rank{gpu} hung in {self.frame}" if self.rank else UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Wait for the requests in progress on a server that is to stop: since when (seconds since the
    host's boot), for how many seconds at most, and the nodes with its fronts.
    """

    since: float
    limit: float
    fronts: list[str]
    requests: int = 0

    @property
    def text(self) -> str:
        """Description for the status."""
        noun = "request" if self.requests == 1 else "requests"
        return f"draining: {self.requests} {noun} in progress"


@dataclass(kw_only=True)
class Observed:
    """The state of a server.

    `verdict` is the health of the server, `reason` the text behind it, `endpoints` the same by
    nodes with an API. While it is ready, the verdict is answering, busy (requests wait and steps
    end), quiet, suspect (no step ends), resting (paused, asleep or being scaled) or unknown (no
    agent can ask the API); else waiting, starting, stopping, recovering, failed, gave-up or
    stopped.

    `answered` and `seconds` are of the last canary that came back, `asking` is for how many seconds
    the present one has been on its way. `still` is for how many seconds no step counter has
    changed while a canary waits or fails, `longest_step` the longest such time that ended in
    progress, `wedge` where the engine hangs.

    `held` has what the KV caches behind each API hold, by its node, in the labels of vLLM's metric.

    `first_answer` is the model's first answer; until then the last refusal, or None.

    `resumes` is the state of an engine that may have outlived the head's agent, until its nodes
    have reported whether it runs.

    `draining` is set until its requests are finished, before it stops; `drained` while it gets no
    new ones because it hangs, or has `stopped` ranks, and another replica is ready.

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
    resumes: str = ""
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
    longest_step: float = 0.0
    verdict: str = "waiting"
    reason: str = ""
    wedge: Wedge | None = None
    endpoints: dict[str, EndpointHealth] = field(default_factory=dict)
    first_answer: FirstAnswer | Refusal | None = None
    held: dict[str, dict[str, str]] = field(default_factory=dict)
    load: Load | None = None
    draining: Drain | None = None
    drained: bool = False
    stopped: list[str] = field(default_factory=list)
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
        """The newest of its faults; None if there was none."""
        return self.faults[-1] if self.faults else None

    @property
    def hangs(self) -> bool:
        """True if it has stopped ranks, or no step ends and its ranks do not move."""
        return bool(self.stopped) or self.verdict == "suspect"

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


def parse_status(data: Any) -> Observed:
    """Parse plain data; raise ValueError if it is no record of this version.

    Unknown fields are ignored, so that an older launcher shows the fields that it knows.
    """
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        raise ValueError("invalid record of a server")
    if data.get("state") not in STATES:
        raise ValueError(f"`state` is {data.get('state')!r:.80}")
    return records.parse_record(Observed, data, "record of a server")
