"""TP × PP: what is chosen, what is refused, and that every suggestion of an error works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.errors import PlacementError
from launcher.model import Inventory, Node
from launcher.placement import Placement, choose, impossible, shape_of

LLAMA_70B = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
QWEN_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}


def cluster(*gpus: int, head: int = 0) -> Inventory:
    nodes = tuple(
        Node(name=f"n{i}", host=f"n{i}", ip=f"10.0.0.{i + 1}", gpus=count, head=i == head) for i, count in enumerate(gpus)
    )
    return Inventory(path=Path("inventory.yaml"), cluster="c", image="i", nodes=nodes)


def split(placement: Placement) -> tuple[int, int]:
    return placement.tp, placement.pp


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "expected"),
    [
        ((8, 8), None, None, (8, 2)),  # TP = GPUs per node, PP = nodes
        ((8,), None, None, (8, 1)),  # one node: TP only
        ((1,), None, None, (1, 1)),  # one GPU: neither
        ((1, 1), None, None, (1, 2)),
        ((8, 8), 16, None, (16, 1)),  # TP across all GPUs on request
        ((8, 8), 1, None, (1, 16)),  # the uneven split on request
        ((8, 8), None, 1, (16, 1)),
        ((8, 8), None, 4, (4, 4)),
        ((8,), 4, None, (4, 1)),  # one node needs no pipeline
        ((8, 4), 4, None, (4, 3)),
        ((8, 4), 1, 12, (1, 12)),
        ((8, 8), 4, 2, (4, 2)),  # fewer GPUs than there are
    ],
)
def test_sizes(gpus: tuple[int, ...], tp: int | None, pp: int | None, expected: tuple[int, int]) -> None:
    """What is not asked for follows from the cluster."""
    assert expected == split(choose(cluster(*gpus), tp, pp))


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "config", "reason"),
    [
        ((8, 8), 16, 2, None, "it needs 32 GPUs, the cluster has 16"),
        ((8, 8), 32, None, None, "the cluster has 16"),
        ((8, 8), None, None, QWEN_7B, "28 attention heads cannot be divided by TP 8"),
        ((8, 8), 2, 8, {"num_hidden_layers": 4}, "4 layers are fewer than the 8 stages"),
        ((6,), None, None, {"num_attention_heads": 12, "num_key_value_heads": 4}, "4 key/value heads"),
        ((8, 8), 3, None, None, "TP 3 does not divide the cluster's 16 GPUs"),
        ((8, 4), None, None, None, "different numbers of GPUs"),
        ((8,), None, None, {"text_config": {"num_attention_heads": 20}}, "20 attention heads"),
    ],
)
def test_refused(gpus: tuple[int, ...], tp: int | None, pp: int | None, config: dict[str, object] | None, reason: str) -> None:
    """What cannot run is refused with its reason, and each split that the hint offers is accepted."""
    with pytest.raises(PlacementError, match=reason) as refused:
        choose(cluster(*gpus), tp, pp, config)
    offered = re.findall(r"--(tp|pp) (\d+) --(?:tp|pp) (\d+)", refused.value.hint)

    assert offered
    for first, a, b in offered:
        size = {"tp": (int(a), int(b)), "pp": (int(b), int(a))}[first]
        assert size == split(choose(cluster(*gpus), *size, config))


def test_suggestions_use_all_gpus_and_stay_inside_nodes() -> None:
    """For 28 heads on two nodes of eight, TP 4 × PP 4 comes before anything smaller."""
    with pytest.raises(PlacementError) as refused:
        choose(cluster(8, 8), None, None, QWEN_7B)

    assert refused.value.hint.startswith("these work: `--tp 4 --pp 4`")


def test_nothing_fits() -> None:
    """A model with more stages than can be had is refused without a made-up way out."""
    assert not impossible(cluster(1), 1, 1, shape_of({"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "crosses"),
    [
        ((8, 8), 8, 2, False),
        ((8, 8), 16, 1, True),
        ((8, 8), 4, 4, False),
        ((6, 6), 4, 3, True),
        ((8, 4), 4, 3, False),
        ((4, 8), 8, 1, True),  # the head comes first, so its four GPUs begin the group
        ((3, 3), 1, 6, False),
    ],
)
def test_tp_across_nodes_is_said(gpus: tuple[int, ...], tp: int, pp: int, crosses: bool) -> None:
    """A TP group is local exactly when each node contributes a multiple of TP."""
    warnings = choose(cluster(*gpus), tp, pp).warnings

    assert crosses == any("crosses nodes" in each for each in warnings)


def test_the_head_holds_the_first_ranks() -> None:
    """Ranks are expected on the head first, wherever it stands in the inventory."""
    assert choose(cluster(8, 8, head=1), None, None).nodes == (("n1", 8), ("n0", 8))
    assert choose(cluster(8, 8), 4, 1).nodes == (("n0", 4),)


def test_the_mp_backend_hands_out_equal_shares() -> None:
    """Nodes that are too small for their share get no rank, and are not said to."""
    assert choose(cluster(2, 1, 2), 2, 2, backend="mp").nodes == (("n0", 2), ("n2", 2))
    assert choose(cluster(2, 1, 2), 2, 2).nodes == (("n0", 2), ("n1", 1), ("n2", 1))
    with pytest.raises(PlacementError, match="shared equally"):
        choose(cluster(8, 4), 4, 3, backend="mp")


def test_unused_gpus_are_said() -> None:
    """GPUs that stay without a rank are mentioned."""
    assert "8 of 16 GPUs stay unused" in choose(cluster(8, 8), 4, 2).warnings


def test_repeated_kv_heads_are_said() -> None:
    """TP beyond the key/value heads works, and costs memory."""
    warnings = choose(cluster(8, 8), 16, 1, LLAMA_70B).warnings

    assert "TP 16 exceeds the model's 8 key/value heads, so each is kept 2 times" in warnings


@pytest.mark.parametrize(
    ("config", "heads", "layers"),
    [
        (LLAMA_70B, 64, 80),
        ({"n_head": 12, "n_layer": 6}, 12, 6),
        ({"num_attention_heads": 16, "text_config": {"num_attention_heads": 32, "num_hidden_layers": 40}}, 32, 40),
        ({"num_attention_heads": "many", "text_config": None}, None, None),
        ({"num_attention_heads": True}, None, None),
        (None, None, None),
    ],
)
def test_shape_of(config: dict[str, object] | None, heads: int | None, layers: int | None) -> None:
    """Heads and layers are read where models keep them; nonsense is not believed."""
    shape = shape_of(config)

    assert (heads, layers) == (shape.heads, shape.layers)
