"""Preconditions of a job on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.batch import preconditions
from launcher.batch.checked_job import JobError
from launcher.core.domain import Inventory
from launcher.core.errors import PlacementError
from tests.batch.conftest import Load


@pytest.mark.parametrize(
    ("extra", "top"),
    [
        ("", {}),
        ("engine: {tp: 2, replicas: [1, 8]}", {}),
        ("engine: {tp: 2, placement: strict-spread}", {}),
        ("data_parallel: 4", {}),
        ("predict: {class: 'a:B', num_gpus: 2}", {"model": None}),
        ("", {"read": "read: nodes:/data/in/a.csv", "write": "write: nodes:/data/shared/out"}),
        ("", {"write": "write: nodes:/data/huggingface/out"}),
        ("", {"write": "write: s3://b/out"}),
    ],
)
def test_jobs_that_fit(
    load_text: Load, inventory: Inventory, extra: str, top: dict[str, str | None]
) -> None:
    """The minimum is available; the maximum may exceed the cluster."""
    preconditions.check_fit(load_text(extra, **top), inventory)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("engine: {replicas: [5, 6]}", "it needs at least 5 GPUs, but the nodes have 4"),
        (
            "engine: {tp: 4, placement: strict-pack}",
            "tp 4 x pp 1 needs 4 GPUs on one node, but no node has more than 2",
        ),
        (
            "engine: {tp: 3, placement: strict-spread}",
            "tp 3 x pp 1 needs 3 nodes with one GPU each, but there are 2",
        ),
        ("data_parallel: 5", "it needs at least 5 GPUs, but the nodes have 4"),
        (
            "data_parallel: 1\nengine: {tp: 4}",
            "a rank needs 4 GPUs on one node, but no node has more than 2",
        ),
        (
            "data_parallel: 1\nengine: {tp: 2, pp: 2}",
            "a rank needs 4 GPUs on one node, but no node has more than 2",
        ),
    ],
)
def test_impossible_jobs_are_rejected_first(
    load_text: Load, inventory: Inventory, extra: str, expected: str
) -> None:
    """Without waiting forever."""
    with pytest.raises(PlacementError) as caught:
        preconditions.check_fit(load_text(extra), inventory)

    assert str(caught.value) == f"`test` does not fit `pair`: {expected}"
    assert caught.value.hint


def test_a_class_needs_a_node_with_its_gpus(load_text: Load, inventory: Inventory) -> None:
    """With `accelerator: cpu` they are slots, as in vLLM."""
    job = load_text("predict: {class: 'a:B', num_gpus: 0.5}", model=None)

    preconditions.check_fit(job, inventory)
    preconditions.check_fit(job, replace(inventory, accelerator="cpu"))
    with pytest.raises(PlacementError, match="needs 3 GPUs, but no node has more than 2"):
        preconditions.check_fit(
            load_text("predict: {class: 'a:B', num_gpus: 3}", model=None), inventory
        )


def test_paths_must_be_mounted_in_containers(load_text: Load, inventory: Inventory) -> None:
    """Otherwise answers would be lost with the container."""
    job = load_text(read="read: nodes:/data/input/a.csv", write="write: nodes:/data/in/out")

    with pytest.raises(JobError) as caught:
        preconditions.check_fit(job, inventory)
    assert caught.value.mistakes == (
        (
            "nodes:/data/input/a.csv: is outside every path mounted into"
            " the containers: /data/huggingface, /data/in, /data/shared"
        ),
        "nodes:/data/in/out: is mounted read-only",
    )
    assert "pair.yaml" in caught.value.hint


@pytest.mark.parametrize(
    ("extra", "top", "what"),
    [
        ("data_parallel: 3\nengine: {tp: 2}", {}, "3 ranks"),
        ("engine: {tp: 2, replicas: 3, placement: strict-pack}", {}, "3 replicas"),
        (
            "predict: {class: 'a:B', num_gpus: 2, replicas: 3}",
            {"model": None},
            "3 replicas of its class",
        ),
    ],
)
def test_leftover_gpus_per_node_are_no_room(
    load_text: Load, inventory: Inventory, extra: str, top: dict[str, str | None], what: str
) -> None:
    """Six GPUs are free, but only two pairs of them."""
    three = replace(inventory, nodes=tuple(replace(node, gpus=3) for node in inventory.nodes))
    text = f"it needs {what} with 2 GPUs on one node each, but the nodes have room for 2"
    with pytest.raises(PlacementError, match=text):
        preconditions.check_fit(load_text(extra, **top), three)
    preconditions.check_fit(load_text(extra.replace(": 3", ": 2"), **top), three)
