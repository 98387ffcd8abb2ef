"""Orders for the nodes of a server."""

from __future__ import annotations

from launcher.agent.desired import Desired
from tests.agent import specs
from tests.agent.stage import Make, View


def test_a_processs_environment(make: Make) -> None:
    """Its own GPUs in the vendor's variable, and the API's address where the first one runs."""
    first = specs.process("gpu1", "vllm", "serve", env={"A": "b"}, gpus=(2, 3))
    stage = make(
        specs.mp(
            "gpu1",
            "gpu2",
            processes=(first, specs.process("gpu2", *specs.HEADLESS)),
            visible="CUDA_VISIBLE_DEVICES",
            memory_share=0.9,
        )
    )
    stage.until("starting")
    single, two = stage.orders["gpu1"], stage.orders["gpu2"]

    assert (single.argv, single.env, single.gpus) == (
        ("vllm", "serve"),
        {"A": "b", "CUDA_VISIBLE_DEVICES": "2,3"},
        (2, 3),
    )
    assert (two.env, two.gpus) == ({}, None)
    assert (single.api, two.api, single.share) == (("127.0.0.1", 8000), None, 0.9)


def test_gpus_per_node(make: Make, view: type[View]) -> None:
    """For `mp`, its ranks on the node; Ray may place ranks on any node, so all are checked and
    watched.
    """

    def ordered(spec: Desired) -> dict[str, tuple[float | None, int]]:
        stage = make(spec, "gpu2")
        stage.lead.nodes["gpu1"].waits = "x"
        stage.run(5)
        return {node: (item.share, item.count) for node, item in stage.orders.items()}

    places = {"gpu1": 2, "gpu2": 0}
    mp = specs.mp("gpu1", "gpu2", places=places, memory_share=0.9)
    ray = specs.ray("gpu1", "gpu2", places={"gpu1": 2}, memory_share=0.9)
    on_cpus = specs.ray("gpu1", "gpu2", places={"gpu1": 2})
    assert ordered(mp) == {"gpu1": (0.9, 2), "gpu2": (None, 0)}
    assert ordered(ray) == {"gpu1": (0.9, 2), "gpu2": (0.9, 1)}
    assert {share for share, _ in ordered(on_cpus).values()} == {None}


def test_apis_are_probed_on_their_nodes(make: Make) -> None:
    """With the numbers of the replicas behind them; a single API has all."""
    settings = {"gpu1": (0, 2), "gpu2": (2, 1)}
    apart = tuple(specs.process(node, replicas=holding) for node, holding in settings.items())
    stage = make(specs.hybrid("gpu1", "gpu2", processes=apart, replicas=3))
    stage.until("starting")
    assert [(order.api, [*range(*order.behind)]) for order in stage.orders.values()] == [
        (("127.0.0.1", 8000), [0, 1]),
        (("127.0.0.1", 8000), [2]),
    ]

    headless = (apart[0], specs.process("gpu2", *specs.HEADLESS, replicas=(2, 1)))
    stage = make(specs.hybrid("gpu1", "gpu2", processes=headless, replicas=3))
    stage.until("starting")
    first, two = stage.orders.values()
    assert (first.behind, two.api) == ((0, 3), None)
