"""Conditions of a start."""

from __future__ import annotations

from tests.agent import specs
from tests.agent.specs import RAY
from tests.agent.stage import Make, View


def test_a_start_waits_for_all_nodes(make: Make) -> None:
    """Without a deadline; the missing node is named."""
    stage = make()
    stage.lead.away["gpu2"] = ""
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.doing) == ("waiting", "waiting for the agent of gpu2")
    assert stage.lead.nodes["gpu1"].last == 0

    stage.lead.away.clear()
    stage.until("ready")


def test_a_start_waits_for_memory(make: Make) -> None:
    """With the node's message, because an operator must stop the process."""
    stage = make()
    stage.lead.nodes[
        "gpu2"
    ].waits = "GPU 0 has 70.0 of 80.0 GiB in use, by python3 (pid 7, 70.0 GiB)"
    stage.run(100)
    assert stage.status.state == "waiting"
    assert (
        stage.status.doing
        == "gpu2: GPU 0 has 70.0 of 80.0 GiB in use, by python3 (pid 7, 70.0 GiB)"
    )

    stage.lead.nodes["gpu2"].waits = ""
    stage.until("ready")


def test_a_start_waits_for_ray(make: Make, view: type[View]) -> None:
    """With the reason, including an unresponsive dashboard."""
    stage = make(RAY)
    view.lacks = "waiting for gpu2 to join Ray: it has 1 of 2 GPUs"
    stage.run(10)
    assert (stage.status.state, stage.status.doing) == (
        "waiting",
        "waiting for gpu2 to join Ray: it has 1 of 2 GPUs",
    )
    view.lacks = OSError("refused")
    stage.run(10)
    assert stage.status.doing == "waiting for Ray's dashboard to answer"
    view.lacks = ""
    stage.until("ready")
    assert set(view.looked) == {1}


def test_ray_is_queried_again_for_another_server(make: Make, view: type[View]) -> None:
    """An earlier server's answer does not count."""
    stage = make(RAY)
    stage.lead.nodes["gpu2"].waits = "GPU 0 has 1 GiB free"
    stage.run(10)
    assert view.looked
    stage.store_spec(specs.ray("gpu1", "gpu2", id="other", asked=2.0))
    view.lacks = "waiting for gpu2 to join Ray: it has 1 of 2 GPUs"
    stage.lead.nodes["gpu2"].waits = ""
    stage.run(10)

    assert (stage.status.id, stage.status.state, stage.status.doing) == (
        "other",
        "waiting",
        view.lacks,
    )


def test_two_queries_after_a_death(ready: Make, view: type[View]) -> None:
    """Ray may list a dead process as alive."""
    stage = ready(RAY)
    view.looked.clear()
    stage.kill("gpu1")
    stage.until("pausing")
    stage.until("ready")

    assert set(view.looked) == {2}


FULL = "0 of 8 GPUs have 92% of their memory free, 1 needed: GPU 0 has 70.0 of 80.0 GiB in use"


def test_ray_may_place_ranks_on_another_node_than_expected(make: Make, view: type[View]) -> None:
    """Another server uses the expected one: the free GPUs of all nodes decide."""
    stage = make(specs.ray("gpu1", "gpu2", places={"gpu1": 2}), "gpu2")
    first, two = stage.lead.nodes["gpu1"], stage.lead.nodes["gpu2"]
    first.waits, first.idle = FULL, {"room": [1, 0]}
    two.waits, two.idle = FULL, {"room": [1, 1]}
    stage.run(100)
    assert stage.status.state == "waiting"
    assert stage.status.doing == f"gpu1: {FULL}; gpu2: {FULL}"

    two.idle = {"room": [1, 2]}
    view.placed = []
    stage.until("ready")


def test_stale_reports_do_not_count(make: Make, view: type[View]) -> None:
    """Nor does a node with an unknown state."""
    stage = make(specs.ray("gpu1", "gpu2", places={"gpu1": 1}), "gpu2")
    first, two = stage.lead.nodes["gpu1"], stage.lead.nodes["gpu2"]
    first.waits, first.idle, two.idle = FULL, {"room": [1, 0]}, {"room": [7, 8]}
    stage.run(100)
    assert stage.status.state == "waiting"

    first.idle, two.idle = {}, {"room": [1, 8]}
    stage.run(100)
    assert stage.status.state == "waiting"


def test_a_server_of_mp_needs_the_gpus_of_its_own_nodes(make: Make) -> None:
    """GPUs of other nodes are useless to it."""
    stage = make(specs.mp("gpu1", addresses={"gpu1": "10.0.0.1", "gpu2": "10.0.0.2"}), "gpu2")
    stage.lead.nodes["gpu1"].waits, stage.lead.nodes["gpu1"].idle = FULL, {"room": [1, 0]}
    stage.lead.nodes["gpu2"].idle = {"room": [1, 8]}
    stage.run(100)
    assert (stage.status.state, stage.status.doing) == ("waiting", f"gpu1: {FULL}")


def test_a_node_without_the_choice_of_gpus_is_not_prepared(make: Make) -> None:
    """Its free GPUs were counted before."""
    stage = make(specs.mp("gpu1", "gpu2"))
    stage.lead.late.add("gpu2")
    stage.run(20)
    assert stage.status.state == "waiting"
    stage.lead.late.clear()
    stage.until("ready")


def test_ranks_on_another_node_than_expected_are_awaited(make: Make, view: type[View]) -> None:
    """Ray placed one on it: it must exit before the next start."""
    view.placed = []
    stage = make(specs.ray("gpu1", "gpu2", places={"gpu1": 1}), "gpu2")
    stage.until("ready")
    stage.lead.nodes["gpu2"].idle = {"state": "stopping"}
    stage.kill("gpu1")
    stage.run(100)
    assert stage.status.state == "stopping"

    stage.lead.nodes["gpu2"].idle = {}
    assert stage.until("ready").generation == 2
