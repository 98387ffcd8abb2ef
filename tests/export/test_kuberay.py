"""`vlaunch export kubernetes --kind kuberay`: a job of Ray's that brings its cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run
from tests import golden
from tests.export.exports import CASES, RDMA, inventory
from tests.export.kubernetes_export import Export, env, shown

KIND = ("--kind", "kuberay")


@pytest.fixture
def found(pair: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Two pods."""
    return Export(capsys, pair, *KIND, *RDMA)


def cluster(found: Export) -> dict[str, Any]:
    """Return the cluster that the job brings."""
    spec: dict[str, Any] = found.of("RayJob")["spec"]["rayClusterSpec"]
    return spec


def containers(found: Export) -> list[dict[str, Any]]:
    """Return the containers in which Ray runs, the head's first."""
    made = cluster(found)
    groups = [made["headGroupSpec"], *made["workerGroupSpecs"]]
    return [each["template"]["spec"]["containers"][0] for each in groups]


def test_golden(found: Export) -> None:
    """All that is printed but for the programs."""
    golden.check(Path(__file__).parent / "golden" / "kubernetes-kuberay.yaml", shown(found.text))


def test_the_job_is_the_server(
    found: Export, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of `vllm serve` with Ray are the launcher's own."""
    run(["serve", "-i", str(pair), "--backend", "ray", "--dry-run", "--offline"])
    script = capsys.readouterr().out
    spec = found.of("RayJob")["spec"]
    words = ", ".join(f'"{word}"' for word in shlex.split(spec["entrypoint"]))

    assert f'"argv": [{words}]'.replace('"127.0.0.1"', '"0.0.0.0"') in script.replace(
        '"127.0.0.1"', '"0.0.0.0"'
    )
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (3, True)
    assert spec["submissionMode"] == "HTTPMode"


def test_ray_is_started_as_up_does(found: Export) -> None:
    """What the operator does not say itself: ports and GPUs; it must reach the dashboard."""
    head = cluster(found)["headGroupSpec"]["rayStartParams"]
    (worker,) = cluster(found)["workerGroupSpecs"]

    assert (head["port"], head["dashboard-port"], head["num-gpus"]) == ("6379", "8265", "8")
    assert head["disable-usage-stats"] == "true"
    for operators in ("head", "block", "address", "node-ip-address", "dashboard-host"):
        assert operators not in head
        assert operators not in worker["rayStartParams"]
    assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (1, 1, 1)
    assert worker["rayStartParams"]["node-manager-port"] == head["node-manager-port"]
    ports = {each["name"]: each["containerPort"] for each in containers(found)[0]["ports"]}
    assert ports == {
        "metrics": 6384,
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "http": 8000,
    }


def test_secrets_come_through_the_entry_script(found: Export) -> None:
    """As on nodes; Ray's own token is the operator's, which says where it is."""
    for made in containers(found):
        assert made["command"] == ["/bin/sh", "/opt/vlaunch/entry.sh"]
        assert made["args"][-1].endswith("exec $KUBERAY_GEN_RAY_START_CMD")
        assert "RAY_ADDRESS" not in env(made)
        assert not [name for name in env(made) if name.startswith("RAY_AUTH")]
    head = cluster(found)["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert head["ray.io/overwrite-container-cmd"] == "true"
    assert cluster(found)["authOptions"] == {"mode": "token"}
    assert cluster(found)["rayVersion"] == "2.60.0"
    assert "RAY_AUTH_TOKEN=" not in found.text


def test_the_gate_knows_each_pod(found: Export) -> None:
    """By a group for each node; the head is found before it is ready."""
    made = cluster(found)
    groups = [made["headGroupSpec"], *made["workerGroupSpecs"]]
    gates = [each["template"]["spec"]["initContainers"][0]["args"] for each in groups]
    assert {gate[gate.index("--met") + 1] for gate in gates} == {"6379"}
    service = next(each for each in found.objects if each["metadata"]["name"] == "pair-ranks")

    assert [gate[gate.index("--rank") + 1] for gate in gates] == ["0", "1"]
    assert {gate[gate.index("--master") + 1] for gate in gates} == {"pair-ranks"}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"]["ray.io/node-type"] == "head"


def test_the_operator_alone_reaches_the_dashboard(found: Export) -> None:
    """Where programs are run; pods of any namespace reach the API."""
    _, others, operator = found.of("NetworkPolicy")["spec"]["ingress"]

    assert [each["port"] for each in others["ports"]] == [8000]
    assert [each["port"] for each in operator["ports"]] == [8265]
    assert others["from"] == [{"namespaceSelector": {}}]
    (whom,) = operator["from"]
    assert whom["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}


def test_a_budget_counts_pods(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes cannot know how many pods a cluster of Ray's should have; of others it can."""
    budget = "--disruption-budget"
    ray = Export(capsys, pair, *KIND, *RDMA, budget).of("PodDisruptionBudget")["spec"]
    other = Export(capsys, pair, *RDMA, budget).of("PodDisruptionBudget")["spec"]

    assert (ray.get("minAvailable"), ray.get("maxUnavailable")) == (2, None)
    assert (other.get("minAvailable"), other.get("maxUnavailable")) == (None, 0)


def test_nodes_may_differ(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a template of its own."""
    pair.write_text(
        pair.read_text().replace(
            '{host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}',
            "\n  - ".join(
                (
                    "{host: a, ip: 10.0.0.1, gpus: 8}",
                    "{host: b, ip: 10.0.0.2, gpus: 8, env: {A: b}}",
                    "{host: c, ip: 10.0.0.3, gpus: 8, env: {A: c}}",
                    "{host: d, ip: 10.0.0.4, gpus: 8}",
                )
            ),
        )
    )
    found = Export(capsys, pair, *KIND, *RDMA, "--host-network", "--tp", "8", "--pp", "4")

    assert found.code == 0, found.error
    assert [env(each).get("A") for each in containers(found)] == [None, "b", "c", None]


def test_one_node_has_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """The head takes part."""
    found = Export(capsys, inventory("workstation"), *KIND, *CASES["workstation"][1])

    assert "workerGroupSpecs" not in cluster(found)
    assert int(cluster(found)["headGroupSpec"]["rayStartParams"]["num-gpus"]) > 0
