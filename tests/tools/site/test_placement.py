"""TP × PP: choices, rejections, and working suggestions in all errors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.domain import Backend, Inventory, Node
from launcher.core.errors import PlacementError
from launcher.tools.model import shape_of
from launcher.tools.site.placement import (
    Placement,
    choose_placement,
    explain_impossible,
    narrow_inventory,
)
from tests.served import INVENTORY

LLAMA_70B = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
QWEN_7B = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}


def cluster(*gpus: int, head: int = 0) -> Inventory:
    nodes = tuple(
        Node(name=f"n{i}", host=f"n{i}", ip=f"10.0.0.{i + 1}", gpus=count, head=i == head)
        for i, count in enumerate(gpus)
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
        ((8, 8), 16, None, (16, 1)),  # TP across all GPUs, if requested
        ((8, 8), 1, None, (1, 16)),  # the uneven layout, if requested
        ((8, 8), None, 1, (16, 1)),
        ((8, 8), None, 4, (4, 4)),
        ((8,), 4, None, (4, 1)),  # one node needs no pipeline
        ((8, 4), 4, None, (4, 3)),
        ((8, 4), 1, 12, (1, 12)),
        ((8, 8), 4, 2, (4, 2)),  # fewer GPUs than available
    ],
)
def test_sizes(
    gpus: tuple[int, ...], tp: int | None, pp: int | None, expected: tuple[int, int]
) -> None:
    """Missing sizes are derived from the cluster."""
    assert expected == split(choose_placement(cluster(*gpus), tp, pp))


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "config", "reason"),
    [
        ((8, 8), 16, 2, None, "it needs 32 GPUs, the cluster has 16"),
        ((8, 8), 32, None, None, "the cluster has 16"),
        ((8, 8), None, None, QWEN_7B, "28 attention heads cannot be divided by TP 8"),
        ((8, 8), 2, 8, {"num_hidden_layers": 4}, "4 layers are fewer than the 8 stages"),
        (
            (6,),
            None,
            None,
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            "4 key/value heads",
        ),
        ((8, 8), 3, None, None, "TP 3 does not divide the cluster's 16 GPUs"),
        ((8,), None, None, {"text_config": {"num_attention_heads": 20}}, "20 attention heads"),
    ],
)
def test_rejected_layouts(
    gpus: tuple[int, ...],
    tp: int | None,
    pp: int | None,
    config: dict[str, object] | None,
    reason: str,
) -> None:
    """Impossible layouts are rejected with a reason, and the layouts in the hint are accepted."""
    with pytest.raises(PlacementError, match=reason) as refused:
        choose_placement(cluster(*gpus), tp, pp, config)
    offered = re.findall(r"--(tp|pp) (\d+) --(?:tp|pp) (\d+)", refused.value.hint)

    assert offered
    for first, a, b in offered:
        size = {"tp": (int(a), int(b)), "pp": (int(b), int(a))}[first]
        assert size == split(choose_placement(cluster(*gpus), *size, config))


def test_suggestions_use_all_gpus_and_stay_inside_nodes() -> None:
    """For 28 heads on two nodes of eight, TP 4 × PP 4 precedes anything smaller."""
    with pytest.raises(PlacementError) as refused:
        choose_placement(cluster(8, 8), None, None, QWEN_7B)

    assert refused.value.hint.startswith("these work: `--tp 4 --pp 4`")


def test_no_layout_fits() -> None:
    """A model that needs too many stages is rejected without an invented suggestion."""
    assert not explain_impossible(cluster(1), 1, 1, shape_of({"num_hidden_layers": 1}))


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
def test_tp_across_nodes_is_a_warning(
    gpus: tuple[int, ...], tp: int, pp: int, crosses: bool
) -> None:
    """A TP group is local exactly when all nodes contribute multiples of TP."""
    warnings = choose_placement(cluster(*gpus), tp, pp).warnings

    assert crosses == any("crosses nodes" in warning for warning in warnings)


def test_the_head_has_the_first_ranks() -> None:
    """At any position in the inventory."""
    assert choose_placement(cluster(8, 8, head=1), None, None).nodes == (("n1", 8), ("n0", 8))
    assert choose_placement(cluster(8, 8), 4, 1).nodes == (("n0", 4),)


def test_the_mp_backend_assigns_equal_shares() -> None:
    """Nodes that are too small for their share get no ranks."""
    assert choose_placement(cluster(2, 1, 2), 2, 2, backend="mp").nodes == (("n0", 2), ("n2", 2))
    assert choose_placement(cluster(2, 1, 2), 2, 2).nodes == (("n0", 2), ("n1", 1), ("n2", 1))
    with pytest.raises(PlacementError, match="divided equally"):
        choose_placement(cluster(8, 4), 4, 3, backend="mp")


def test_unused_gpus_are_a_warning() -> None:
    """GPUs without a rank are mentioned."""
    assert "8 of 16 GPUs stay unused" in choose_placement(cluster(8, 8), 4, 2).warnings


def test_repeated_kv_heads_are_a_warning() -> None:
    """TP beyond the key/value heads works, and costs memory."""
    warnings = choose_placement(cluster(8, 8), 16, 1, LLAMA_70B).warnings

    assert "TP 16 exceeds the model's 8 key/value heads, so each is stored 2 times" in warnings


MOE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
}


@pytest.mark.parametrize(
    ("gpus", "dp", "tp", "pp", "backend", "label", "replicas"),
    [
        (
            (8, 8),
            2,
            None,
            None,
            "mp",
            "DP 2 × TP 8 × PP 1",
            {"n0": 1, "n1": 1},
        ),  # one node per replica
        ((8, 8), 4, None, None, "ray", "DP 4 × TP 4 × PP 1", {"n0": 2, "n1": 2}),
        ((8, 8), 16, None, None, "ray", "DP 16 × TP 1 × PP 1", {"n0": 8, "n1": 8}),
        ((8,), 2, None, None, "mp", "DP 2 × TP 4 × PP 1", {"n0": 2}),
        ((8, 4), 3, None, None, "mp", "DP 3 × TP 4 × PP 1", {"n0": 2, "n1": 1}),
        ((8, 8), 2, 4, None, "mp", "DP 2 × TP 4 × PP 1", {"n0": 2}),  # as few nodes as possible
        ((8, 8), 2, 4, 2, "mp", "DP 2 × TP 4 × PP 2", {"n0": 1, "n1": 1}),
        ((8, 8), 2, None, 2, "mp", "DP 2 × TP 4 × PP 2", {"n0": 1, "n1": 1}),
        # the larger node before the smaller
        ((4, 4, 8), 3, 4, None, "mp", "DP 3 × TP 4 × PP 1", {"n0": 1, "n2": 2}),
        (
            (8, 8, 8, 8),
            2,
            None,
            None,
            "ray",
            "DP 2 × TP 8 × PP 2",
            {"n0": 1, "n1": 0, "n2": 1, "n3": 0},
        ),
        ((1, 1), 2, None, None, "mp", "DP 2 × TP 1 × PP 1", {"n0": 1, "n1": 1}),
    ],
)
def test_replicas(
    gpus: tuple[int, ...],
    dp: int,
    tp: int | None,
    pp: int | None,
    backend: Backend,
    label: str,
    replicas: dict[str, int],
) -> None:
    """Replicas get equal parts of the GPUs, inside a node if possible; the head always has the
    first one.
    """
    placed = choose_placement(cluster(*gpus), tp, pp, dp=dp, backend=backend)

    assert (placed.label, dict(placed.replicas)) == (label, replicas)
    assert placed.world == sum(count for _, count in placed.nodes)
    assert placed.spans is (0 in replicas.values())
    assert not placed.crosses


@pytest.mark.parametrize(
    ("gpus", "dp", "tp", "pp", "backend", "reason"),
    [
        ((8, 8), 3, None, None, "mp", "16 GPUs cannot be divided equally between 3 replicas"),
        ((8, 8), 2, None, 3, "ray", "between 2 replicas of PP 3"),
        ((8, 8), 20, None, None, "mp", "it needs 20 GPUs, the cluster has 16"),
        (
            (8, 8, 8, 8),
            2,
            None,
            None,
            "mp",
            "more than one node has, and the mp backend keeps each replica on one node",
        ),
        ((8, 4), 2, None, None, "ray", "only 1 of them fit on one node each"),
        ((4, 8), 2, 6, None, "ray", "the head must hold one but has 4"),
        ((4, 8, 8), 2, 8, None, "mp", "the head must hold one but has 4"),
        ((4, 4), 1, 2, None, "ray", ""),
        ((6, 6, 6), 2, 8, 1, "ray", "a replica needs 8 GPUs, more than any node has"),
    ],
)
def test_impossible_replicas(
    gpus: tuple[int, ...], dp: int, tp: int | None, pp: int | None, backend: Backend, reason: str
) -> None:
    """They are rejected with a reason, and the layouts in the hint work with both backends."""
    if not reason:
        assert choose_placement(cluster(*gpus), tp, pp, dp=dp) == choose_placement(
            cluster(*gpus), tp, pp
        )
        return
    with pytest.raises(PlacementError, match=reason) as refused:
        choose_placement(cluster(*gpus), tp, pp, dp=dp, backend=backend)
    offered = re.findall(r"--data-parallel-size (\d+) --tp (\d+)", refused.value.hint)

    assert offered
    assert dp >= 16 or offered[0][0] == str(dp)
    for count, size in offered:
        for executor in ("ray", "mp"):
            assert choose_placement(
                cluster(*gpus), int(size), None, dp=int(count), backend=executor
            ).dp == int(count)
    assert ("`--backend ray`" in refused.value.hint) is ("mp backend keeps" in reason)


def test_replicas_need_heads_that_can_be_divided() -> None:
    """The model's shape applies per replica."""
    with pytest.raises(
        PlacementError, match="28 attention heads cannot be divided by TP 8"
    ) as refused:
        choose_placement(cluster(8, 8), None, None, QWEN_7B, dp=2)

    assert refused.value.hint.startswith("these work: `--data-parallel-size 2 --tp 4`")


