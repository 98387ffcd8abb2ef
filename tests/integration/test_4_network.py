"""The network check on real parts: three practice hosts, ranks in the containers that will serve,
faults and their names.
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
from launcher.core.domain import Ports
from launcher.tools import agent_queries
from tests.integration import outsiders
from tests.integration.conftest import Practice, ended

pytestmark = pytest.mark.lab

# In brackets, so that a command line with the pattern in it does not match itself.
PROBE, RANK = "[o]pt/vlaunch/network", "[o]pt/vlaunch/network.py.* --child"


@pytest.fixture(scope="module")
def cluster(bare: Practice) -> Practice:
    """Three nodes in Ray, no server."""
    bare.write()
    ran = bare.vlaunch("up")
    assert ran.code == 0, ran.said
    return bare


def measured(practice: Practice, *words: str, code: int = 0) -> dict[str, Any]:
    """Run the check and return its verdict."""
    ran = practice.vlaunch("check-nccl", "--json", *words, timeout=400)
    assert ran.code == code, ran.said
    verdict: dict[str, Any] = json.loads(ran.out)
    return verdict


def broken(verdict: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the directions that failed."""
    return {
        (cell["source"], cell["target"]) for cell in verdict["cells"] if cell["status"] == "fail"
    }


def failures(verdict: dict[str, Any]) -> list[dict[str, str]]:
    """Return the findings that failed."""
    return [finding for finding in verdict["findings"] if finding["status"] == "fail"]


def test_an_interface_that_one_node_lacks_is_named(bare: Practice) -> None:
    """Before `up`, in throw-away containers: the node whose `GLOO_SOCKET_IFNAME` names nothing is
    told from the others.
    """

    def change(document: dict[str, Any]) -> None:
        document["nodes"][1]["env"] = {"GLOO_SOCKET_IFNAME": "ens9"}

    bare.write(change)
    verdict = measured(bare, "--pair-timeout", "8", code=1)

    assert broken(verdict) >= {
        ("node1", "node2"),
        ("node2", "node1"),
        ("node2", "node3"),
        ("node3", "node2"),
    }
    assert not broken(verdict) & {("node1", "node3"), ("node3", "node1")}
    assert [(f["node"], "ens9" in f["text"]) for f in failures(verdict)] == [("node2", True)], (
        verdict["findings"]
    )
    assert bare.containers() == {}


def test_every_pair_is_measured(cluster: Practice) -> None:
    """Six directions by Gloo with real figures, correct data, and an all_reduce over all ranks;
    `status` knows of it.
    """
    verdict = measured(cluster)
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


def test_a_slow_pair_is_named_alone(cluster: Practice) -> None:
    """100 Mbit/s between node2 and node3, both ways: that pair fails, and no other."""
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.slow(two, "100mbit", three)
    host_faults.slow(three, "100mbit", two)
    try:
        ran = cluster.vlaunch("check-nccl", "--json", timeout=400)
    finally:
        host_faults.unslow(two)
        host_faults.unslow(three)

    assert ran.code == 1, ran.said
    verdict = json.loads(ran.out)
    assert broken(verdict) == {("node2", "node3"), ("node3", "node2")}
    rates = [cell["bandwidth"] for cell in verdict["cells"] if cell["status"] == "fail"]
    assert all(5e6 < rate < 1.5e7 for rate in rates)
    assert [f["node"] for f in verdict["findings"] if f["status"] == "fail"] == ["node2 ↔ node3"]


def test_a_slow_host_is_named_itself(cluster: Practice) -> None:
    """100 Mbit/s for all that node3 sends and gets: the node is named once, not each of its pairs;
    then all is well again.
    """
    three = cluster.lab.host("node3")
    host_faults.slow(three, "100mbit")
    try:
        verdict = measured(cluster, code=1)
    finally:
        host_faults.unslow(three)

    assert not broken(verdict) & {("node1", "node2"), ("node2", "node1")}
    assert [f["node"] for f in failures(verdict)] == ["node3"], verdict["findings"]
    assert measured(cluster)["passed"]


def test_a_cut_pair_is_named_within_the_deadline(cluster: Practice) -> None:
    """node2 and node3 cannot talk, both can talk to node1: the verdict comes in time and names the
    pair.
    """
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.cut(two, three)
    began = time.monotonic()
    try:
        ran = cluster.vlaunch(
            "check-nccl", "--json", "--pair-timeout", "8", "--deadline", "90", timeout=400
        )
    finally:
        host_faults.heal(two)

    assert time.monotonic() - began < 100
    assert ran.code == 1, ran.said
    verdict = json.loads(ran.out)
    assert broken(verdict) == {("node2", "node3"), ("node3", "node2")}, verdict["findings"]
    failed = [f for f in verdict["findings"] if f["status"] == "fail"]
    assert [f["node"] for f in failed] == ["node2 ↔ node3"], failed
    assert "10.79.0.12" in failed[0]["fix"]


