"""Fixed ports: purpose, and owners of listeners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.core.domain import Inventory
from launcher.front import front_plan
from launcher.hosts.check import Evidence
from launcher.hosts.checks.catalogue import select_checks
from launcher.hosts.checks.ports import ports_of
from launcher.tools import agent_queries, ray
from launcher.tools.docker import Container
from launcher.tools.host.survey import Survey
from launcher.tools.site import Site
from tests.containers import container
from tests.hosts.checks.conftest import Good, Load, first, judge

RUNNING = container()


def test_a_port_in_use_is_named_with_its_purpose(load: Load, good: Good) -> None:
    """With a command that shows its owner."""
    finding = first("ports", load, good(listening=frozenset({("0.0.0.0", 6379), ("::", 8000)})))

    assert (finding.status, finding.text) == (
        "fail",
        "port 6379 (Ray head), 8000 (vLLM API) is in use",
    )
    assert "ss -ltnp 'sport = :6379'" in finding.fix


def test_a_worker_needs_only_its_own_ports(load: Load, good: Good) -> None:
    """Another program may listen on port 6379 of a worker."""
    busy = good("10.0.0.12", listening=frozenset({("0.0.0.0", 6379)}))
    own = good("10.0.0.12", listening=frozenset({("0.0.0.0", 6380)}))

    assert [finding.status for finding in judge("ports", load(), gpu01=good(), gpu02=busy)] == [
        "pass",
        "pass",
    ]
    assert (
        judge("ports", load(), gpu01=good(), gpu02=own)[1].text
        == "port 6380 (Ray node manager) is in use"
    )


@pytest.mark.parametrize(
    ("extra", "nodes", "used"),
    [
        ("serve: {backend: mp}", "", "29501 (vLLM's rendezvous), 29560 (the nodes' agents)"),
        (
            "serve: {backend: mp, dp: 2}",
            "",
            "29550 (the replicas' rendezvous), 29560 (the nodes' agents)",
        ),
        ("serve: {dp: 2}", "", "29560 (the nodes' agents)"),
        ("ray: none", "", "29501 (vLLM's rendezvous), 29560 (the nodes' agents)"),
        (
            "serve: {backend: mp}",
            "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 2}]",
            "29560 (the nodes' agents)",
        ),
    ],
)
def test_rendezvous_ports_of_ranks(
    extra: str, nodes: str, used: str, load: Load, good: Good
) -> None:
    """On the head, for ranks on several nodes without Ray; agents always need theirs."""
    busy = frozenset(("0.0.0.0", port) for port in (29501, 29550, 29560))
    inventory = load(extra, nodes)
    facts = {node.name: good(node.ip, listening=busy) for node in inventory.nodes}
    texts = [
        finding.text for finding in judge("ports", inventory, **facts) if finding.status == "fail"
    ]

    assert texts == [f"port {used} is in use"]


def test_without_ray_its_ports_are_not_needed(load: Load, good: Good) -> None:
    """Another user's Ray may run on these nodes."""
    facts = good(listening=frozenset(("0.0.0.0", port) for port in (6379, 8265, 6380)))

    assert first("ports", load, facts, "ray: none").status == "pass"


def running(inventory: Inventory) -> Container:
    """Return the head's container as `up` starts it from this inventory."""
    head = inventory.head
    start = ray.start_head(head, inventory)
    agent = agent_queries.run_agent(
        start,
        node=head.name,
        head=head.ip,
        port=inventory.ports.group,
        metrics=inventory.ports.metrics,
        lead=True,
        private_shm=True,
    )
    return replace(RUNNING, argv=("/opt/vlaunch/entry.sh", *agent))


@pytest.mark.parametrize(
    "serve",
    ["", "serve: {backend: mp}", "serve: {backend: mp, dp: 2}", "ports: {metrics: 9400}"],
)
def test_ports_of_the_clusters_own_containers_are_no_conflict(
    serve: str, load: Load, good: Good
) -> None:
    """A second `up` sees its own listeners."""
    inventory = load(serve)
    fixed = set(ports_of(inventory, inventory.head)) - {inventory.ports.probe}
    facts = good(
        listening=frozenset(("0.0.0.0", port) for port in fixed), containers=(running(inventory),)
    )
    finding = judge("ports", inventory, gpu01=facts)[0]

    assert (finding.status, finding.text) == (
        "pass",
        "in use by this cluster's own containers",
    )


