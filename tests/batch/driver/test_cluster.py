"""Replicas that wait for one another before they accept rows."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import cluster


def test_replicas_wait_together_and_a_late_arrival_passes() -> None:
    """The gate opens when the least number has arrived, and stays open."""

    async def arrivals() -> list[str]:
        gate, calls = cluster.StartGate(2), list[str]()

        async def replica(name: str) -> None:
            await gate.arrive()
            calls.append(name)

        first = asyncio.create_task(replica("first"))
        await asyncio.sleep(0)
        assert calls == []
        await replica("second")
        await first
        await replica("again")
        return calls

    assert sorted(asyncio.run(asyncio.wait_for(arrivals(), 10))) == ["again", "first", "second"]


def test_the_gate_opens_after_a_timeout() -> None:
    """The other node may be dead: `patience` seconds after the last arrival."""

    async def arrivals() -> tuple[list[bool], bool]:
        gate = cluster.StartGate(3, patience=0.1)
        waiting = [asyncio.create_task(gate.arrive()) for _ in range(2)]
        await asyncio.sleep(0)
        early = [task.done() for task in waiting]
        await asyncio.gather(*waiting)
        return early, gate.open.is_set()

    assert asyncio.run(asyncio.wait_for(arrivals(), 10)) == ([False, False], True)


def test_a_dead_gate_lets_replicas_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node may die while a replica waits, or before."""
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")

    class RayActorError(Exception):
        pass

    def get(_: Any) -> None:
        raise RayActorError("the actor died because its node has died")

    errors.RayActorError = RayActorError  # type: ignore[attr-defined]
    ray.exceptions, ray.get = errors, get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)

    cluster.wait_at_gate(SimpleNamespace(arrive=SimpleNamespace(remote=lambda: None)))


def test_the_connection_is_configured_before_ray_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray reads its settings once: a dead node must not hold a task for seven minutes."""
    monkeypatch.setattr(cluster.os, "environ", environ := {"RAY_ADDRESS": "10.0.0.1:6379"})
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    seen: list[dict[str, str]] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "ray":
                seen.append(dict(environ))

    monkeypatch.setattr(sys, "meta_path", [Finder])
    with pytest.raises(ImportError):
        cluster.connect(logs=False)
    assert cluster.KEEPALIVE.items() <= seen[0].items()
