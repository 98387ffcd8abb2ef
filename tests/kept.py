"""Servers as the head's keeper knows them: what is wanted, how it is, and what the head answers
about both.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from launcher.agent.desired import Desired, Policy, Process
from launcher.agent.health import verdict
from launcher.agent.observed import Fault, Load, Observed
from tests.simulated import World

Json = dict[str, Any]
AT = 1_700_000_000.0  # when the keeper wrote what `seen` returns


def wanted(name: str = "default", *, node: str = "gpu01", **more: Any) -> Desired:
    """Return a server of one process on a node, which takes two GPUs on each of two nodes, with
    changes.
    """
    made = Desired(
        name=name,
        id=f"id-{name}",
        model="org/m",
        backend="ray",
        processes=(Process(node=node, argv=("vllm", "serve")),),
        host="0.0.0.0",
        port=8000,
        places={"gpu01": 2, "gpu02": 2},
        asked=AT,
        policy=Policy(),
    )
    return dataclasses.replace(made, **more)


def seen(name: str = "default", state: str = "ready", **more: Any) -> Observed:
    """Return how a server is that answered a moment ago, with changes."""
    made = Observed(
        name=name,
        id=f"id-{name}",
        asked=AT,
        model="org/m",
        state=state,
        verdict="answering" if state == "ready" else verdict(state, more.get("fault_count", 0)),
        reason=more.get("doing", ""),
        written=AT,
        ready_at=AT - 60,
    )
    return dataclasses.replace(made, **more)


def fault(**more: Any) -> Fault:
    """Return a fault of a minute ago, from which the server has not come back."""
    made = Fault(
        at=AT - 60,
        what="a rank is dead",
        cause="RuntimeError: CUDA error",
        node="gpu02",
        rank="PP1",
        evidence="Worker died",
    )
    return dataclasses.replace(made, **more)


def load(**more: Any) -> Load:
    """Return what a server under a flood has to do."""
    return Load(**{"running": 8, "waiting": 892, "tokens_per_s": 310.2, **more})


def one(server: Desired | None, how: Observed | None = None, *, age: float | None = 2.0) -> Json:
    """Return the head's row of a server; one that nobody wants any more has no `server`."""
    name = server.name if server is not None else how.name if how is not None else ""
    return {
        "name": name,
        "desired": None if server is None else server.as_json(),
        "observed": None if how is None else how.as_json(),
        "age": age,
    }


def said(*rows: Json, agent: float | None = 1.0, **members: float) -> Json:
    """Return what the head says of servers and agents: both nodes' are heard, unless `members` says
    otherwise.
    """
    return {
        "servers": list(rows),
        "members": {"gpu01": 0.5, "gpu02": 0.5, **members},
        "agent": agent,
    }


def keep(world: World, server: Desired, **how: Any) -> None:
    """Let simulated nodes keep a server, which is ready unless `how` says otherwise."""
    head = world.machines[world.inventory.head.name]
    head.files[f"server/{server.name}/desired.json"] = json.dumps(server.as_json()).encode()
    world.observed[server.name] = {
        "state": "ready",
        "verdict": "answering",
        "written": AT,
        **how,
    }
