"""A server as it is: what the keeper writes beside `desired.json`, and the launcher reads.

Standard library only.

All times are seconds since 1970 unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

VERSION = 2
# waiting: for nodes, GPUs, or Ray. starting: the engine runs and has not answered. ready: it has.
# stopping: it is being ended. pausing: until the next start. failed: its first start ended.
# gave-up: no restart is left. stopped: nobody wants it.
STATES = ("waiting", "starting", "ready", "stopping", "pausing", "failed", "gave-up", "stopped")
OVER = ("failed", "gave-up", "stopped")
FAULTS = 20  # that are kept
EVIDENCE = 4000  # characters of one fault's
T = TypeVar("T")


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
    """Read plain data, field by field; raises ValueError when a field has another type than it
    should.
    """
    if not isinstance(said, Mapping) or said.get("version") != VERSION:
        raise ValueError("this is no record of a server")
    found = _fields(Observed, said, {"load", "faults", "ranks", "alive", "restarts"})
    load, faults = said.get("load"), said.get("faults")
    found["load"] = None if load is None else _made(Load, _fields(Load, load, set()))
    found["faults"] = [_fault(each) for each in _list(faults)]
    found["restarts"] = [float(_number(each)) for each in _list(said.get("restarts"))]
    ranks = said.get("ranks")
    found["ranks"] = {
        str(node): [str(rank) for rank in _list(held)] for node, held in _mapping(ranks).items()
    }
    found["alive"] = {
        str(node): {str(rank): each is True for rank, each in _mapping(held).items()}
        for node, held in _mapping(said.get("alive")).items()
    }
    if found.get("state") not in STATES:
        raise ValueError(f"`state` is {found.get('state')!r:.80}")
    return _made(Observed, found)


def _fault(said: Any) -> Fault:
    found = _fields(Fault, said, {"phases"})
    phases = {
        str(name): float(_number(each)) for name, each in _mapping(said.get("phases")).items()
    }
    return _made(Fault, {**found, "phases": phases})


def _made(kind: type[T], found: dict[str, Any]) -> T:
    try:
        return kind(**found)
    except TypeError as error:  # a field that has no default is not there
        raise ValueError(str(error)) from None


def _fields(kind: type, said: Any, but: set[str]) -> dict[str, Any]:
    """Return a class's plain fields by name, each of the kind that its annotation names."""
    if not isinstance(said, Mapping):
        raise ValueError(f"{kind.__name__} is {said!r:.80}")
    found = dict[str, Any]()
    for each in dataclasses.fields(kind):
        if each.name in but or each.name not in said:
            continue
        value, annotated = said[each.name], str(each.type)
        if value is None and "None" in annotated:
            found[each.name] = None
        elif annotated.startswith("str"):
            found[each.name] = _text(each.name, value)
        else:
            number = _number(value)
            found[each.name] = int(number) if annotated.startswith("int") else float(number)
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r:.80}")
    return value


def _number(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not -(2**62) < value < 2**62
    ):
        raise ValueError(f"a number is {value!r:.80}")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