def test_two_replicas_on_a_single_gpu_are_impossible() -> None:
    """No suggestion is invented."""
    with pytest.raises(PlacementError) as refused:
        choose_placement(cluster(1), None, None, dp=2)

    assert "`--data-parallel-size" not in refused.value.hint


@pytest.mark.parametrize(
    ("config", "gpus", "coupled", "networked"),
    [
        (LLAMA_70B, (8, 8), False, False),  # dense replicas are independent engines
        (MOE, (8, 8), True, True),
        (None, (8, 8), True, True),  # unreadable, so the worst is assumed
        (MOE, (8,), True, False),
        (LLAMA_70B, (8,), False, False),
    ],
)
def test_communication_of_replicas(
    config: dict[str, object] | None, gpus: tuple[int, ...], coupled: bool, networked: bool
) -> None:
    """Replicas of a mixture of experts communicate in every layer; those of a dense model never."""
    placed = choose_placement(cluster(*gpus), None, None, config, dp=2)

    assert (placed.coupled, placed.networked) == (coupled, networked)


def test_a_replica_over_several_nodes_needs_the_network() -> None:
    """Without replicas the layout itself crosses nodes."""
    assert choose_placement(cluster(8, 8), None, None, LLAMA_70B).networked
    assert not choose_placement(cluster(8, 8), 8, 1, LLAMA_70B).networked
    assert choose_placement(cluster(8, 8, 8, 8), None, None, LLAMA_70B, dp=2).networked


