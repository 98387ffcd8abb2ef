"""What differs between the inventory and a container that runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.core.domain import Secret
from launcher.tools.docker_read import parse_image
from tests import plan_case as case
from tests.cluster_status import OPEN, SECRETS, look
from tests.conftest import Load
from tests.simulated import World


def test_drift_is_said_in_words(world: World, load: Load) -> None:
    """The inventory has another environment than the container."""
    changed = load("env: {A: '1'}")
    seen = look(world, inventory=changed)

    assert seen.nodes[0].drift == ("env A: unset → 1",)
    assert not seen.whole


@pytest.mark.parametrize("more", ["", OPEN, "ray: none"])
def test_values_of_secrets_are_not_needed_to_see_that_nothing_drifted(
    load: Load, more: str
) -> None:
    """`status` fetches none: the fingerprint on the container stands in for them."""
    inventory = load(f"{more}\nsecrets: {{HF_TOKEN: {{env: HF_TOKEN}}}}")
    world = World(inventory)
    case.bring_up(inventory, world, {**SECRETS, "HF_TOKEN": Secret("hf")})

    assert [each.drift for each in look(world).nodes] == [(), ()]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "env: {A: '1'}", "env A: unset → 1"),
        ("env: {A: '1'}", "env: {A: '2'}", "env A: 1 → 2"),
        ("env: {A: '1'}", "", "env A: 1 → unset"),
        (
            "",
            "mounts: ['/models:/models:ro']",
            "devices, rights, mounts, limits or log of its container",
        ),
        (
            "",
            "secrets: {HF_TOKEN: {env: X}}",
            "env HF_TOKEN_PATH: unset → /run/vlaunch/secrets/HF_TOKEN",
        ),
    ],
)
def test_what_differs_is_said_of_every_node(load: Load, before: str, after: str, said: str) -> None:
    """The inventory was changed after `up`."""
    world = World(load(before))
    case.bring_up(
        world.inventory, world, {**SECRETS, **dict.fromkeys(world.inventory.secrets, Secret("x"))}
    )
    seen = look(world, inventory=load(after))

    assert [each.drift for each in seen.nodes] == [(said,)] * 2
    assert not seen.whole


def test_another_image_is_said_without_the_variables_of_the_old_one(load: Load) -> None:
    """Nobody looks at an image that is not in the inventory any more: what it brings was not taken
    away by anybody.
    """
    world = World(load("env: {A: '1'}"))
    case.bring_up(world.inventory, world, SECRETS)
    changed = dataclasses.replace(load("env: {A: '2'}"), image="other:1")

    assert look(world, inventory=changed).nodes[0].drift == (
        "image vllm/vllm-openai:v0.32.0 → other:1",
        "env A: 1 → 2",
    )


def test_a_derived_image_is_no_drift(load: Load, tmp_path: Path) -> None:
    """It is known by its base's identity; one of another base is."""
    world = World(load())
    context = tmp_path / "context.tar"
    base = world.machines["gpu01"].images[world.inventory.image]
    case.bring_up(world.inventory, world, SECRETS, context)
    made = next(name for name in world.machines["gpu01"].images if name.startswith("vlaunch/"))
    image = parse_image(json.dumps([base]))
    assert image is not None
    for machine in world.machines.values():
        machine.images[made]["Config"]["Labels"]["vlaunch.base"] = image.identity

    assert [each.drift for each in look(world).nodes] == [(), ()]
    for machine in world.machines.values():
        machine.images[made]["Config"]["Labels"]["vlaunch.base"] = "another"
    assert [each.drift for each in look(world).nodes] == [
        (f"{made} was not made from the present {world.inventory.image}",)
    ] * 2
