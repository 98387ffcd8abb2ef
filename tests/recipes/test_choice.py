"""Which variant, which strategy, which features."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.recipes import choice
from launcher.recipes.choice import Fit
from tests.recipes import acme


def variant(recipe: str, on: str, memory: float, asked: str | None = None) -> tuple[str, str]:
    """Choose among the variants of one of our recipes, by their own figures."""
    said = acme.library().recipe(f"acme/{recipe}").value
    return choice.variant_for(
        said, acme.hardware(on), asked, lambda name: choice.of_size(said.variants[name], memory)
    )


@pytest.mark.parametrize(
    ("recipe", "on", "memory", "name"),
    [
        ("Experts-600B", "h100", 1280, "default"),
        ("Experts-600B", "b200", 1440, "default"),
        ("Experts-600B", "b200", 400, "fp4"),
        ("Own-Image-27B", "b200", 40, "nvfp4"),
        ("Dense-8B", "h100", 15, "fp8"),
    ],
)
def test_the_default_where_it_fits(recipe: str, on: str, memory: float, name: str) -> None:
    """Else the largest that does."""
    found, why = variant(recipe, on, memory)

    assert found == name
    assert "fits: " in why
    assert name == "default" or "variant `default` does not fit" in why


def test_the_largest_of_several() -> None:
    """What has the most bits left is preferred, whatever comes first in the file."""
    said = acme.library().recipe("acme/Dense-8B").value
    fp8 = said.variants["fp8"]
    variants = {
        "small": fp8.model_copy(update={"vram_minimum_gb": 4.0}),
        "large": fp8.model_copy(update={"vram_minimum_gb": 8.0}),
        "default": said.variants["default"],
    }

    found, _ = choice.variant_for(
        said.model_copy(update={"variants": variants}),
        acme.hardware("h100"),
        None,
        lambda name: choice.of_size(variants[name], 10),
    )

    assert found == "large"


def test_a_format_needs_its_gpu() -> None:
    """FP4 is Blackwell's, and a list of hardware is kept to; each reason is told."""
    with pytest.raises(RequestError) as error:
        variant("Experts-600B", "h100", 400)
    assert "variant `fp4` (fp4) needs NVIDIA blackwell" in error.value.evidence
    assert "720 GB by the recipe's own figure, 400 GB here" in error.value.evidence

    with pytest.raises(RequestError) as error:
        variant("Own-Image-27B", "gb300", 40)
    assert "variant `nvfp4` is for b200, dgx_spark_gb10" in error.value.evidence


def test_one_that_is_asked_for() -> None:
    """It is taken, whatever speaks against it, which is said; one that is not there is refused."""
    assert variant("Experts-600B", "h100", 100, "fp4") == (
        "fp4",
        "as asked; variant `fp4` (fp4) needs NVIDIA blackwell; it may not fit: 360 GB by the"
        " recipe's own figure, 100 GB here",
    )
    with pytest.raises(RequestError, match="no variant `fp3`; did you mean `fp4`"):
        variant("Experts-600B", "h100", 100, "fp3")


def test_our_own_reckoning_wins() -> None:
    """What is judged otherwise than by the recipe's figure is believed."""
    said = acme.library().recipe("acme/Experts-600B").value
    fits = {"default": Fit(fits=False, why="measured"), "fp4": Fit(fits=True, why="measured")}

    found, why = choice.variant_for(said, acme.hardware("b200"), None, lambda name: fits[name])

    assert (found, why) == ("fp4", "fits: measured; variant `default` does not fit: measured")


def test_hardware_that_a_recipe_rules_out() -> None:
    """Nothing is chosen there."""
    with pytest.raises(RequestError, match="does not run on mi300x yet"):
        variant("Own-Image-27B", "mi300x", 1536)


@pytest.mark.parametrize(
    ("recipe", "on", "nodes", "name"),
    [
        ("Dense-8B", "h100", 1, "single_node_tp"),
        ("Dense-8B", "h100", 2, "multi_node_tp"),
        ("Experts-600B", "h100", 2, "multi_node_tp"),
        ("Own-Image-27B", "h100", 2, "single_node_tp"),
    ],
)
def test_the_strategy_that_a_recipe_would_take(recipe: str, on: str, nodes: int, name: str) -> None:
    """TP first, over nodes where one does not hold the model."""
    found = acme.library()
    said = found.recipe(f"acme/{recipe}").value

    assert choice.strategy_for(said, acme.hardware(on), found.strategies, None, nodes).name == name