def test_a_node_that_cannot_reach_the_head_is_named(cluster: Practice) -> None:
    """Only its ranks are reported as missing; the other nodes are measured."""
    one, three = cluster.lab.host("node1"), cluster.lab.host("node3")
    host_faults.cut(three, one, port=29500)
    try:
        ran = cluster.vlaunch("check-nccl", "--json", "--deadline", "60", timeout=400)
    finally:
        host_faults.heal(three)

    assert ran.code == 1, ran.said
    verdict = json.loads(ran.out)
    failed = failures(verdict)
    assert any(f["node"] == "node3" and "rendezvous" in f["text"] for f in failed), failed
    assert not broken(verdict) & {("node1", "node2"), ("node2", "node1")}, failed


def test_a_taken_port_is_named_with_the_node(cluster: Practice) -> None:
    """Somebody listens on the rendezvous port of the head."""
    one = cluster.lab.host("node1")
    program = (
        "import socket, time; s = socket.create_server(('10.79.0.11', 29500)); print('up',"
        " flush=True); time.sleep(300)"
    )
    host_faults.enter(
        one,
        "sh",
        "-c",
        f'setsid python3 -c "{program}" >/tmp/taken 2>&1 & echo $! > /tmp/taken.pid',
    )
    while "up" not in cluster.on("node1", "cat", "/tmp/taken"):
        pass
    try:
        ran = cluster.vlaunch("check-nccl", "--json", timeout=400)
    finally:
        host_faults.enter(one, "sh", "-c", "kill $(cat /tmp/taken.pid)")

    assert ran.code == 1, ran.said
    failed = [
        f for f in json.loads(ran.out)["findings"] if f["status"] == "fail" and f["node"] == "node1"
    ]
    assert any("29500" in f["text"] and "taken" in f["text"] for f in failed), failed
    assert any("ss -ltnp" in f["fix"] for f in failed)


def test_clients_without_a_valid_certificate_cannot_join(cluster: Practice) -> None:
    """They are refused while the probes gather, and the measurement succeeds."""
    process = cluster.start("check-nccl", "--json")
    outsiders.assert_refused(cluster.lab.host("node1"), 29500)
    out, err = ended(process, 400)

    assert process.returncode == 0, out + err
    assert json.loads(out)["passed"]


KILL = f"pkill -9 -f '{RANK}'"
# Beside the store at the head, a rank is connected with its partner of the round.
PAIRED = f"ss -Htnp state established | grep -v :29500 | grep \"pid=$(pgrep -f '{RANK}'),\""


@pytest.mark.parametrize(
    ("node", "moment"),
    [("node2", KILL), ("node1", KILL), ("node2", f"{PAIRED} && {KILL}")],
    ids=["at its start", "at its start on the head", "mid-test"],
)
def test_a_killed_rank_is_named_alone(cluster: Practice, node: str, moment: str) -> None:
    """As soon as it has started, or when it has met the others: the verdict names it and its
    signal, and no deadline is waited for.
    """
    process = cluster.start("check-nccl", "--json", "--pair-timeout", "8")
    script = f"until {moment}; do :; done"
    killed = host_faults.enter(cluster.lab.host(node), "timeout", "60", "sh", "-c", script)
    out, err = ended(process, 200)

    assert killed.returncode == 0, killed.stderr
    assert process.returncode == 1, out + err
    verdict = json.loads(out)
    assert [f["node"] for f in failures(verdict)] == [node], out
    text = failures(verdict)[0]["text"]
    assert "killed (signal 9)" in text
    assert ("pair " in text) is ("ss " in moment), text
    assert verdict["seconds"] < 55


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_check_that_is_broken_off_leaves_no_process(
    cluster: Practice, how: signal.Signals
) -> None:
    """Ctrl-C, and even the end of the launcher without a word, end the probes of all nodes at
    once.
    """
    process = cluster.start("check-nccl")
    deadline = time.monotonic() + 60
    while not cluster.on("node3", "pgrep", "-f", PROBE):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, how)
    ended(process, 30)

    assert process.returncode == (130 if how == signal.SIGINT else -how)
    gone = time.monotonic() + 30
    for host in cluster.lab.hosts:
        while cluster.on(host.name, "pgrep", "-f", PROBE):
            assert time.monotonic() < gone, f"the probe goes on on {host.name}"


@pytest.fixture
def cut_pair(cluster: Practice) -> Iterator[Practice]:
    """The cluster with one pair that cannot talk; Ray's own traffic is with the head."""
    two, three = cluster.lab.host("node2"), cluster.lab.host("node3")
    host_faults.cut(two, three)
    yield cluster
    host_faults.heal(two)


def test_serve_refuses_on_a_network_that_fails(cut_pair: Practice) -> None:
    """A failed verdict proves nothing: `serve` checks again, names the pair, and starts no
    server.
    """
    measured(cut_pair, "--pair-timeout", "4", code=1)
    ran = cut_pair.vlaunch("serve", "--tp", "1", "--pp", "2", "--pair-timeout", "4", timeout=400)
    jobs = cut_pair.docker("node1", "exec", "vlaunch-lab-node1", *agent_queries.jobs(Ports()))

    assert ran.code == 1, ran.said
    assert "node2 ↔ node3" in ran.err
    assert "vllm" not in jobs
    assert "vllm serve" not in cut_pair.command_lines()
