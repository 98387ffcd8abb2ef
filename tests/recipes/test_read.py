"""The text of recipes."""

from __future__ import annotations

import json

import pytest

from launcher.recipes import read
from launcher.recipes.read import RecipeError
from tests.recipes import acme

GOOD = """
meta: {title: T, brand_new: 1}
model: {model_id: a/b, base_args: [--x, 1]}
variants:
  default: {precision: fp8, vram_minimum_gb: 8, tp: 2, shiny: {a: 1}}
"""


def test_what_is_not_known_is_named() -> None:
    """A newer key is no mistake, and not passed over in silence."""
    said = read.recipe(GOOD, "b.yaml")

    assert said.unknown == ("meta.brand_new", "variants.default.shiny")
    assert said.value.model.base_args == ["--x", "1"]
    assert said.value.variants["default"].tp == {"default": 2}


def test_every_mistake_at_once() -> None:
    """Each with its line, in their order; nothing is a traceback."""
    bad = """
meta: {hardware: yes}
model: {min_vllm_version: 0.1, base_args: --x, base_env: {A: true, 2B: x}}
features: {f: {modes: {m: {args: [1]}}, default_mode: q}}
opt_in_features: [g]
variants: {default: {vram_minimum_gb: -1}}
"""
    with pytest.raises(RecipeError, match=r"7 mistakes in `bad\.yaml`") as error:
        read.recipe(bad, "bad.yaml")
    lines = error.value.evidence.splitlines()

    assert [line.split(":")[1] for line in lines] == ["2", "3", "3", "3", "3", "3", "6"]
    assert "`model_id` is missing" in error.value.evidence
    assert "model.base_args: should be a list" in error.value.evidence


def test_words_must_name_something() -> None:
    """What a recipe refers to within itself must be there."""
    bad = """
model: {model_id: a/b}
features:
  f: {modes: {m: {args: [x]}}, default_mode: q}
  h: {modes: {m: {args: [x]}}, args: [y]}
opt_in_features: [g]
variants: {default: {default_modes: {f: z, k: z}}}
"""
    with pytest.raises(RecipeError) as error:
        read.recipe(bad, "bad.yaml")

    assert error.value.evidence.splitlines() == [
        'bad.yaml:4: features.f.default_mode: names no mode of this recipe: "q"',
        "bad.yaml:5: features.h: has `args` and `modes`, of which only one counts",
        'bad.yaml:6: opt_in_features[0]: names no feature of this recipe: "g"',
        'bad.yaml:7: variants.default.default_modes.f: names no mode of this recipe: "z"',
        'bad.yaml:7: variants.default.default_modes.k: names no feature of this recipe: "k"',
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", ""),
        ("a.yaml", "[1, 2]"),
        ("a.yaml", "a: [b"),
        ("a.yaml", "&a {b: *a}"),
        ("a.json", ""),
        ("a.json", "[]"),
        ("a.json", "[" * 100_000),
        ("a.json", '{"model": {"model_id": 5}}'),
        ("a.json", '{"model": null, "variants": 7}'),
    ],
)
def test_what_is_no_recipe(name: str, text: str) -> None:
    """Nonsense has a clear error."""
    with pytest.raises(RecipeError, match="in `a"):
        read.recipe(text, name)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("x/y:1", {"nvidia": "x/y:1"}),
        ({"nvidia": "n:1", "amd": "a:1"}, {"nvidia": "n:1", "amd": "a:1"}),
        ({"cu129": "n:9", "cu130": "n:0"}, {"nvidia": "n:0"}),
        ({"nvidia": {"cu129": "n:9"}, "amd": "a:1"}, {"nvidia": "n:9", "amd": "a:1"}),
    ],
)
def test_forms_of_images(written: object, found: dict[str, str]) -> None:
    """A bare image is NVIDIA's; of those for two versions of CUDA, the newer is taken."""
    text = json.dumps({"model": {"model_id": "a/b", "docker_image": written}})

    assert read.recipe(text, "a.json").value.model.docker_image == found


def test_a_page_of_the_site_has_its_strategies_in_its_commands() -> None:
    """The static JSON does not list them."""
    command = {
        "strategy": "single_node_tep",
        "alternatives": {"multi_node_tp": "/x", "kv_store_acme": "/y"},
    }
    page = {"model": {"model_id": "a/b"}, "hf_id": "a/b", "recommended_command": command}
    found = read.recipe(json.dumps(page), "a/b.json").value

    assert found.compatible_strategies == ["single_node_tep", "multi_node_tp"]
    assert found.default_strategy == "single_node_tep"


def test_our_own_recipes_are_whole() -> None:
    """The fixtures have no mistake, and no key that nobody knows."""
    found = acme.library()

    assert len(found.paths) == 4
    assert all(not found.recipe(name).unknown for name in found.paths)
    assert len(found.strategies) == 8