@pytest.mark.parametrize(
    ("backend", "config", "gpus", "warned"),
    [
        ("ray", MOE, (8, 8), True),
        ("mp", MOE, (8, 8), False),
        ("ray", LLAMA_70B, (8, 8), False),
        ("ray", MOE, (8,), False),
    ],
)
def test_a_mixture_of_experts_across_nodes_under_ray_is_a_warning(
    backend: Backend, config: dict[str, object], gpus: tuple[int, ...], warned: bool
) -> None:
    """Hangs have been reported, and the other backend has none."""
    warnings = choose_placement(cluster(*gpus), None, None, config, dp=2, backend=backend).warnings

    assert any("prefer `--backend mp`" in warning for warning in warnings) is warned


@pytest.mark.parametrize(
    ("nodes", "gpus", "message"),
    [(("n3",), None, "no node `n3`"), (("n1",), 9, "n1 has 8 GPUs, not 9")],
)
def test_missing_nodes_and_gpus(nodes: tuple[str, ...], gpus: int | None, message: str) -> None:
    """The error lists the existing ones."""
    with pytest.raises(PlacementError, match=message) as refused:
        narrow_inventory(INVENTORY, nodes, gpus)

    assert "`--" in refused.value.hint


def test_a_selection_of_nodes_keeps_the_head() -> None:
    """If it is selected; otherwise the first node replaces it as the meeting point of ranks."""
    assert [node.name for node in narrow_inventory(INVENTORY, ("n2", "n1")).nodes if node.head] == [
        "n1"
    ]
    assert narrow_inventory(INVENTORY, ("n2",)).head.name == "n2"
    assert narrow_inventory(INVENTORY, gpus=2).gpus == 4
    assert choose_placement(
        narrow_inventory(INVENTORY, ("n2",)), None, None, backend="mp"
    ).nodes == (("n2", 8),)