def test_a_recipes_default_strategy() -> None:
    """It counts; over several nodes its sibling does, and without one the usual order."""
    found, here = acme.library(), acme.hardware("h100")
    said = found.recipe("acme/Experts-600B").value

    def on(nodes: int, **more: object) -> str:
        changed = said.model_copy(update=more)
        return choice.strategy_for(changed, here, found.strategies, None, nodes).name

    assert on(1, default_strategy="single_node_tep") == "single_node_tep"
    assert on(2, default_strategy="single_node_dep") == "multi_node_dep"
    assert on(2, default_strategy="single_node_tep") == "multi_node_tp"
    assert on(2, default_strategy="multi_node_tp_pp") == "multi_node_tp_pp"
    assert (
        on(1, strategy_hardware={"single_node_tp": {"hopper": "unsupported"}}) != "single_node_tp"
    )


def test_strategies_by_hardware() -> None:
    """A recipe can rule one out, and grant one that it does not list."""
    found, here = acme.library(), acme.hardware("h100")
    gates = {"multi_node_tp_dp": {"h100": "supported"}, "multi_node_tp": {"nvidia": "unsupported"}}
    said = found.recipe("acme/Dense-8B").value.model_copy(update={"strategy_hardware": gates})

    assert choice.offered(said, here, found.strategies) == ["single_node_tp", "multi_node_tp_dp"]
    alone = acme.hardware("dgx_station_gb300")
    assert choice.offered(said, alone, found.strategies) == ["single_node_tp"]
    with pytest.raises(RequestError, match="has no strategy `multi_node_tp` for h100") as error:
        choice.strategy_for(said, here, found.strategies, "multi_node_tp", 2)
    assert error.value.hint == "it has single_node_tp, multi_node_tp_dp"
    with pytest.raises(RequestError, match="no strategy `single_node`; did you mean"):
        choice.strategy_for(said, here, found.strategies, "single_node", 2)


@pytest.mark.parametrize(
    ("on", "more", "without", "features"),
    [
        ("h100", {}, (), {"tool_calling": ""}),
        ("h100", {"spec_decoding": ""}, (), {"tool_calling": "", "spec_decoding": "mtp"}),
        ("h100", {"spec_decoding": "eagle"}, ("tool_calling",), {"spec_decoding": "eagle"}),
    ],
)
def test_features(
    on: str, more: dict[str, str], without: tuple[str, ...], features: dict[str, str]
) -> None:
    """All are on but those to opt into; a mode is the recipe's own unless one is asked for."""
    said = acme.library().recipe("acme/Dense-8B").value

    found, left = choice.features_for(
        said, acme.hardware(on), "default", "single_node_tp", more=more, without=without
    )

    assert (found, left) == (features, [])


def test_a_variant_turns_a_feature_on() -> None:
    """A checkpoint that has its drafts within says so, with the mode."""
    said = acme.library().recipe("acme/Dense-8B").value
    own = said.variants["fp8"].model_copy(update={"default_modes": {"spec_decoding": "eagle"}})
    changed = said.model_copy(update={"variants": {**said.variants, "fp8": own}})

    found, _ = choice.features_for(changed, acme.hardware("h100"), "fp8", "single_node_tp", more={})

    assert found == {"tool_calling": "", "spec_decoding": "eagle"}


@pytest.mark.parametrize(
    ("on", "more", "said"),
    [
        ("h100", {"tool_call": ""}, "no feature `tool_call`; did you mean `tool_calling`"),
        ("mi300x", {"spec_decoding": "eagle"}, "no mode `eagle` here; it has mtp"),
        ("h100", {"tool_calling": "x"}, "it has no mode `x`"),
    ],
)
def test_features_that_cannot_be_had(on: str, more: dict[str, str], said: str) -> None:
    """One that is asked for and is not there is refused, with what is."""
    recipe = acme.library().recipe("acme/Dense-8B").value

    with pytest.raises(RequestError, match=said):
        choice.features_for(recipe, acme.hardware(on), "default", "single_node_tp", more=more)


def test_a_feature_with_a_program_of_its_own() -> None:
    """It is left out, and that is said."""
    recipe = acme.library().recipe("acme/Own-Image-27B").value

    found, left = choice.features_for(
        recipe, acme.hardware("h100"), "default", "single_node_tp", more={}
    )

    assert found == {}
    assert left == [
        "feature `helper` is left out: it needs another program beside vLLM, which vlaunch does"
        " not start"
    ]


def test_where_recipes_run() -> None:
    """Desktops count where a recipe names them; what it rules out does not."""
    entries = {each.name: each.runs for each in acme.library().entries}

    assert "dgx_spark_gb10" in entries["acme/Dense-8B"]
    assert "rtx_pro_6000" not in entries["acme/Dense-8B"]
    assert "mi300x" not in entries["acme/Own-Image-27B"]
