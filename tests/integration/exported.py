"""What the tests of exported pods share: the pods of a server, and its answer."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import yaml

from launcher.lab.host_configs import MODEL
from launcher.lab.layout import Host
from tests.integration import practice_pods
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice
from tests.integration.practice_pods import Object
from tests.integration.servers import url

T = TypeVar("T")
START = 900.0  # seconds for all of a start, on cores that others use, too
# Two stages over two nodes, as everywhere here.
SPLIT = ("--tp", "1", "--pp", "2")
# Made up, like the rest of the practice server's secrets.
GIVEN = {"VLLM_API_KEY": API_KEY, "HF_TOKEN": HF_TOKEN}
_PROMPT = "def main"


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its words, and what vLLM says of version, split and settings."""

    words: str
    fingerprint: str


def ask(practice: Practice, host: str = "node1") -> Answer:
    """Ask the server for a greedy completion."""
    body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(
        f"{url(practice, host)}/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    return Answer(words=said["choices"][0]["text"], fingerprint=said["system_fingerprint"])


def on_all(practice: Practice, do: Callable[[Host], T]) -> list[T]:
    """Do something on all hosts at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(do, practice.lab.hosts))


@dataclass(frozen=True)
class Group:
    """A server's pods, one for each host, with the objects that they read."""

    practice: Practice
    pods: list[Object]
    beside: list[Object]
    workload: Object

    def play(self) -> None:
        """Start all pods at once."""
        ended = on_all(
            self.practice,
            lambda host: practice_pods.play(host, self.pod(host), self.beside, START),
        )
        assert [done.returncode for done in ended] == [0, 0], ended

    def end(self) -> None:
        """Delete all pods, as the controller does with a group that it recreates."""
        on_all(self.practice, practice_pods.end)

    def pod(self, host: Host) -> Object:
        """Return the pod of a host."""
        return self.pods[self.practice.lab.hosts.index(host)]

    def container(self, host: Host) -> str:
        """Return podman's name for the container of a host's pod."""
        return f"{self.pod(host)['metadata']['name']}-vllm"

    def healthy(self, name: str) -> bool:
        """Run a probe of the pod with the API as the kubelet does."""
        (container,) = self.pods[0]["spec"]["containers"]
        (port,) = container["ports"]
        path = container[name]["httpGet"]["path"]
        address = f"http://{self.practice.lab.hosts[0].ip}:{port['containerPort']}{path}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def log(self, host: Host) -> str:
        """Return the log of a host's container."""
        done = practice_pods.podman(host, "logs", self.container(host))
        return done.stdout + done.stderr

    def state(self, host: Host) -> str:
        """Return the state of a container, such as `running 0`, with its restarts."""
        words = "{{.State.Status}} {{.RestartCount}}"
        name = self.container(host)
        return practice_pods.podman(host, "inspect", "--format", words, name).stdout.strip()


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
    pods = practice_pods.pods(manifests, practice.lab)
    return Group(practice, pods, [*config, secret], manifests[0])
