"""`vlaunch export kubernetes` on two practice hosts: podman plays the pods of its LeaderWorkerSet
in the hosts' network. The network check, an answer, and a group whose rank dies.

Each test stands on the one before. No controller is here: what it does to pods is done by
`practice_pods.py`.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.faults import host_faults
from launcher.lab import image
from tests import debian13
from tests.integration import practice_pods
from tests.integration.batches import kill_one, running, until
from tests.integration.conftest import Practice
from tests.integration.exported import START, Answer, Group, ask, exported, on_all
from tests.integration.servers import answers, asking, lost, url

pytestmark = [pytest.mark.lab, pytest.mark.long]
REPLICAS = ("--tp", "1", "--pp", "1", "--dp", "2")


@pytest.fixture(scope="module")
def hosts(practice: Practice, answer_of_serve: Answer) -> Iterator[Practice]:
    """Hosts with nothing on them but podman and the image."""
    if debian13.program("podman") is None:
        pytest.skip(f"podman {debian13.MISSING}")
    practice.write()
    assert practice.vlaunch("down", "--yes", "--purge").code == 0
    archive = debian13.ROOT.parent / f"image-{image.cache_key()}.tar"
    practice_pods.load(practice.lab.hosts[0], archive, image.NAME)
    yield practice
    on_all(practice, practice_pods.end)
    practice_pods.forget(practice.lab)


@pytest.fixture(scope="module")
def group(hosts: Practice) -> Group:
    """The server of the inventory."""
    on_all(hosts, practice_pods.end)
    return exported(hosts)


def servers(practice: Practice) -> list[str]:
    """Return the command lines of vLLM; that of the network check names it, too."""
    return [line for _, line in running(practice, "vllm serve") if "network.pyz" not in line]


def test_nothing_starts_where_packets_are_dropped(hosts: Practice) -> None:
    """The check fails in both pods with the reason, no server starts, and both containers wait with
    their logs.
    """
    group = exported(hosts, "--timeout", "20")
    one, two = hosts.lab.hosts
    with host_faults.apart(one, two):
        group.play()
        for host in hosts.lab.hosts:
            until(lambda host=host: "is not started" in group.log(host), "the check fails", 200)

    assert "FAIL pod1 → pod0, local rank 0: rank 1 (pod1) did not arrive" in group.log(one)
    assert "FAIL rank 1 in phase" in group.log(two)
    assert "did not open lab-0.lab-0.default:29500 within 20 s" in group.log(two)
    assert [group.state(host) for host in hosts.lab.hosts] == ["running 0", "running 0"]
    assert servers(hosts) == []
    group.end()


def test_the_pods_answer(group: Group, answer_of_serve: Answer) -> None:
    """The check passes; the answer has the words, the split and the settings of `vlaunch serve`,
    and needs the key; the probes pass.
    """
    group.play()
    until(lambda: group.healthy("startupProbe"), "the startup probe passes", START)

    for host in group.practice.lab.hosts:
        assert "PASS every link between the 2 pods reaches `any`" in group.log(host)
    assert ask(group.practice) == answer_of_serve
    assert group.healthy("livenessProbe")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url(group.practice)}/models", timeout=10)


def test_a_group_recovers_from_the_death_of_a_rank(group: Group, answer_of_serve: Answer) -> None:
    """Its container ends, for which the controller recreates all pods; all check the network and
    answer again.
    """
    one, two = group.practice.lab.hosts
    with asking(group.practice) as traffic:
        kill_one(group.practice, "VLLM::Worker", "node2")
        until(lambda: group.state(two) != "running 0", "the rank's container has ended", 120)
        until(lambda: lost(traffic), "a request fails", 60)
    group.end()
    group.play()
    until(lambda: answers(group.practice).ok, "it answers again", START)

    assert ask(group.practice) == answer_of_serve
    assert [group.log(host).count("PASS every link") for host in (one, two)] == [1, 1]
    assert group.state(one) == "running 0"


def test_a_failed_check_ends_at_once_with_its_pod(hosts: Practice, group: Group) -> None:
    """A waiting container handles the signal by which the kubelet ends it."""
    group.end()
    alone = exported(hosts, "--timeout", "5")
    one = hosts.lab.hosts[0]
    practice_pods.play(one, alone.pod(one), alone.beside, START)
    until(lambda: "is not started" in alone.log(one), "the check fails", 200)

    assert practice_pods.podman(one, "stop", "--time", "30", alone.container(one)).returncode == 0
    state = practice_pods.podman(
        one, "inspect", "--format", "{{.State.ExitCode}}", alone.container(one)
    )
    assert state.stdout.strip() == "143"


def test_nothing_is_left_of_deleted_pods(group: Group) -> None:
    """No container, volume, secret or process on any host."""
    group.end()

    for host in group.practice.lab.hosts:
        assert list(practice_pods.left(host)) == []
    assert [line for _, line in running(group.practice, "vllm")] == []


def test_replicas_meet_at_the_name_of_the_first_pod(
    hosts: Practice, answer_of_serve: Answer
) -> None:
    """Where vLLM's engines look for their coordinator: pods have no address before they run."""
    group = exported(hosts, split=REPLICAS)
    group.play()
    until(lambda: answers(hosts).ok, "the replicas answer", START)

    found = ask(hosts)
    assert found.words == answer_of_serve.words
    assert "dp2" in found.fingerprint
    group.end()
