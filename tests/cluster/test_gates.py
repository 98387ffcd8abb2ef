"""The gates of `up` on simulated nodes, for all outcomes of a start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.app.apply import apply
from launcher.cluster import gates
from launcher.core.check import worst_status
from launcher.core.domain import Answer, Inventory, Secret
from launcher.core.errors import GateError
from launcher.core.plan import Gate, Plan, Stage
from launcher.core.transport import run_by_node
from launcher.tools.site import Site
from tests import plan_case as case
from tests.fakes import FakeTransport
from tests.simulated import World

Load = Callable[..., Inventory]
SECRETS = {"RAY_AUTH_TOKEN": Secret("tok")}


@pytest.fixture
def up(load: Load) -> World:
    """A running cluster of two nodes."""
    inventory = load()
    world = World(inventory)
    case.bring_up(inventory, world, SECRETS)
    return world


def fail(gate: Gate, world: World) -> GateError:
    """Run a gate that must fail and return its error."""
    plan = Plan(verb="up", stages=(Stage(id="s", title="S", gates=(gate,)),))
    with pytest.raises(GateError) as caught:
        case.drain(plan, FakeTransport(world.answer))
    return caught.value


def cluster(world: World) -> Gate:
    return gates.cluster_gate(Site(world.inventory), {}, deadline=20, hold=3)


def test_every_gate_passes_on_a_running_cluster(up: World) -> None:
    """None of them changes it."""
    up.changes.clear()
    inventory, transport = up.inventory, FakeTransport(up.answer)
    all_gates = [
        gates.versions_gate(
            inventory.cluster, inventory.nodes, inventory.image, "2.60.0", "3.12.3"
        ),
        gates.gpus_gate(inventory.cluster, inventory.nodes, inventory.image),
        gates.head_gate(Site(inventory)),
        cluster(up),
        gates.agents_gate(Site(inventory), deadline=20),
    ]

    assert {
        gate.id: worst_status(gate.judge(run_by_node(transport, gate.queries)))
        for gate in all_gates
    } == dict.fromkeys(("ray-version", "gpus-in-docker", "head", "ray-nodes", "agents"), "pass")
    assert up.changes == []


def test_every_wait_and_every_query_has_a_deadline(up: World) -> None:
    """On both ends."""
    for gate in (
        gates.head_gate(Site(up.inventory)),
        cluster(up),
        gates.agents_gate(Site(up.inventory), deadline=20),
    ):
        assert gate.deadline > 0
        assert all(0 < command.timeout <= 120 for command in (*gate.queries, *gate.evidence))


def test_a_worker_that_cannot_reach_the_head_is_named(up: World) -> None:
    """With its log and the fix; only its own log is queried."""
    up.machines["gpu02"].joins = False
    up.machines[
        "gpu02"
    ].logs = "Failed to connect to GCS at address 10.0.0.11:6379 within 5 seconds.\n"
    error = fail(cluster(up), up)

    assert (
        error.message
        == "timed out after 20s: gpu02: has not joined Ray under 10.0.0.12: the node cannot reach"
        " the head's Ray: the head does not run (yet), the address or port is wrong, or a firewall"
        " blocks it"
    )
    assert error.evidence == "Failed to connect to GCS at address 10.0.0.11:6379 within 5 seconds."
    assert "allow TCP between the nodes" in error.hint


def test_a_head_that_dies_while_workers_join_is_named(up: World) -> None:
    """Not the workers that wait for it."""
    up.stop("gpu01", code=1)
    up.machines["gpu01"].logs = "bind: Address already in use\n"
    error = fail(cluster(up), up)

    assert (
        error.message == "gpu01: its container exited with code 1 (0 restarts): a port is already"
        " in use"
    )


def test_a_node_under_the_wrong_address_fails(up: World) -> None:
    """Docker's bridge instead of the declared one."""
    up.machines["gpu02"].ray_ip = "172.17.0.1"
    error = fail(cluster(up), up)

    assert (
        "Ray has nodes that are not in the inventory: 172.17.0.1"
        in f"{error.message}\n{error.evidence}"
    )
    assert "gpu02: has not joined Ray under 10.0.0.12" in error.evidence


