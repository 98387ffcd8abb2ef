"""`vlaunch export kubernetes` on two practice hosts: podman plays the pods of its LeaderWorkerSet
in the hosts' network. The proof of the network, an answer, and what becomes of a rank that dies.

Each test stands on the one before. No controller is here: what it does to pods is done by
`practice_pods.py`.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from subprocess import CompletedProcess

import pytest
import yaml

from benchmarks.faults import host_faults
from launcher.lab.layout import Host
from tests import debian13
from tests.integration import practice_pods
from tests.integration.batches import kill_one, running, until
from tests.integration.conftest import Practice
from tests.integration.exported import GIVEN, SPLIT, Answer, ask, on_all
from tests.integration.practice_pods import Object, podman
from tests.integration.servers import answers, asking, lost, url

pytestmark = [pytest.mark.lab, pytest.mark.long]
START = 900.0  # seconds for all of a start, on cores that others use, too
REPLICAS = ("--tp", "1", "--pp", "1", "--dp", "2")


@dataclass(frozen=True)
class Group:
    """A server's pods, one for each host, with the objects that they read."""

    practice: Practice
    pods: list[Object]
    beside: list[Object]

    def play(self) -> list[CompletedProcess[str]]:
        """Start all pods at once; return how that ended."""
        return on_all(
            self.practice,
            lambda host: practice_pods.play(host, self.pod(host), self.beside, START),
        )

    def end(self) -> None:
        """Delete all pods, as the controller does with a group that it starts anew."""
        on_all(self.practice, practice_pods.end)

    def pod(self, host: Host) -> Object:
        """Return the pod of a host."""
        return self.pods[self.practice.lab.hosts.index(host)]

    def container(self, host: Host, name: str = "vllm") -> str:
        """Return what podman calls a container of a host's pod."""
        return f"{self.pod(host)['metadata']['name']}-{name}"

    def probe(self, name: str, host: Host | None = None) -> int:
        """Run a probe of a pod, the one with the API, as the kubelet does; return how it ended."""
        host = host or self.practice.lab.hosts[0]
        (container,) = self.pod(host)["spec"]["containers"]
        argv = container[name]["exec"]["command"]
        return podman(host, "exec", self.container(host), *argv, timeout=90).returncode

    def ready(self) -> bool:
        """Tell whether all pods are ready by their own probes."""
        return not any(self.probe("readinessProbe", host) for host in self.practice.lab.hosts)

    def state(self, host: Host, name: str = "vllm") -> str:
        """Return the state of a container, such as `running 0`, with its restarts."""
        words = "{{.State.Status}} {{.RestartCount}}"
        return podman(host, "inspect", "--format", words, self.container(host, name)).stdout.strip()


@pytest.fixture(scope="module")
def hosts(practice: Practice, answer_of_serve: Answer) -> Iterator[Practice]:
    """Hosts with nothing on them but podman and the image."""
    if debian13.program("podman") is None:
        pytest.skip(f"podman {debian13.MISSING}")
    practice.write()
    assert practice.vlaunch("down", "--purge").code == 0
    practice_pods.load(practice.lab.hosts[0])
    yield practice
    on_all(practice, practice_pods.end)
    practice_pods.forget(practice.lab)


def exported(practice: Practice, *words: str, split: tuple[str, ...] = SPLIT) -> Group:
    """Export the practice server, with the Secret that the header asks for."""
    ran = practice.vlaunch("export", "kubernetes", *split, *words)
    assert ran.code == 0, ran.said
    manifests = [each for each in yaml.safe_load_all(ran.out) if each]
    (line,) = re.findall("(.*) kubectl create secret generic lab-secrets", ran.out)
    asked = re.findall(r'>"\$d/(\w+)"', line)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "lab-secrets"},
        "stringData": {name: GIVEN[name] for name in asked},
    }
    config = [each for each in manifests if each["kind"] == "ConfigMap"]
    return Group(practice, practice_pods.pods(manifests, practice.lab), [*config, secret])


@pytest.fixture(scope="module")
def group(hosts: Practice) -> Group:
    """The server of the inventory."""
    return exported(hosts)


def test_nothing_starts_where_packets_are_dropped(hosts: Practice) -> None:
    """The init container fails in both pods with the reason, and the server is never started."""
    group = exported(hosts, "--timeout", "20")
    one, two = hosts.lab.hosts
    with host_faults.apart(one, two):
        ended = group.play()

    for host, each in zip(hosts.lab.hosts, ended, strict=True):
        assert "init container" in each.stderr, each
        assert "FAIL" in podman(host, "logs", group.container(host, "network")).stdout
        assert group.state(host) == "created 0"
    assert [line for _, line in running(hosts, "vllm serve")] == []
    group.end()


def test_the_pods_answer(group: Group, answer_of_serve: Answer) -> None:
    """With the words, the split and the settings of `vlaunch serve`, to who has the key; started
    and alive are said by the probes.
    """
    ended = group.play()
    assert [each.returncode for each in ended] == [0, 0], ended
    until(lambda: group.probe("startupProbe") == 0, "the startup probe passes", START)

    assert ask(group.practice) == answer_of_serve
    assert group.probe("livenessProbe") == 0
    with urllib.request.urlopen(_health(group.practice), timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url(group.practice)}/models", timeout=10)


def test_a_rank_that_dies_ends_its_container(group: Group) -> None:
    """Which is what the controller starts the group anew for; then it answers again."""
    one, two = group.practice.lab.hosts
    with asking(group.practice) as traffic:
        kill_one(group.practice, "VLLM::Worker", "node2")
        until(lambda: group.state(two) != "running 0", "the rank's container has ended", 120)
        until(lambda: lost(traffic), "a request fails", 60)
    group.end()
    ended = group.play()

    assert [each.returncode for each in ended] == [0, 0], ended
    until(lambda: answers(group.practice).ok, "it answers again", START)
    assert group.state(one) == "running 0"


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
    ended = group.play()
    assert [each.returncode for each in ended] == [0, 0], ended
    until(lambda: answers(hosts).ok, "the replicas answer", START)

    found = ask(hosts)
    assert found.words == answer_of_serve.words
    assert "dp2" in found.fingerprint
    group.end()


def _health(practice: Practice) -> str:
    return url(practice).replace("/v1", "/health")
