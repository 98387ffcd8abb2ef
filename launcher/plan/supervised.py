"""What a supervised server is told to be, and what its supervisor (`payload/record.py`) says of it, for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.model import Argv, Inventory

if TYPE_CHECKING:
    from launcher.plan.serve import Request

STARTING = "starting the engine"  # what a supervisor says it does while vLLM starts
AGAIN = "vlaunch supervisor: starting the engine again"  # in the job's log: what is above it is of another engine
_TIMEOUT, _WINDOW = 8, 3600  # seconds
_GRACE = 5  # seconds for a dead engine: its API may wait for requests that nobody answers any more
_PHASES = ("stopped", "whole", "started")  # of a recovery, in their order
_NO_DATE = 253_402_300_800  # seconds since 1970 at the end of the year 9999, after which no date can be shown
_FRESH = 60.0  # seconds; a supervisor that recovers writes every one or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a server is supervised: seconds between looks, restarts in an hour, seconds that a restart may take."""

    canary: float = 5.0
    restarts: int = 3
    start_timeout: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a server was dead. Times are seconds since 1970; `lost` is how many requests it had when it was last asked.

    `phases` are how many seconds later its engine was stopped, the cluster whole, and the engine started again.
    """

    at: float
    what: str
    node: str = ""
    rank: str = ""
    evidence: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    ready_again_after: float | None = None
    lost: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What a supervisor says: its state and what it does, how many restarts are left, and the last fault.

    `wanted` is false when somebody has stopped the server; `age` is how many seconds ago the supervisor wrote.
    """

    id: str
    state: str
    model: str = ""
    doing: str = ""
    restarts_left: int = 0
    faults: int = 0
    fault: Fault | None = None
    wanted: bool = False
    age: float = math.inf

    @property
    def waits(self) -> bool:
        """True while Ray may not have the server's next job yet: it waits for the cluster, or its supervisor has just died."""
        return self.state in ("ready", "recovering") and self.wanted and self.age < _FRESH


def wanted(
    inventory: Inventory, request: Request, policy: Policy, *, argv: Argv, env: Mapping[str, str], image: str, host: str
) -> dict[str, Any]:
    """Return what a supervisor needs to start the server, and to start it again (`wanted.json`)."""
    return {
        "version": 1,
        "id": request.digest,
        "backend": request.backend,
        "model": request.model,
        "argv": list(argv),
        "env": dict(env),
        "metadata": request.labels,
        "asked_for": request.asked_for,
        "image": image,
        "cluster": {
            "nodes": {node.ip: node.gpus for node in inventory.nodes},
            "needs": request.placement.world,
            "port": inventory.ports.node_manager,
        },
        "api": {"host": host, "port": request.port},
        "dashboard": inventory.ports.dashboard,
        "policy": {
            "canary": policy.canary, "timeout": _TIMEOUT, "restarts": policy.restarts, "window": _WINDOW, "grace": _GRACE,
            "start_timeout": policy.start_timeout,
        },
        "supervise": True,
    }  # fmt: skip


def read(inventory: Inventory, said: Any) -> Supervision | None:
    """Read what the head says of a supervisor; None when nobody supervises, or it cannot be read."""
    if not isinstance(said, Mapping) or not isinstance(said.get("id"), str) or not isinstance(said.get("state"), str):
        return None
    faults = said.get("faults")
    faults = [each for each in faults if isinstance(each, Mapping)] if isinstance(faults, list) else []
    age = _number(said.get("age"))
    return Supervision(
        id=said["id"], state=said["state"], model=str(said.get("model") or ""),
        doing=named(inventory, str(said.get("doing") or "")), restarts_left=int(_number(said.get("restarts_left")) or 0),
        faults=len(faults), fault=_fault(inventory, faults[-1]) if faults else None, wanted=said.get("wanted") is True,
        age=math.inf if age is None else age,
    )  # fmt: skip


def labels(said: Any) -> Mapping[str, str] | None:
    """Return the labels of a server that its supervisor is about to hand to Ray; None when there is none."""
    found = said.get("metadata") if isinstance(said, Mapping) and said.get("backend") == "ray" else None
    return {key: str(value) for key, value in found.items()} if isinstance(found, Mapping) and found else None


def named(inventory: Inventory, text: str) -> str:
    """Put nodes' names in the place of their addresses."""
    for node in inventory.nodes:
        text = re.sub(rf"(?<![\d.]){re.escape(node.ip)}(?!\d|\.\d)", node.name, text)
    return text


def _fault(inventory: Inventory, said: Mapping[str, Any]) -> Fault:
    lost, phases = _number(said.get("in_flight")), said.get("phases")
    phases = phases if isinstance(phases, Mapping) else {}
    return Fault(
        at=at if 0 <= (at := _number(said.get("at")) or 0.0) < _NO_DATE else 0.0,
        what=named(inventory, str(said.get("what") or "")),
        node=named(inventory, str(said.get("node") or "")),
        rank=str(said.get("rank") or ""),
        evidence=tuple(named(inventory, line) for line in str(said.get("evidence") or "").splitlines() if line.strip()),
        phases={name: after for name in _PHASES if (after := _number(phases.get(name))) is not None},
        ready_again_after=_number(said.get("ready_again_after")),
        lost=None if lost is None else int(lost),
    )


def _number(value: Any) -> float | None:
    """Return a number that is one: what a node says may be anything."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
