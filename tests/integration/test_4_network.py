"""The network check on real parts: three lab hosts, ranks in the server's containers, faults and
their names.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults import host_faults
from tests.integration import outsiders
from tests.integration.conftest import LabCluster, wait_for_output

pytestmark = pytest.mark.lab

# The brackets keep a command line with the pattern from matching itself.
PROBE, RANK = "[o]pt/vlaunch/network", "[o]pt/vlaunch/network.py.* --child"


@pytest.fixture(scope="module")
def cluster(bare: LabCluster) -> LabCluster:
    """Three nodes without a server, and without Ray, which the probe does not need."""
    bare.write(lambda document: document.update(ray="none"))
    result = bare.vlaunch("up")
    assert result.code == 0, result.output
    return bare


def measure_network(lab_cluster: LabCluster, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the check and return its verdict."""
    result = lab_cluster.vlaunch("check-nccl", "--json", *arguments, timeout=400)
    assert result.code == code, result.output
    verdict: dict[str, Any] = json.loads(result.out)
    return verdict


def failed_directions(verdict: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the directions that failed."""
    return {
        (cell["source"], cell["target"]) for cell in verdict["cells"] if cell["status"] == "fail"
    }


def failed_findings(verdict: dict[str, Any]) -> list[dict[str, str]]:
    """Return the findings that failed."""
    return [finding for finding in verdict["findings"] if finding["status"] == "fail"]


def test_an_interface_missing_on_a_node_is_named(bare: LabCluster) -> None:
    """Before `up`, in temporary containers: the verdict names the node whose `GLOO_SOCKET_IFNAME`
    does not exist.
    """

    def change(document: dict[str, Any]) -> None:
        document["nodes"][1]["env"] = {"GLOO_SOCKET_IFNAME": "ens9"}

    bare.write(change)
    verdict = measure_network(bare, "--pair-timeout", "8", code=1)

    assert failed_directions(verdict) >= {
        ("node1", "node2"),
        ("node2", "node1"),
        ("node2", "node3"),
        ("node3", "node2"),
    }
    assert not failed_directions(verdict) & {("node1", "node3"), ("node3", "node1")}
    assert [(f["node"], "ens9" in f["text"]) for f in failed_findings(verdict)] == [
        ("node2", True)
    ], verdict["findings"]
    assert bare.containers() == {}


def test_every_pair_is_measured(cluster: LabCluster) -> None:
    """Six directions by Gloo with plausible figures, correct data, and an all_reduce over all
    ranks; `status` shows the verdict.
    """
    verdict = measure_network(cluster)
    status = json.loads(cluster.vlaunch("status", "--json").out)

    assert verdict["passed"], verdict
    assert verdict["backend"] == "gloo"
    assert len(verdict["cells"]) == 6
    for cell in verdict["cells"]:
        assert cell["status"] in ("pass", "warn"), cell
        assert cell["transport"] == "Gloo/TCP"
        assert 1e7 < cell["bandwidth"] < 1e11
        assert 1e-6 < cell["latency"] < 0.1
    assert verdict["collective"]["ranks"] == 3
    assert verdict["collective"]["busbw"] > 1e6
    assert status["network"].startswith("verified "), status["network"]


def test_a_slow_pair_is_named_alone(cluster: LabCluster) -> None:
    """100 Mbit/s between node2 and node3, both ways: only that pair fails."""
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.limit_rate(two, "100mbit", three)
    host_faults.limit_rate(three, "100mbit", two)
    try:
        result = cluster.vlaunch("check-nccl", "--json", timeout=400)
    finally:
        host_faults.unlimit_rate(two)
        host_faults.unlimit_rate(three)

    assert result.code == 1, result.output
    verdict = json.loads(result.out)
    assert failed_directions(verdict) == {("node2", "node3"), ("node3", "node2")}
    rates = [cell["bandwidth"] for cell in verdict["cells"] if cell["status"] == "fail"]
    assert all(5e6 < rate < 1.5e7 for rate in rates)
    assert [f["node"] for f in verdict["findings"] if f["status"] == "fail"] == ["node2 ↔ node3"]


def test_a_slow_host_is_named_itself(cluster: LabCluster) -> None:
    """100 Mbit/s for all traffic of node3: the verdict names the node once, not each of its pairs;
    after the repair it passes.
    """
    three = cluster.lab.host("node3")
    host_faults.limit_rate(three, "100mbit")
    try:
        verdict = measure_network(cluster, code=1)
    finally:
        host_faults.unlimit_rate(three)

    assert not failed_directions(verdict) & {("node1", "node2"), ("node2", "node1")}
    assert [f["node"] for f in failed_findings(verdict)] == ["node3"], verdict["findings"]
    assert measure_network(cluster)["passed"]


def test_a_cut_pair_is_named_within_the_deadline(cluster: LabCluster) -> None:
    """node2 and node3 cannot talk, both can talk to node1: the verdict is in time and names the
    pair.
    """
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.cut(two, three)
    began = time.monotonic()
    try:
        result = cluster.vlaunch(
            "check-nccl", "--json", "--pair-timeout", "8", "--deadline", "90", timeout=400
        )
    finally:
        host_faults.heal(two)

    assert time.monotonic() - began < 100
    assert result.code == 1, result.output
    verdict = json.loads(result.out)
    assert failed_directions(verdict) == {("node2", "node3"), ("node3", "node2")}, verdict[
        "findings"
    ]
    failed = [f for f in verdict["findings"] if f["status"] == "fail"]
    assert [f["node"] for f in failed] == ["node2 ↔ node3"], failed
    assert "10.79.0.12" in failed[0]["fix"]


def test_a_node_that_cannot_reach_the_head_is_named(cluster: LabCluster) -> None:
    """Only its ranks are reported missing; the other nodes are measured."""
    head, three = cluster.lab.host("node1"), cluster.lab.host("node3")
    host_faults.cut(three, head, port=29500)
    try:
        result = cluster.vlaunch("check-nccl", "--json", "--deadline", "60", timeout=400)
    finally:
        host_faults.heal(three)

    assert result.code == 1, result.output
    verdict = json.loads(result.out)
    failed = failed_findings(verdict)
    assert any(f["node"] == "node3" and "rendezvous" in f["text"] for f in failed), failed
    assert not failed_directions(verdict) & {("node1", "node2"), ("node2", "node1")}, failed


def test_a_port_in_use_is_named_with_its_node(cluster: LabCluster) -> None:
    """Another program listens on the rendezvous port of the head."""
    head = cluster.lab.host("node1")
    program = (
        "import socket, time; s = socket.create_server(('10.79.0.11', 29500)); print('up',"
        " flush=True); time.sleep(300)"
    )
    host_faults.enter(
        head,
        "sh",
        "-c",
        f'setsid python3 -c "{program}" >/tmp/taken 2>&1 & echo $! > /tmp/taken.pid',
    )
    while "up" not in cluster.on("node1", "cat", "/tmp/taken"):
        pass
    try:
        result = cluster.vlaunch("check-nccl", "--json", timeout=400)
    finally:
        host_faults.enter(head, "sh", "-c", "kill $(cat /tmp/taken.pid)")

    assert result.code == 1, result.output
    failed = [
        f
        for f in json.loads(result.out)["findings"]
        if f["status"] == "fail" and f["node"] == "node1"
    ]
    assert any("29500" in f["text"] and "taken" in f["text"] for f in failed), failed
    assert any("ss -ltnp" in f["fix"] for f in failed)


def test_clients_without_a_valid_certificate_cannot_join(cluster: LabCluster) -> None:
    """The probes refuse them, and the measurement succeeds."""
    process = cluster.start("check-nccl", "--json")
    outsiders.assert_refused(cluster.lab.host("node1"), 29500)
    out, err = wait_for_output(process, 400)

    assert process.returncode == 0, out + err
    assert json.loads(out)["passed"]


KILL = f"pkill -9 -f '{RANK}'"
# Besides the store on the head, a rank is connected to its partner of the round.
PAIRED = f"ss -Htnp state established | grep -v :29500 | grep \"pid=$(pgrep -f '{RANK}'),\""


@pytest.mark.parametrize(
    ("node", "moment"),
    [("node2", KILL), ("node1", KILL), ("node2", f"{PAIRED} && {KILL}")],
    ids=["at its start", "at its start on the head", "mid-test"],
)
def test_a_killed_rank_is_named_alone(cluster: LabCluster, node: str, moment: str) -> None:
    """Right after its start, or after its rendezvous: the verdict names it and its signal, without
    waiting for a deadline.
    """
    process = cluster.start("check-nccl", "--json", "--pair-timeout", "8")
    script = f"until {moment}; do :; done"
    host = cluster.lab.host(node)
    killed = host_faults.enter(host, "timeout", "150", "sh", "-c", script, timeout=160)
    death = time.monotonic()
    out, err = wait_for_output(process, 200)
    seconds = time.monotonic() - death

    assert killed.returncode == 0, killed.stderr
    assert process.returncode == 1, out + err
    verdict = json.loads(out)
    assert [f["node"] for f in failed_findings(verdict)] == [node], out
    text = failed_findings(verdict)[0]["text"]
    assert "killed (signal 9)" in text
    assert ("pair " in text) is ("ss " in moment), text
    assert seconds < 30


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_check_leaves_no_process(cluster: LabCluster, how: signal.Signals) -> None:
    """Ctrl-C, and even SIGKILL of the launcher, end the probes of all nodes at once."""
    process = cluster.start("check-nccl")
    deadline = time.monotonic() + 180
    while not cluster.on("node3", "pgrep", "-f", PROBE):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, how)
    wait_for_output(process, 90)

    assert process.returncode == (130 if how == signal.SIGINT else -how)
    gone = time.monotonic() + 90
    for host in cluster.lab.hosts:
        while cluster.on(host.name, "pgrep", "-f", PROBE):
            assert time.monotonic() < gone, f"the probe goes on on {host.name}"


@pytest.fixture
def cut_pair(cluster: LabCluster) -> Iterator[LabCluster]:
    """The cluster with one pair that cannot talk; the agents' traffic goes through the head."""
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.cut(two, three)
    yield cluster
    host_faults.heal(two)


def test_serve_refuses_on_a_network_that_fails(cut_pair: LabCluster) -> None:
    """A failed verdict does not count: `serve` checks again, names the direction, and starts no
    server.
    """
    measure_network(cut_pair, "--pair-timeout", "4", code=1)
    layout = ("--nodes", "node2,node3", "--tp", "1", "--pp", "2")
    result = cut_pair.vlaunch("serve", *layout, "--pair-timeout", "4", timeout=400)

    assert result.code == 1, result.output
    assert "allow TCP from 10.79.0.13 to 10.79.0.12" in result.err
    assert "vllm serve" not in cut_pair.command_lines()
