"""Specs of servers, and their files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from launcher.agent import desired
from launcher.agent.desired import Desired, Policy, Ray
from tests import fuzz
from tests.agent import specs
from tests.hostile import mutate

FULL = specs.mp(
    "gpu1",
    "gpu2",
    processes=(
        specs.process("gpu1", "vllm", "x", env={"A": "b"}, gpus=(1,), replicas=(0, 2)),
        specs.process("gpu2", *specs.HEADLESS),
    ),
    replicas=3,
    tp=2,
    visible="CUDA_VISIBLE_DEVICES",
    memory_share=0.9,
    image="i",
    asked=1.5,
    ray=Ray(dashboard=1, node_manager=2, gpus=2, reserve=True, partial=True),
    addresses={"gpu1": "10.0.0.1"},
    policy=Policy(restarts=3, stuck=30),
    asked_for={"model": "m", "tp": 2},
)
SERVERS = (FULL, specs.ray("gpu1", "gpu2"), specs.mp("gpu1"))
quick = fuzz.quick


def plain(server: Desired) -> Any:
    """Return a spec as in its file."""
    return json.loads(json.dumps(server.as_json()))


@pytest.mark.parametrize("server", SERVERS, ids=["all", "ray", "mp"])
def test_a_server_survives_its_file(server: Desired) -> None:
    """A spec survives a round trip, down to tuples and absent fields."""
    assert desired.parse_spec(plain(server)) == server


def test_the_api_is_on_the_first_process_node() -> None:
    """On that node alone; without headless processes, all nodes have an API."""
    assert (FULL.api_node, [api.node for api in FULL.apis]) == ("gpu1", ["gpu1"])
    assert [api.node for api in specs.hybrid("gpu2", "gpu1").apis] == ["gpu2", "gpu1"]


def test_the_replicas_behind_an_api() -> None:
    """All of them behind a single API; a server of one replica has no numbers."""
    assert FULL.replicas_behind(FULL.processes[0]) == range(3)
    apart = specs.hybrid("gpu1", "gpu2")
    assert [apart.replicas_behind(api) for api in apart.apis] == [range(1), range(1, 2)]
    assert not specs.TWO.replicas_behind(specs.TWO.processes[0])


@pytest.mark.parametrize("name", sorted(plain(FULL)))
def test_missing_fields(name: str) -> None:
    """An incomplete spec must not start."""
    text = plain(FULL)
    del text[name]

    with pytest.raises(ValueError, match="invalid server"):
        desired.parse_spec(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 1}, "unknown version of a server spec: 1"),
        ({"processes": []}, "without a process"),
        ({"policy": {**plain(FULL)["policy"], "stuck": "long"}}, "'policy.stuck': .* valid number"),
        ({"policy": {**plain(FULL)["policy"], "new": 1}}, "missing or unknown: \\['policy'"),
        ({"policy": {"restarts": 3}}, "missing or unknown: \\['policy'"),
        ({"ray": {**plain(FULL)["ray"], "gpus": None}}, "'ray.gpus': .* valid integer"),
        ({"port": float("inf")}, "invalid server: Out of range"),
        ({"port": "8000"}, "'port': .* valid integer"),
        ({"asked": 10**30}, "a number is too large"),
    ],
)
def test_invalid_specs(change: dict[str, Any], text: str) -> None:
    """The error explains itself: files of another version do occur."""
    with pytest.raises(ValueError, match=text) as refused:
        desired.parse_spec({**plain(FULL), **change})
    assert len(str(refused.value).splitlines()) == 1


@quick
@given(fuzz.values(sorted(plain(FULL)), ["mp", "ray", "gpu1"]))
def test_any_json(payload: object) -> None:
    """No other exception, for any content."""
    with pytest.raises(ValueError, match=r"."):
        desired.parse_spec(payload)


@mutate.examples(60)
@given(chance=mutate.chances)
def test_nearly_valid_specs(chance: mutate.Chance) -> None:
    """Rejected, or all fields have their types: the supervisor does not check them again."""
    try:
        result = desired.parse_spec(mutate.value(plain(chance.choice(SERVERS)), chance))
    except ValueError:
        return

    assert all(
        isinstance(getattr(result.policy, name), float)
        for name in ("canary", "stuck", "window", "grace", "pause")
    )
    assert {
        type(item) for item in (result.port, result.replicas, result.tp, *result.places.values())
    } <= {int}
    assert {
        type(label)
        for process in result.processes
        for label in (process.node, *process.argv, *process.env.values())
    } <= {str}