def test_gpus_missing_in_containers_fail_before_ray_starts(up: World) -> None:
    """Counted in a container."""
    up.machines["gpu02"].gpus = 7
    error = fail(gates.gpus_gate(up.inventory.cluster, up.inventory.nodes, up.inventory.image), up)

    assert error.message == "gpu02: a container sees 7 GPUs, 8 declared"


def test_a_container_in_a_restart_loop_ends_the_wait(up: World) -> None:
    """Before the deadline."""
    up.container("gpu02")["RestartCount"] = 4
    up.machines["gpu02"].joins = False
    transport = FakeTransport(up.answer)
    plan = Plan(verb="up", stages=(Stage(id="s", title="S", gates=(cluster(up),)),))
    with pytest.raises(GateError, match=r"gpu02: its container exited with code 0 \(4 restarts\)"):
        list(apply(plan, transport, sleep=lambda _: pytest.fail("waited")))


def test_a_restarted_container_that_has_joined_passes(up: World) -> None:
    """Docker's restart count never decreases."""
    up.container("gpu02")["RestartCount"] = 4

    assert (
        worst_status(cluster(up).judge(run_by_node(FakeTransport(up.answer), cluster(up).queries)))
        == "pass"
    )


def test_a_head_that_does_not_listen_in_time_shows_the_end_of_its_log(up: World) -> None:
    """Even without a known line."""
    up.machines["gpu01"].logs = "".join(f"line {number}\n" for number in range(20))
    handler = up.answer

    def answer(command):  # type: ignore[no-untyped-def]
        return Answer(node="gpu01", code=1) if "socket" in str(command.argv) else handler(command)

    plan = Plan(
        verb="up", stages=(Stage(id="s", title="S", gates=(gates.head_gate(Site(up.inventory)),)),)
    )
    with pytest.raises(GateError) as caught:
        case.drain(plan, FakeTransport(answer))

    assert (
        caught.value.message
        == "timed out after 120s: gpu01: Ray does not listen on 10.0.0.11:6379 yet"
    )
    assert caught.value.evidence.splitlines() == [f"line {number}" for number in range(15, 20)]


@pytest.mark.parametrize("ray", ["", "ray: none"])
def test_the_head_is_ready_when_its_port_listens(ray: str, load: Load) -> None:
    """Ray's port, or else the agent's."""
    inventory = load(ray)
    gate, port = (
        gates.head_gate(Site(inventory)),
        inventory.ports.group if ray else inventory.ports.gcs,
    )

    assert f"('10.0.0.11', {port})" in str(gate.queries[-1].argv)
    assert gate.what == ("the head's agent listens" if ray else "the Ray head listens")


@pytest.mark.parametrize(
    ("members", "waits"),
    [
        ({"gpu01": 0.0, "gpu02": 0.5}, []),
        ({"gpu01": 0.0}, ["gpu02"]),
        ({"gpu01": 0.0, "gpu02": 61.0}, ["gpu02"]),
        (None, ["gpu01"]),
    ],
)
def test_an_agent_is_connected_when_the_head_has_reached_it(
    members: dict[str, float] | None, waits: list[str], up: World
) -> None:
    """The contact must be recent; without the head's report, the gate waits for the head."""
    up.responses["servers"] = (
        "no answer" if members is None else {"servers": [], "members": members, "agent": 1.0}
    )
    gate = gates.agents_gate(Site(up.inventory), deadline=20)

    assert [
        command.node
        for command in gate.judge(run_by_node(FakeTransport(up.answer), gate.queries))
        if command.status != "pass"
    ] == waits


def test_a_missing_log_does_not_hide_the_failure(up: World) -> None:
    """The container may be gone, and its log with it."""
    up.machines["gpu02"].containers.clear()

    assert fail(cluster(up), up).message.startswith("gpu02: its container is gone")
