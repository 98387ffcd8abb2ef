"""Recipes by name, and as a list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import RequestError
from launcher.recipes.description import described
from tests.recipes import acme


def test_a_recipe_by_the_model_of_a_variant() -> None:
    """Means that variant."""
    found = acme.library()

    assert found.named("acme/Dense-8B") == ("acme/Dense-8B", "")
    assert found.named("acme/Experts-600B-FP4") == ("acme/Experts-600B", "fp4")
    assert found.named("acme/None") == ("acme/None", "")


def test_no_such_recipe() -> None:
    """The near miss is named, and how to look."""
    with pytest.raises(RequestError, match="did you mean `acme/Dense-8B`") as error:
        acme.library().recipe("acme/Dense-7B")
    assert error.value.hint == "look for it: `vlaunch recipes list Dense-7B`"


def test_one_that_cannot_be_read_spoils_no_list() -> None:
    """It is in the list, with its mistake."""
    found = acme.library()
    broken = replace(found, files={**found.files, "models/acme/Bad.yaml": "model: 5"})
    entries = {each.name: each for each in broken.entries}

    assert "model: should be a mapping" in entries["acme/Bad"].wrong
    assert entries["acme/Dense-8B"].variants["fp8"] == ("acme/Dense-8B-FP8", "fp8", 10.0)


def test_what_is_not_used_is_named() -> None:
    """Keys that are known and have no counterpart, each with the reason."""
    found = acme.library()
    unused = {
        name: described(found.recipe(f"acme/{name}"), name, "x")["not_used"]
        for name in ("Experts-600B", "Sound", "Own-Image-27B")
    }

    assert unused == {
        "Experts-600B": {
            "model.flashinfer_autotune": "a switch of the site's",
            "strategy_overrides.pd_cluster.prefill": "vlaunch starts no such roles",
        },
        "Sound": {"omni": "vlaunch starts vLLM, not vLLM-Omni"},
        "Own-Image-27B": {
            "features.helper.companion": "vlaunch starts no program beside vLLM",
        },
    }
