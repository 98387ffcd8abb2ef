"""GPUs that are set aside in Ray, over a stand-in for its module."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.agent import reserve

Reply = tuple[int, Any]


class Ray:
    """As much of Ray as is used: groups by name, and which GPUs of each node a group was given."""

    def __init__(self) -> None:
        self.groups: dict[str, list[dict[str, float]]] = {}
        self.fits = True
        self.gpus = {"10.0.0.1": list(range(8)), "10.0.0.2": [4, 5]}
        self.total = 8.0
        self.removed: list[str] = []

    def group(
        self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str
    ) -> Any:
        """Make a placement group."""
        assert (strategy, lifetime) == ("SPREAD", "detached")
        if self.fits:
            self.groups[name] = bundles
        return SimpleNamespace(name=name, wait=lambda _: self.fits, bundles=bundles)

    def find(self, name: str) -> Any:
        """Find one."""
        if name not in self.groups:
            raise ValueError("no such group")
        return SimpleNamespace(name=name)

    def remove(self, group: Any) -> None:
        """Remove one."""
        self.removed.append(group.name)
        self.groups.pop(group.name, None)

    def remote(self, **_: Any) -> Any:
        """Decorate a function, whose answer is that of the bundle where it runs."""

        def options(num_gpus: int, scheduling_strategy: Any) -> Any:
            def run() -> list[int]:
                bundle = scheduling_strategy.group.bundles[scheduling_strategy.index]
                (ip,) = [key.removeprefix("node:") for key in bundle if key.startswith("node:")]
                assert num_gpus == bundle["GPU"]
                return self.gpus[ip]

            return SimpleNamespace(remote=run)

        return lambda _: SimpleNamespace(options=options)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """Put a stand-in where Ray's module would be."""
    created = Ray()
    nodes = [
        {"NodeManagerAddress": ip, "Alive": True, "Resources": {"GPU": 8.0}} for ip in created.gpus
    ]
    top: Any = ModuleType("ray")
    top.__dict__.update(
        init=lambda **_: None,
        remote=created.remote,
        nodes=lambda: nodes,
        get=lambda value, timeout: value,
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
        monkeypatch.setattr(sys, "argv", ["reserve", *args])
        code = reserve.main()
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_gpus_are_taken_on_each_node(ray: Ray, run: Any) -> None:
    """Of a part of a node Ray says which they are; of one that is taken whole nobody needs to
    ask.
    """
    assert run("take", "chat", "10.0.0.1=8", "10.0.0.2=2") == (0, {"gpus": {"10.0.0.2": [4, 5]}})
    assert ray.groups == {
        "vlaunch-chat": [
            {"GPU": 8.0, "node:10.0.0.1": 0.001},
            {"GPU": 2.0, "node:10.0.0.2": 0.001},
        ],
    }


def test_what_was_taken_before_is_given_back_first(ray: Ray, run: Any) -> None:
    """The same server, after a restart of the head's agent."""
    run("take", "chat", "10.0.0.2=2")
    run("take", "chat", "10.0.0.2=4")

    assert (ray.removed, ray.groups["vlaunch-chat"][0]["GPU"]) == (["vlaunch-chat"], 4.0)


def test_gpus_that_ray_does_not_have(ray: Ray, run: Any) -> None:
    """Are an error, and nothing stays asked for."""
    ray.fits = False
    code, text = run("take", "chat", "10.0.0.2=2")

    assert (code, "they are in use" in text["error"]) == (1, True)
    assert (ray.groups, ray.removed) == ({}, ["vlaunch-chat"])


def test_gpus_are_given_back(ray: Ray, run: Any) -> None:
    """Also when there are none."""
    run("take", "chat", "10.0.0.2=2")

    assert run("free", "chat") == run("free", "chat") == (0, {"gpus": {}})
    assert ray.groups == {}
