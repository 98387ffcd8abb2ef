"""`vlaunch export kubernetes --kind statefulset`: pods that keep themselves together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.agent import desired
from tests import golden
from tests.export.exports import CASES, RDMA, inventory
from tests.export.kubernetes_export import Export, env, shown

KIND = ("--kind", "statefulset")


def template(found: Export) -> dict[str, Any]:
    """Return the pods' spec."""
    spec: dict[str, Any] = found.of("StatefulSet")["spec"]["template"]["spec"]
    return spec


def kept(found: Export) -> desired.Desired:
    """Return the server that the first pod's agent is told to keep."""
    return desired.read(json.loads(found.of("ConfigMap")["data"]["server.json"]))


def test_golden(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that is printed but for the programs."""
    found = Export(capsys, pair, *KIND, *RDMA, "--memory", "900GiB", "--pod-monitor")
    file = Path(__file__).parent / "golden" / "kubernetes-statefulset.yaml"

    golden.check(file, shown(found.text))


def test_the_agents_keep_the_ranks_of_serve(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words as for LeaderWorkerSets, with pods' names in the place of variables: nodes,
    the address to meet at, and each rank's number.
    """
    stateful = kept(Export(capsys, pair, *KIND, *RDMA))
    group = Export(capsys, pair, *RDMA)
    names = {"$(LWS_LEADER_ADDRESS)": "pair-0.pair-ranks", "$(LWS_WORKER_INDEX)": "1"}
    told = [group.container(), group.container("workerTemplate")]

    assert [list(each.argv) for each in stateful.processes] == [
        [names.get(word, word) for word in each["args"]] for each in told
    ]
    assert [each.node for each in stateful.processes] == ["pair-0", "pair-1"]
    assert stateful.places == {"pair-0": 8, "pair-1": 8}
    assert stateful.addresses == {
        "pair-0": "pair-0.pair-ranks",
        "pair-1": "pair-1.pair-ranks",
    }
    assert (stateful.policy.restarts, stateful.policy.stuck) == (3, 120)
    assert "NCCL_DEBUG_FILE" not in stateful.processes[0].env


def test_all_pods_are_told_the_same(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who leads is said by name, and each pod's own is the kubelet's to fill in."""
    found = Export(capsys, pair, *KIND, *RDMA)
    (container,) = template(found)["containers"]
    args = container["args"]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
        if "valueFrom" in each
    }

    assert args[:5] == ["agent", "--node", "$(POD_NAME)", "--head", "pair-0.pair-ranks"]
    assert args[args.index("--leader") + 1] == "pair-0"
    assert args[args.index("--server") + 1] == "/opt/vlaunch/server.json"
    assert "--aloud" in args
    assert fields["POD_NAME"] == "metadata.name"
    (gate,) = template(found)["initContainers"]
    assert gate["args"][gate["args"].index("--rank") + 1] == "$(POD_INDEX)"
    assert gate["args"][gate["args"].index("--met") + 1] == "29560"
    assert fields["POD_INDEX"] == "metadata.labels['apps.kubernetes.io/pod-index']"


def test_the_agent_alone_restarts(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A probe that ended a pod would be a second opinion; ready is what the agent says."""
    (container,) = template(Export(capsys, pair, *KIND, *RDMA))["containers"]

    assert [key for key in container if "Probe" in key] == ["readinessProbe"]
    assert container["readinessProbe"]["exec"]["command"][2] == "ready"


def test_agents_know_each_other_by_a_secret(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the line that makes it, beside the inventory's own."""
    found = Export(capsys, pair, *KIND, *RDMA)

    assert 'openssl rand -hex 32 >"$d/RAY_AUTH_TOKEN"' in found.text
    assert {"name": "server", "emptyDir": {}} in template(found)["volumes"]
    assert "RAY_AUTH_TOKEN" not in Export(capsys, pair, *RDMA).text.partition("apiVersion")[0]


def test_pods_find_each_other_before_they_are_ready(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a Service of their own; the API's selects the first one."""
    found = Export(capsys, pair, *KIND, *RDMA)
    ranks, api = (each["spec"] for each in found.objects if each["kind"] == "Service")

    assert found.of("StatefulSet")["spec"]["serviceName"] == "pair-ranks"
    assert (ranks["clusterIP"], ranks["publishNotReadyAddresses"]) == ("None", True)
    assert api["selector"] == {"statefulset.kubernetes.io/pod-name": "pair-0"}


def test_its_agent_is_scraped_as_well(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the wall around the pods, where somebody asks for it."""
    scraped = Export(capsys, pair, *KIND, *RDMA, "--pod-monitor")
    ports = scraped.of("NetworkPolicy")["spec"]["ingress"][1]["ports"]
    alone = Export(capsys, pair, *KIND, *RDMA).of("NetworkPolicy")["spec"]["ingress"][1]["ports"]

    assert [each["port"] for each in ports] == [8000, 29580]
    assert [each["port"] for each in alone] == [8000]
    endpoints = scraped.of("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in endpoints] == ["http", "agent"]


def test_one_template_needs_nodes_that_are_alike(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them: the first one is none of its own here."""
    pair.write_text(
        pair.read_text().replace(
            '{host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}',
            "{host: a, ip: 10.0.0.1, gpus: 8, env: {A: b}}\n  - {host: b, ip: 10.0.0.2, gpus: 8}",
        )
    )

    assert Export(capsys, pair, *RDMA, "--host-network").code == 0
    refused = Export(capsys, pair, *KIND, *RDMA, "--host-network")
    assert (refused.code, refused.text) == (2, "")
    assert "the nodes must have the same `interface`, `hca` and `env`" in refused.error
    assert "the nodes behind" not in refused.error


def test_pods_change_when_they_are_deleted(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which the head says; pods of a LeaderWorkerSet are its controller's to replace."""
    line = "kubectl delete pods -l app.kubernetes.io/instance=pair"

    assert f"After a change delete all pods, which stay as they were till then: {line}\n" in (
        Export(capsys, pair, *KIND, *RDMA).text
    )
    assert line not in Export(capsys, pair, *RDMA).text


def test_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """It proves no network; its agent keeps it all the same."""
    found = Export(capsys, inventory("workstation"), *CASES["workstation"][1], *KIND)

    assert found.of("StatefulSet")["spec"]["replicas"] == 1
    assert "initContainers" not in template(found)
    (process,) = kept(found).processes
    assert process.argv[process.argv.index("--host") + 1] == "0.0.0.0"
    assert env(template(found)["containers"][0])["HF_HOME"]
