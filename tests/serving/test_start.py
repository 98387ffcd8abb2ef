"""Plans of starts: a list of replicas, one for one server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.agent.desired import Policy
from launcher.core.errors import RequestError
from launcher.serving.start import Replicas, plan_replicas
from launcher.serving.start_spec import StartSpec
from launcher.tools.site.snapshot import ClusterSnapshot
from tests.served import make_snapshot, server_row

SPEC = StartSpec(
    name="chat",
    model="org/m",
    backend="mp",
    host="0.0.0.0",
    port=8000,
    tp=2,
    pp=1,
    policy=Policy(),
    skip_network_check=True,
)


def plan(snapshot: ClusterSnapshot | None = None, **changes: Any) -> Replicas:
    return plan_replicas(replace(SPEC, **changes), snapshot or make_snapshot(), requested_at=7.0)


def running(replicas: Replicas) -> ClusterSnapshot:
    return make_snapshot(*(server_row(replica.start.spec) for replica in replicas.listed))


def titles(replicas: Replicas) -> list[str]:
    return [stage.title for stage in replicas.creation_plan().stages]


def test_one_server_is_a_list_of_one() -> None:
    """With the plan of its own start."""
    replicas = plan()
    (replica,) = replicas.listed

    assert (replica.spec, replicas.grouped, replicas.in_turn) == (SPEC, False, [])
    assert replicas.creation_plan().stages == replica.start.plan.stages
    assert titles(replicas) == ["Check the cluster and the model", "Create the server"]


def test_replicas_have_one_plan() -> None:
    """All checks come first, and only the first checks the arguments."""
    replicas = plan(replicas=2)

    assert titles(replicas) == [
        "Check the cluster and the model for server `chat`",
        "Check the cluster and the model for server `chat.2`",
        "Create 2 servers",
    ]
    first, second, create = replicas.creation_plan().stages
    assert "engine-flags" in [gate.id for gate in first.gates]
    assert "engine-flags" not in [gate.id for gate in second.gates]
    assert len(create.steps) == 2
    assert [replica.start.spec.asked for replica in replicas.listed] == [7.0, 7.0]


def test_another_server_of_its_name_is_replaced_at_once() -> None:
    """One server has no turn to wait for."""
    replicas = plan(running(plan()), replace_other=True, args=("--seed", "7"))

    assert (replicas.in_turn, len(replicas.started)) == ([], 1)
    with pytest.raises(RequestError, match="server `chat` is already running org/m"):
        plan(running(plan()), args=("--seed", "7"))


def test_running_replicas_wait_for_their_turn() -> None:
    """The others are checked first, with new ones; the first has its own checks."""
    snapshot = running(plan(replicas=2))
    replicas = plan(snapshot, replicas=3, replace_other=True, args=("--seed", "7"))

    assert [replica.spec.name for replica in replicas.in_turn] == ["chat", "chat.2"]
    assert [stage.title for stage in replicas.waiting_checks().stages] == [
        "Check the cluster and the model for server `chat.2`",
        "Check the cluster and the model for server `chat.3`",
    ]
    assert not any(stage.steps for stage in replicas.waiting_checks().stages)


def test_replicas_that_stay_have_no_plan() -> None:
    """Without a number, as many as run; those beyond the number are removed."""
    snapshot = running(plan(replicas=2))
    same, fewer = plan(snapshot), plan(snapshot, replicas=1)

    assert (len(same.listed), same.started, same.creation_plan().stages) == (2, [], ())
    assert [server.name for server in fewer.removed] == ["chat.2"]
    assert (same.removed, fewer.started) == ((), [])


def test_one_replica_is_planned_alone() -> None:
    """In its turn, without the others of its name."""
    replicas = plan(running(plan(replicas=2)), partial=True, nodes=("n1",), gpus=2)

    assert (len(replicas.listed), replicas.grouped) == (1, False)


@pytest.mark.parametrize(("planned", "nodes"), [(False, ["n1"]), (True, ["n1", "n2"])])
def test_nodes_that_need_the_model(planned: bool, nodes: list[str]) -> None:
    """Those with ranks; all, as long as the planner cannot choose."""
    spec = replace(SPEC, planned=planned, tp=None if planned else 2, pp=None if planned else 1)
    replicas = plan_replicas(spec, make_snapshot(), requested_at=7.0, guess=True)

    assert [node.name for node in replicas.nodes] == nodes
    if planned:
        with pytest.raises(RequestError, match="no node has the configuration of org/m"):
            plan_replicas(spec, make_snapshot(), requested_at=7.0)
