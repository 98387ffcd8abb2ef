"""Helpers for the tests of exported pods: the pods of a server, and its answer."""

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
from tests.integration import lab_pods
from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster
from tests.integration.lab_pods import Object
from tests.integration.servers import url

T = TypeVar("T")
START = 900.0  # seconds for a complete start, on shared cores
# Two stages over two nodes, as in all tests of exports.
PARALLELISM = ("--tp", "1", "--pp", "2")
# Fictitious, like all secrets of the lab.
SECRETS = {"VLLM_API_KEY": API_KEY, "HF_TOKEN": HF_TOKEN}
_PROMPT = "def main"


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its text, and vLLM's fingerprint (version, parallelism, settings)."""

    text: str
    fingerprint: str


def query_server(lab_cluster: LabCluster, host: str = "node1") -> Answer:
    """Send the server a greedy completion request."""
    body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(
        f"{url(lab_cluster, host)}/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        payload = json.load(answer)
    return Answer(text=payload["choices"][0]["text"], fingerprint=payload["system_fingerprint"])


def run_on_all(lab_cluster: LabCluster, action: Callable[[Host], T]) -> list[T]:
    """Call a function for all hosts at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(action, lab_cluster.lab.hosts))


@dataclass(frozen=True)
class Group:
    """A server's pods, one per host, with the objects that they read."""

    lab_cluster: LabCluster
    pods: list[Object]
    objects: list[Object]
    workload: Object

    def start(self) -> None:
        """Start all pods at once."""
        results = run_on_all(
            self.lab_cluster,
            lambda host: lab_pods.play_pod(host, self.pod(host), self.objects, START),
        )
        assert [result.returncode for result in results] == [0, 0], results

    def stop(self) -> None:
        """Delete all pods, as the controller does before it recreates a group."""
        run_on_all(self.lab_cluster, lab_pods.remove_pods)

    def pod(self, host: Host) -> Object:
        """Return the pod of a host."""
        return self.pods[self.lab_cluster.lab.hosts.index(host)]

    def container(self, host: Host) -> str:
        """Return podman's name for the container of a host's pod."""
        return f"{self.pod(host)['metadata']['name']}-vllm"

    def is_healthy(self, name: str) -> bool:
        """Run a probe of the API's pod as the kubelet does."""
        (container,) = self.pods[0]["spec"]["containers"]
        (port,) = container["ports"]
        path = container[name]["httpGet"]["path"]
        address = f"http://{self.lab_cluster.lab.hosts[0].ip}:{port['containerPort']}{path}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def log(self, host: Host) -> str:
        """Return the log of a host's container."""
        completed = lab_pods.podman(host, "logs", self.container(host))
        return completed.stdout + completed.stderr

    def state(self, host: Host) -> str:
        """Return the state of a container, such as `running 0`, with its restarts."""
        template = "{{.State.Status}} {{.RestartCount}}"
        name = self.container(host)
        return lab_pods.podman(host, "inspect", "--format", template, name).stdout.strip()


def export_group(
    lab_cluster: LabCluster, *arguments: str, split: tuple[str, ...] = PARALLELISM
) -> Group:
    """Export the lab's server, with the Secret that the header requires."""
    result = lab_cluster.vlaunch("export", "kubernetes", *split, *arguments)
    assert result.code == 0, result.output
    manifests = [manifest for manifest in yaml.safe_load_all(result.out) if manifest]
    (line,) = re.findall("(.*) kubectl create secret generic lab-secrets", result.out)
    names = re.findall(r'>"\$d/(\w+)"', line)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "lab-secrets"},
        "stringData": {name: SECRETS[name] for name in names},
    }
    config = [manifest for manifest in manifests if manifest["kind"] == "ConfigMap"]
    pods = lab_pods.build_pods(manifests, lab_cluster.lab)
    return Group(lab_cluster, pods, [*config, secret], manifests[0])