def test_single_gpu_nodes_with_rdma_are_a_stage() -> None:
    """TP = nodes if the model's heads allow it; else, and over Ethernet, a pipeline."""
    sparks = replace(cluster(1, 1), fabric="roce")
    three = replace(cluster(1, 1, 1), fabric="roce")

    assert split(choose_placement(sparks, None, None, LLAMA_70B)) == (2, 1)
    assert choose_placement(sparks, None, None).warnings == ()
    assert "RDMA between them: TP = nodes" in choose_placement(sparks, None, None).why
    assert split(choose_placement(three, None, None, LLAMA_70B)) == (1, 3)
    assert split(choose_placement(sparks, None, 2)) == (1, 2)
    assert split(choose_placement(replace(cluster(8, 8), fabric="infiniband"), None, None)) == (
        8,
        2,
    )


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_prefill_context_parallelism_multiplies_the_ranks(backend: Backend) -> None:
    """Those of a stage stay together; other sizes get the rest."""
    placed = choose_placement(cluster(8, 8), None, None, LLAMA_70B, pcp=2, backend=backend)

    assert (placed.tp, placed.pcp, placed.pp, placed.world) == (4, 2, 2, 16)
    assert placed.nodes == (("n0", 8), ("n1", 8))
    assert placed.label == "TP 4 × PCP 2 × PP 2"
    assert not placed.crosses


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "pcp", "reason"),
    [
        (8, 2, None, 2, "it needs 32 GPUs, the cluster has 16"),
        (None, None, None, 3, "the GPUs of a stage cannot be divided by PCP"),
        (None, None, None, 16, "the GPUs of a stage cannot be divided by PCP"),
        (None, None, 2, 2, "2 replicas with prefill context parallelism"),
    ],
)
def test_prefill_context_parallelism_that_does_not_fit(
    tp: int | None, pp: int | None, dp: int | None, pcp: int, reason: str
) -> None:
    """Otherwise vLLM would wait half an hour for GPUs."""
    with pytest.raises(PlacementError) as error:
        choose_placement(cluster(8, 8), tp, pp, LLAMA_70B, dp=dp, pcp=pcp)

    assert reason in error.value.message
