"""What a node is told to start."""

from __future__ import annotations

from tests.payload.agent import wanted
from tests.payload.agent.stage import Make


def test_what_a_process_is_given(make: Make) -> None:
    """Its own GPUs by the variable that names them, and the API's address where the first one
    runs.
    """
    first = wanted.process("gpu1", "vllm", "serve", env={"A": "b"}, gpus=(2, 3))
    stage = make(
        wanted.mp(
            "gpu1",
            "gpu2",
            processes=(first, wanted.process("gpu2")),
            visible="CUDA_VISIBLE_DEVICES",
            memory_share=0.9,
        )
    )
    stage.until("starting")
    one, two = stage.orders["gpu1"], stage.orders["gpu2"]

    assert (one.argv, one.env, one.gpus) == (
        ("vllm", "serve"),
        {"A": "b", "CUDA_VISIBLE_DEVICES": "2,3"},
        (2, 3),
    )
    assert (two.env, two.gpus) == ({}, None)
    assert (one.api, two.api, one.share) == (("127.0.0.1", 8000), None, 0.9)
