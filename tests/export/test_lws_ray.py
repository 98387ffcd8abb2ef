"""`vlaunch export kubernetes --backend ray`: pods in which agents start Ray, and a server in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run
from launcher.payload.agent import desired
from tests import golden
from tests.export.exports import CASES, RDMA, inventory
from tests.export.kubernetes_export import Export, env, shown

RAY = ("--backend", "ray")


@pytest.fixture
def found(pair: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Two pods."""
    return Export(capsys, pair, *RAY, *RDMA)


def ray(container: dict[str, Any]) -> list[str]:
    """Return the command that starts Ray, which the agent is told."""
    args: list[str] = container["args"]
    return args[args.index("--") + 1 :]


def test_golden(found: Export) -> None:
    """All that is printed but for the programs."""
    golden.check(Path(__file__).parent / "golden" / "kubernetes-lws-ray.yaml", shown(found.text))


def test_ray_is_started_as_up_does(
    found: Export, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same words on head and worker, with variables where addresses were."""
    pair.write_text(pair.read_text().replace("cluster: pair", "cluster: pair\nray: 2.60.0"))
    run(["up", "-i", str(pair), "--dry-run", "--offline"])
    script = capsys.readouterr().out.replace("'", "")
    own = {"$(VLLM_HOST_IP)": "10.0.0.1", "$(LWS_LEADER_ADDRESS):6379": "10.0.0.1:6379"}
    head = " ".join(own.get(word, word) for word in ray(found.container()))
    own["$(VLLM_HOST_IP)"] = "10.0.0.2"
    worker = " ".join(own.get(word, word) for word in ray(found.container("workerTemplate")))

    assert f" -- {head}\n" in script or f" -- {head}" in script
    assert f" -- {worker}" in script
    assert "--head" in head.split()
    assert "--address" in worker.split()


def test_the_first_pod_keeps_the_server(found: Export) -> None:
    """One process, whose ranks Ray runs in all pods, which are found by name."""
    kept = desired.read(json.loads(found.of("ConfigMap")["data"]["server.json"]))
    (process,) = kept.processes

    assert (process.node, kept.backend) == ("pair-0", "ray")
    assert "--distributed-executor-backend" in process.argv
    assert kept.addresses == {"pair-0": "pair-0.pair-0", "pair-0-1": "pair-0-1.pair-0"}
    assert kept.ray is not None
    assert kept.ray.gpus == 16
    leader, worker = found.container()["args"], found.container("workerTemplate")["args"]
    assert leader[leader.index("--server") + 1] == "/opt/vlaunch/server.json"
    assert ("--lead" in leader, "--lead" in worker, "--server" in worker) == (True, False, False)
    assert "--stay" in leader
    assert "--stay" in worker


def test_ray_asks_for_its_token(found: Export) -> None:
    """On all of its ports; the secret is the agents', too, and the header has the line for it."""
    for template in ("leaderTemplate", "workerTemplate"):
        told = env(found.container(template))
        assert told["RAY_AUTH_MODE"] == "token"
        assert told["RAY_AUTH_TOKEN_PATH"] == "/run/vlaunch/secrets/RAY_AUTH_TOKEN"
        assert told["RAY_ADDRESS"] == "$(LWS_LEADER_ADDRESS):6379"
    assert 'openssl rand -hex 32 >"$d/RAY_AUTH_TOKEN"' in found.text


def test_the_agent_alone_restarts(found: Export) -> None:
    """The kubelet's probes would be a second opinion."""
    assert [key for key in found.container() if "Probe" in key] == ["readinessProbe"]
    assert found.container()["readinessProbe"]["exec"]["command"][2] == "ready"
    assert not [key for key in found.container("workerTemplate") if "robe" in key]


def test_the_image_must_have_ray(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is said, and another image may be named."""
    found = Export(capsys, pair, *RAY, *RDMA, "--image", "registry.example/ray:1")

    assert "registry.example/ray:1, which the nodes can pull, with Ray in it" in found.text
    assert found.container()["image"] == "registry.example/ray:1"
    assert found.gate()["image"] == "registry.example/ray:1"


def test_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray is started there as well."""
    found = Export(capsys, inventory("workstation"), *CASES["workstation"][1], *RAY)

    assert "--head" in ray(found.container("workerTemplate"))


@pytest.mark.parametrize(
    ("old", "new", "words", "said"),
    [
        ("", "", ("--dp", "2"), "Ray places replicas by addresses"),
        ("", "", ("--kind", "statefulset"), "a StatefulSet has one template"),
        ("cluster: pair", "cluster: pair\nray: none", (), "has no Ray"),
    ],
)
def test_what_ray_cannot_do_is_refused(
    pair: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    words: tuple[str, ...],
    said: str,
) -> None:
    """With what can be done instead."""
    pair.write_text(pair.read_text().replace(old, new) if old else pair.read_text())
    refused = Export(capsys, pair, *RAY, *RDMA, *words)

    assert (refused.code, refused.text) == (2, "")
    assert said in refused.error
