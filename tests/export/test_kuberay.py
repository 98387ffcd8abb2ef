"""`vlaunch export kubernetes --kind kuberay`: a Ray job with its cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run_command
from tests import golden
from tests.export.exports import CASES, RDMA, inventory
from tests.export.kubernetes_export import Export, env, shown

KIND = ("--kind", "kuberay")


@pytest.fixture
def export(pair: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """An export of two pods."""
    return Export(capsys, pair, *KIND, *RDMA)


def cluster(export: Export) -> dict[str, Any]:
    """Return the job's cluster."""
    spec: dict[str, Any] = export.of("RayJob")["spec"]["rayClusterSpec"]
    return spec


def containers(export: Export) -> list[dict[str, Any]]:
    """Return the containers of Ray, the head's first."""
    created = cluster(export)
    groups = [created["headGroupSpec"], *created["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def test_golden(export: Export) -> None:
    """The whole output except for the programs."""
    golden.check(Path(__file__).parent / "golden" / "kubernetes-kuberay.yaml", shown(export.text))


def test_the_job_is_the_server(
    export: Export, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arguments of `vllm serve` with Ray are the launcher's own."""
    run_command(["serve", "-i", str(pair), "--backend", "ray", "--dry-run", "--offline"])
    script = capsys.readouterr().out
    spec = export.of("RayJob")["spec"]
    wait, _, command = spec["entrypoint"].rpartition("; ")
    argv = ", ".join(f'"{part}"' for part in shlex.split(command))

    assert f'"argv": [{argv}]'.replace('"127.0.0.1"', '"0.0.0.0"') in script.replace(
        '"127.0.0.1"', '"0.0.0.0"'
    )
    assert wait == "until test -e /tmp/network-checked; do sleep 1; done"
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (3, True)
    assert spec["submissionMode"] == "HTTPMode"


def test_ray_is_started_by_the_operators_command(
    export: Export, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With GPUs, and the ports that other pods use."""
    head = cluster(export)["headGroupSpec"]["rayStartParams"]
    (worker,) = cluster(export)["workerGroupSpecs"]
    own = {"num-gpus": "8", "metrics-export-port": "6384", "disable-usage-stats": "true"}
    assert head == {"port": "6379", "dashboard-port": "8265", **own}
    assert worker["rayStartParams"] == own
    assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (1, 1, 1)
    ports = {port["name"]: port["containerPort"] for port in containers(export)[0]["ports"]}
    named = {"gcs-server": 6379, "dashboard": 8265, "network-check": 29500, "http": 8000}
    assert ports == named
    pair.write_text(pair.read_text() + "ray: {object_store: 200MB}\n")
    stored = cluster(Export(capsys, pair, *KIND, *RDMA))["headGroupSpec"]["rayStartParams"]
    assert stored["object-store-memory"] == "200000000"


def test_ray_has_the_operators_token(export: Export) -> None:
    """It is not in the pods' specs; secrets are files."""
    for container in containers(export):
        assert container["args"][0].startswith("for file in /run/vlaunch/secrets/*; do export ")
        assert "RAY_ADDRESS" not in env(container)
        assert not [name for name in env(container) if name.startswith("RAY_AUTH")]
    assert cluster(export)["authOptions"] == {"mode": "token"}
    assert cluster(export)["rayVersion"] == "2.60.0"
    assert "RAY_AUTH_TOKEN=" not in export.text


def test_the_network_is_checked_before_the_server(
    export: Export, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker's Ray starts after its check; the head's starts beside it, as the operator delays
    workers until then, and the job waits for its mark.
    """
    created = cluster(export)
    groups = [created["headGroupSpec"], *created["workerGroupSpecs"]]
    notes = [group["template"]["metadata"]["annotations"] for group in groups]
    head, worker = (
        container["args"][0].partition("; done\n")[2] for container in containers(export)
    )
    start = "ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD"
    assert notes == [{"ray.io/overwrite-container-cmd": "true"}] * 2
    assert '--rank 0 --size 2 --master "$VLLM_HOST_IP"' in head
    assert head.endswith(f"touch /tmp/network-checked &\n{start}\n")
    assert head.startswith("python3 /opt/vlaunch/network.pyz ")
    assert '--rank 1 --size 2 --master "$FQ_RAY_IP"' in worker
    assert worker.startswith("exec python3 /opt/vlaunch/network.pyz ")
    assert worker.endswith(f"-- \\\n  sh -c '{start}'\n")
    skipped = Export(capsys, pair, *KIND, *RDMA, "--skip-network-check")

    assert all(
        container["args"][0].endswith(f"; done\n{start}\n") for container in containers(skipped)
    )
    assert skipped.of("RayJob")["spec"]["entrypoint"].startswith("vllm serve ")


def test_only_the_operator_reaches_the_dashboard(export: Export) -> None:
    """The dashboard can run programs; pods of all namespaces reach the API."""
    _, others, operator = export.of("NetworkPolicy")["spec"]["ingress"]

    assert [port["port"] for port in others["ports"]] == [8000]
    assert [port["port"] for port in operator["ports"]] == [8265]
    assert others["from"] == [{"namespaceSelector": {}}]
    (client,) = operator["from"]
    assert client["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/component": "kuberay-operator"
    }


def test_nodes_may_differ(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have their own templates."""
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
    export = Export(capsys, pair, *KIND, *RDMA, "--host-network", "--tp", "8", "--pp", "4")

    assert export.code == 0, export.error
    assert [env(container).get("A") for container in containers(export)] == [None, "b", "c", None]


def test_one_node_has_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """The head has the ranks."""
    export = Export(capsys, inventory("workstation"), *KIND, *CASES["workstation"][1])

    assert "workerGroupSpecs" not in cluster(export)
    assert int(cluster(export)["headGroupSpec"]["rayStartParams"]["num-gpus"]) > 0
