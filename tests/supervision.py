"""Specs and records of servers, and the head's answers about them, for tests."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from launcher.agent.desired import Desired, Policy, ProcessSpec
from launcher.agent.health.verdicts import server_verdict
from launcher.agent.observed import Fault, Load, Observed
from tests.simulated import World

Json = dict[str, Any]
AT = 1_700_000_000.0  # time of the records


def make_spec(name: str = "default", *, node: str = "gpu01", **changes: Any) -> Desired:
    """Return the spec of a server with one process, and two GPUs on both nodes, with changes."""
    spec = Desired(
        name=name,
        id=f"id-{name}",
        model="org/m",
        backend="ray",
        processes=(ProcessSpec(node=node, argv=("vllm", "serve")),),
        host="0.0.0.0",
        port=8000,
        places={"gpu01": 2, "gpu02": 2},
        asked=AT,
        policy=Policy(),
    )
    return dataclasses.replace(spec, **changes)


def make_record(name: str = "default", state: str = "ready", **changes: Any) -> Observed:
    """Return the record of a server that answered a moment ago, with changes."""
    record = Observed(
        name=name,
        id=f"id-{name}",
        asked=AT,
        model="org/m",
        state=state,
        verdict="answering"
        if state == "ready"
        else server_verdict(state, changes.get("fault_count", 0)),
        reason=changes.get("doing", ""),
        written=AT,
        ready_at=AT - 60,
    )
    return dataclasses.replace(record, **changes)


def make_fault(**changes: Any) -> Fault:
    """Return an unresolved fault of a minute ago."""
    fault = Fault(
        at=AT - 60,
        what="a rank is dead",
        cause="RuntimeError: CUDA error",
        node="gpu02",
        rank="PP1",
        evidence="Worker died",
    )
    return dataclasses.replace(fault, **changes)


def make_load(**changes: Any) -> Load:
    """Return the load of a flooded server."""
    return Load(**{"running": 8, "waiting": 892, "tokens_per_s": 310.2, **changes})


def server_row(
    server: Desired | None, record: Observed | None = None, *, age: float | None = 2.0
) -> Json:
    """Return the head's row of a server; without a spec, `server` is None."""
    name = server.name if server is not None else record.name if record is not None else ""
    return {
        "name": name,
        "desired": None if server is None else server.as_json(),
        "observed": None if record is None else record.as_json(),
        "age": age,
    }


def head_report(*rows: Json, agent: float | None = 1.0, **members: float) -> Json:
    """Return the head's report on servers and agents: both nodes are connected, unless `members`
    differs.
    """
    return {
        "servers": list(rows),
        "members": {"gpu01": 0.5, "gpu02": 0.5, **members},
        "agent": agent,
    }


def store_server(world: World, server: Desired, **record: Any) -> None:
    """Store a server on the simulated nodes; it is ready unless `record` differs."""
    head = world.machines[world.inventory.head.name]
    head.files[f"server/{server.name}/desired.json"] = json.dumps(server.as_json()).encode()
    world.observed[server.name] = {
        "state": "ready",
        "verdict": "answering",
        "written": AT,
        **record,
    }
