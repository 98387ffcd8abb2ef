"""Requests of a driver of Ray, over a fake `ray` module."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.agent.processes import ray_driver

Reply = tuple[int, Any]


class Ray:
    """The necessary part of Ray: placement groups by name, with their GPUs on the nodes."""

    def __init__(self) -> None:
        self.groups: dict[str, list[dict[str, float]]] = {}
        self.fits = True
        self.gpus = {"10.0.0.1": list(range(8)), "10.0.0.2": [4, 5]}
        self.total = 8.0
        self.removed: list[str] = []
        self.rows = [_row(ip) for ip in self.gpus]
        self.reached: list[str] = []
        self.unreachable = set[str]()

    def group(
        self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str
    ) -> Any:
        """Create a placement group."""
        assert (strategy, lifetime) == ("SPREAD", "detached")
        if self.fits:
            self.groups[name] = bundles
        return SimpleNamespace(name=name, wait=lambda _: self.fits, bundles=bundles)

    def find(self, name: str) -> Any:
        """Find a placement group."""
        if name not in self.groups:
            raise ValueError("no such group")
        return SimpleNamespace(name=name)

    def remove(self, group: Any) -> None:
        """Remove a placement group."""
        self.removed.append(group.name)
        self.groups.pop(group.name, None)

    def remote(self, **_: Any) -> Any:
        """Decorate a function, whose answer is that of the bundle where it runs, or an actor."""

        def create(resources: dict[str, float]) -> Any:
            ip = next(iter(resources)).removeprefix("node:")
            return SimpleNamespace(
                remote=lambda: SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: ip))
            )

        def options(num_gpus: int, scheduling_strategy: Any) -> Any:
            def run() -> list[int]:
                bundle = scheduling_strategy.group.bundles[scheduling_strategy.index]
                (ip,) = [key.removeprefix("node:") for key in bundle if key.startswith("node:")]
                assert num_gpus == bundle["GPU"]
                return self.gpus[ip]

            return SimpleNamespace(remote=run)

        return lambda item: SimpleNamespace(options=create if isinstance(item, type) else options)

    def get(self, value: Any, timeout: float) -> Any:
        """Return an answer; for a list of actors, once all nodes are reached."""
        if isinstance(value, list) and value and isinstance(value[0], str):
            if self.unreachable & {*value}:
                raise ConnectionError("Get timed out")
            self.reached += value
        return value


def _row(ip: str, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": ip, "Alive": alive, "Resources": {"GPU": 8.0}}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """Replace Ray's module."""
    created = Ray()
    top: Any = ModuleType("ray")
    top.__dict__.update(
        init=lambda **_: None,
        remote=created.remote,
        nodes=lambda: created.rows,
        get=created.get,
        exceptions=SimpleNamespace(RayError=ConnectionError),
    )
    util: Any = ModuleType("ray.util")
    util.get_placement_group = created.find
    groups: Any = ModuleType("ray.util.placement_group")
    groups.__dict__.update(placement_group=created.group, remove_placement_group=created.remove)
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        SimpleNamespace(group=group, index=placement_group_bundle_index)
    )
    for module in (top, util, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return created


@pytest.fixture
def run(ray: Ray, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the program."""

    def call(*args: str) -> Reply:
        monkeypatch.setattr(sys, "argv", ["ray_driver", *args])
        code = ray_driver.main()
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_gpus_are_reserved_on_all_nodes(ray: Ray, run: Any) -> None:
    """Ray chooses some of a node's GPUs; for a whole node no choice exists."""
    assert run("take", "chat", "10.0.0.1=8", "10.0.0.2=2") == (0, {"gpus": {"10.0.0.2": [4, 5]}})
    assert ray.groups == {
        "vlaunch-chat": [
            {"GPU": 8.0, "node:10.0.0.1": 0.001},
            {"GPU": 2.0, "node:10.0.0.2": 0.001},
        ],
    }


def test_an_old_reservation_is_released_first(ray: Ray, run: Any) -> None:
    """Of the same server, after a restart of the head's agent."""
    run("take", "chat", "10.0.0.2=2")
    run("take", "chat", "10.0.0.2=4")

    assert (ray.removed, ray.groups["vlaunch-chat"][0]["GPU"]) == (["vlaunch-chat"], 4.0)


def test_missing_gpus(ray: Ray, run: Any) -> None:
    """An error, without a pending reservation."""
    ray.fits = False
    code, text = run("take", "chat", "10.0.0.2=2")

    assert (code, "they are in use" in text["error"]) == (1, True)
    assert (ray.groups, ray.removed) == ({}, ["vlaunch-chat"])


def test_gpus_are_released(ray: Ray, run: Any) -> None:
    """With no reservation, too."""
    run("take", "chat", "10.0.0.2=2")

    assert run("free", "chat") == run("free", "chat") == (0, {"gpus": {}})
    assert ray.groups == {}


def test_reach_starts_an_actor_on_every_node(ray: Ray, run: Any) -> None:
    """The GCS places actors, over its own connection to the node."""
    assert run("reach", "10.0.0.1", "10.0.0.2") == (0, {"gpus": {}})
    assert ray.reached == ["10.0.0.1", "10.0.0.2"]


def test_reach_reports_a_node_that_is_not_reached(ray: Ray, run: Any) -> None:
    """With Ray's own text."""
    ray.unreachable = {"10.0.0.2"}

    assert run("reach", "10.0.0.2") == (1, {"error": "Get timed out"})


def test_take_reaches_returned_nodes_first(ray: Ray, run: Any) -> None:
    """Those that are alive and have been dead; a group on the others is placed at once."""
    ray.rows.append(_row("10.0.0.2", alive=False))
    run("take", "chat", "10.0.0.1=8", "10.0.0.2=2")

    assert ray.reached == ["10.0.0.2"]


def test_other_output_is_an_error() -> None:
    """A traceback of an import, or nothing."""
    assert ray_driver.parse_output('noise\n{"gpus": {}}\n') == {"gpus": {}}
    assert ray_driver.parse_output("No module named 'ray'\n") == {
        "error": "No module named 'ray'\n"
    }
    assert ray_driver.parse_output("7") == {"error": "7"}
