"""Conditions of a start."""

from __future__ import annotations

from tests.agent import specs
from tests.agent.specs import RAY
from tests.agent.stage import Make, View


def test_nothing_runs_before_all_nodes_are_there(make: Make) -> None:
    """However long it takes; which one is waited for is said."""
    stage = make()
    stage.lead.away["gpu2"] = ""
    stage.run(1000, step=5)
    assert (stage.status.state, stage.status.doing) == ("waiting", "waiting for the agent of gpu2")
    assert stage.lead.nodes["gpu1"].last == 0

    stage.lead.away.clear()
    stage.until("ready")


def test_memory_that_somebody_holds_is_waited_for(make: Make) -> None:
    """With the words of the node, for somebody has to end that process."""
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


def test_what_ray_lacks_is_waited_for(make: Make, view: type[View]) -> None:
    """And said; also that its dashboard does not answer."""
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


def test_ray_is_asked_anew_for_another_server(make: Make, view: type[View]) -> None:
    """An earlier server's answer does not count for this one."""
    stage = make(RAY)
    stage.lead.nodes["gpu2"].waits = "GPU 0 has 1 GiB free"
    stage.run(10)
    assert view.looked
    stage.want(specs.ray("gpu1", "gpu2", id="other", asked=2.0))
    view.lacks = "waiting for gpu2 to join Ray: it has 1 of 2 GPUs"
    stage.lead.nodes["gpu2"].waits = ""
    stage.run(10)

    assert (stage.status.id, stage.status.state, stage.status.doing) == (
        "other",
        "waiting",
        view.lacks,
    )


def test_after_a_death_it_is_looked_twice(ready: Make, view: type[View]) -> None:
    """Ray may take for alive what has just died."""
    stage = ready(RAY)
    view.looked.clear()
    stage.kill("gpu1")
    stage.until("pausing")
    stage.until("ready")

    assert set(view.looked) == {2}


FULL = "0 of 8 GPUs have 92% of their memory free, 1 needed: GPU 0 has 70.0 of 80.0 GiB in use"


def test_ray_may_place_ranks_on_another_node_than_expected(make: Make, view: type[View]) -> None:
    """The expected one is full, of a neighbour: the nodes' free GPUs together decide."""
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


def test_what_was_free_for_another_start_does_not_count(make: Make, view: type[View]) -> None:
    """Nor does a node of which nobody can say."""
    stage = make(specs.ray("gpu1", "gpu2", places={"gpu1": 1}), "gpu2")
    first, two = stage.lead.nodes["gpu1"], stage.lead.nodes["gpu2"]
    first.waits, first.idle, two.idle = FULL, {"room": [1, 0]}, {"room": [7, 8]}
    stage.run(100)
    assert stage.status.state == "waiting"

    first.idle, two.idle = {}, {"room": [1, 8]}
    stage.run(100)
    assert stage.status.state == "waiting"


def test_a_server_of_mp_needs_the_gpus_of_its_own_nodes(make: Make) -> None:
    """Those of another node are of no use to it."""
    stage = make(specs.mp("gpu1", addresses={"gpu1": "10.0.0.1", "gpu2": "10.0.0.2"}), "gpu2")
    stage.lead.nodes["gpu1"].waits, stage.lead.nodes["gpu1"].idle = FULL, {"room": [1, 0]}
    stage.lead.nodes["gpu2"].idle = {"room": [1, 8]}
    stage.run(100)
    assert (stage.status.state, stage.status.doing) == ("waiting", f"gpu1: {FULL}")


def test_a_node_that_has_not_heard_which_gpus_is_not_prepared(make: Make) -> None:
    """Its free GPUs were counted before."""
    stage = make(specs.mp("gpu1", "gpu2"))
    stage.lead.late.add("gpu2")
    stage.run(20)
    assert stage.status.state == "waiting"
    stage.lead.late.clear()
    stage.until("ready")


def test_ranks_on_another_node_than_expected_are_awaited(make: Make, view: type[View]) -> None:
    """Ray had placed one there: it must end before the next start."""
    view.placed = []
    stage = make(specs.ray("gpu1", "gpu2", places={"gpu1": 1}), "gpu2")
    stage.until("ready")
    stage.lead.nodes["gpu2"].idle = {"state": "stopping"}
    stage.kill("gpu1")
    stage.run(100)
    assert stage.status.state == "stopping"

    stage.lead.nodes["gpu2"].idle = {}
    assert stage.until("ready").generation == 2