@pytest.mark.parametrize(
    ("ports", "used", "text"),
    [
        ("gcs: 6400", 6400, "port 6400 (Ray head) is in use"),
        ("node_manager: 6400", 6400, "port 6400 (Ray node manager) is in use"),
        ("gcs: 6400, dashboard: 6379", 6379, ""),
        ("metrics: 6400", 6400, "port 6400 (the agent's metrics) is in use"),
    ],
)
def test_a_port_outside_the_running_container_is_a_conflict(
    ports: str, used: int, text: str, load: Load, good: Good
) -> None:
    """After an inventory change, `up` removes containers before new ones bind: their ports will be
    free.
    """
    changed = load(f"ports: {{{ports}}}")
    facts = good(
        listening=frozenset({("0.0.0.0", 6379), ("0.0.0.0", used)}), containers=(running(load()),)
    )
    finding = judge("ports", changed, gpu01=facts)[0]

    assert finding.text == text if text else finding.status == "pass"


def test_a_temporary_container_has_no_port_of_the_cluster(load: Load, good: Good) -> None:
    """The network check of another run uses it, which blocks this one."""
    probe = replace(RUNNING, role="probe", argv=("python3", "network.py", "--port", "29500"))

    assert (
        first(
            "ports", load, good(listening=frozenset({("0.0.0.0", 29500)}), containers=(probe,))
        ).status
        == "fail"
    )


def test_ports_of_an_exited_container_are_not_the_clusters_own(load: Load, good: Good) -> None:
    """The listener is another process."""
    ended = replace(RUNNING, status="exited")

    assert (
        first(
            "ports", load, good(listening=frozenset({("0.0.0.0", 6379)}), containers=(ended,))
        ).status
        == "fail"
    )


def test_the_port_of_the_network_check_must_be_free(load: Load, good: Good) -> None:
    """Even while the cluster runs: none of its containers uses it."""
    facts = good(
        listening=frozenset({("0.0.0.0", 29500), ("::", 6379)}), containers=(running(load()),)
    )
    finding = first("ports", load, facts)

    assert (finding.status, finding.text) == ("fail", "port 29500 (network check) is in use")


@pytest.mark.parametrize(
    ("ports", "status"),
    [
        (None, "skip"),
        ((32768, 60999), "pass"),
        ((40000, 50000), "pass"),
        ((1024, 65535), "warn"),
        ((32767, 60999), "warn"),
        ((32768, 61000), "warn"),
    ],
)
def test_ports_that_the_firewall_leaves_open_are_a_warning(
    load: Load, good: Good, ports: tuple[int, int] | None, status: str
) -> None:
    """Sockets without a password listen on them."""
    facts = {"gpu01": good(survey=Survey(port_range=ports))}
    (check,) = select_checks(only=("port-range",))
    finding = check.judge(Evidence(inventory=load(), facts=facts))[0]

    assert finding.status == status
    if status == "warn":
        assert f"{ports[0]} to {ports[1]}" in finding.text if ports else False
        assert finding.text.endswith("`vlaunch export firewall` closes only 32768 to 60999")
        assert "export firewall --scan" in finding.fix
        assert 'ip_local_port_range="32768 60999"' in finding.fix


def test_the_new_port_of_a_running_front_must_be_free(load: Load, good: Good) -> None:
    """Its old one is its own."""
    before, after = (load(f"front: {{image: haproxy:3.2, port: {port}}}") for port in (8443, 8444))
    front = front_plan.front_spec(Site(before), before.head)
    own = replace(RUNNING, role="front", argv=front.command)
    listening = frozenset(("0.0.0.0", port) for port in (8443, 8444))
    facts = good(listening=listening, containers=(own,))

    assert judge("ports", after, gpu01=facts)[0].text == "port 8444 (the front) is in use"
    assert judge("ports", before, gpu01=facts)[0].status == "pass"
