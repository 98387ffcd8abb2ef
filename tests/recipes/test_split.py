"""How recipes would spread models."""

from __future__ import annotations

import pytest

from launcher.recipes.split import fewest_gpus, sizes
from tests.recipes import acme


@pytest.mark.parametrize(
    ("recipe", "on", "strategy", "words"),
    [
        ("Dense-8B", "h100", "single_node_tp", "TP 1 on 1 node"),
        ("Own-Image-27B", "h100", "single_node_tp", "TP 1 on 1 node"),
        ("Experts-600B", "h200", "single_node_tp", "TP 8 on 1 node"),
        ("Experts-600B", "h200", "single_node_tep", "TP 8 on 1 node"),
        ("Experts-600B", "h200", "single_node_dep", "DP 8 × TP 1 on 1 node"),
        ("Experts-600B", "h200", "multi_node_tp", "TP 16 on 2 nodes"),
        ("Experts-600B", "h200", "multi_node_tp_pp", "TP 8 × PP 2 on 2 nodes"),
        ("Experts-600B", "h200", "multi_node_dep", "DP 16 × TP 1 on 2 nodes"),
    ],
)
def test_sizes(recipe: str, on: str, strategy: str, words: str) -> None:
    """By the strategy, on two nodes with eight GPUs."""
    assert sizes(acme.chosen(recipe, on, strategy), 8, 2).words == words


def test_replicas_over_nodes() -> None:
    """One replica on each node, where a recipe grants it."""
    found = acme.chosen("Experts-600B", "h200", "multi_node_tp")
    spread = acme.library().strategies["multi_node_tp_dp"]

    assert (
        sizes(
            type(found)(
                recipe=found.recipe,
                hardware=found.hardware,
                variant="default",
                strategy=spread,
                features={},
            ),
            8,
            2,
        ).words
        == "DP 2 × TP 8 on 2 nodes"
    )


@pytest.mark.parametrize(
    ("said", "least"),
    [
        (None, 0),
        (8, 8),
        ({"multi_node_tp": 16}, 16),
        ({"multi_node_tp": 16, "h100": 32}, 32),
        ({"h100": {"multi_node_tp": 24, "multi_node_dep": 64}}, 24),
        ({"h200": 32}, 0),
        ("many", 0),
    ],
)
def test_the_fewest_gpus(said: object, least: int) -> None:
    """A bar for all, for a strategy, or for some hardware: the highest counts."""
    found = acme.chosen("Experts-600B", "h100", "multi_node_tp")
    recipe = found.recipe.model_copy(update={"strategy_min_gpus": said})
    changed = type(found)(
        recipe=recipe,
        hardware=found.hardware,
        variant="default",
        strategy=found.strategy,
        features={},
    )

    assert fewest_gpus(changed) == least
