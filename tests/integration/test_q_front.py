"""One address for the servers of a cluster, on a node that is not the head: HAProxy before vLLM."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from benchmarks.faults.judge import count_losses
from benchmarks.faults.traffic import Traffic
from launcher.lab import front_image
from launcher.lab.host_configs import MODEL
from tests.integration.batches import kill_process, wait_until
from tests.integration.conftest import API_KEY, LabCluster
from tests.integration.servers import serve

pytestmark = pytest.mark.lab
FOLDER = "/root/.vlaunch/lab"


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two nodes without Ray, a front on the second one, no server."""

    def change(document: dict[str, Any]) -> None:
        document |= {"ray": "none", "front": {"node": "node2", "image": front_image.NAME}}
        document["front"]["hold"] = "5m"  # longer than the start of an engine on a busy machine

    lab_cluster.recreate(change)
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")


def trust(cluster: LabCluster) -> ssl.SSLContext:
    """Return a context that trusts the front's certificate."""
    pem = cluster.on("node2", "cat", f"{FOLDER}/front/tls.pem").partition("-----BEGIN PRIVATE")[0]
    return ssl.create_default_context(cadata=pem)


def ask(
    cluster: LabCluster,
    path: str,
    key: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = 330,
) -> int:
    """Return the status of a request through the front, whose certificate is verified."""
    request = urllib.request.Request(
        f"https://{cluster.lab.host('node2').ip}:8443{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout, context=trust(cluster)) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_users_reach_a_server_with_their_keys(cluster: LabCluster) -> None:
    """Keys work at once, survive the death of the front, and end when they are revoked."""
    key = cluster.vlaunch("front", "keys", "add", "alice", "--models", "chat").out.strip()
    assert ask(cluster, "/chat/v1/models", key) == 404
    serve(cluster, "--name", "chat", "--backend", "mp", "--tp", "1", "--pp", "1")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4}

    assert [ask(cluster, f"{name}/v1/completions", key, body) for name in ("", "/chat")] == [
        200
    ] * 2
    assert ask(cluster, "/chat/v1/models", "wrong") == 401
    assert ask(cluster, "/chat/metrics", key) == 404
    shown = cluster.vlaunch("front")
    assert (shown.code, "chat    chat     UP" in shown.out) == (0, True), shown.output
    ip = cluster.lab.host("node1").ip
    assert f"{ip}:8000" in cluster.on("node1", "ss", "-ltnH", "src", f"{ip}:8000")
    assert cluster.on("node1", "ss", "-ltnH", "src", "127.0.0.1:8000") == ""
    status = json.loads(cluster.vlaunch("status", "--json").out)
    assert status["endpoint"] == f"https://{cluster.lab.host('node2').ip}:8443/chat/v1"
    assert cluster.vlaunch("chat", "--max-tokens", "2", "hi").code == 0
    targets = f"http://{cluster.lab.host('node2').ip}:29590/servers"
    with urllib.request.urlopen(f"{targets}/chat/metrics", timeout=30) as response:
        assert b"vllm:num_requests_running" in response.read()
    again = cluster.vlaunch("up")
    assert "already up; nothing was changed" in again.err, again.output

    kill_process(cluster, "haproxy", "node2")
    wait_until(lambda: answers(cluster, key), "the front is back", 60)
    began = time.monotonic()
    assert cluster.vlaunch("front", "keys", "revoke", "alice").code == 0
    assert ask(cluster, "/chat/v1/models", key) == 401
    assert time.monotonic() - began < 20  # mostly the connections of `vlaunch`

    log = cluster.docker("node2", "logs", "vlaunch-lab-node2-front")
    assert '"user":"alice","server":"chat","replica":"chat"' in log
    for secret in (key, API_KEY):
        assert secret not in log + cluster.command_lines()
        assert secret not in cluster.docker("node2", "inspect", "vlaunch-lab-node2-front")


def answers(cluster: LabCluster, key: str) -> bool:
    """True when the front answers a request."""
    try:
        return ask(cluster, "/chat/v1/models", key, timeout=5) == 200
    except OSError:
        return False


def test_requests_wait_while_a_server_starts_again(cluster: LabCluster) -> None:
    """One that arrives when it is down is answered by its successor."""
    key = cluster.vlaunch("front", "keys", "add", "bob").out.strip()
    cluster.vlaunch("stop", "chat")
    serve(cluster, "--name", "chat", "--backend", "mp", "--tp", "1", "--pp", "1", "--no-wait")

    began = time.monotonic()
    assert ask(cluster, "/chat/v1/models", key) == 200
    assert time.monotonic() - began > 1


def test_the_model_of_a_request_selects_the_server(cluster: LabCluster) -> None:
    """Also of a large request, which passes the router on the front's node."""
    key = cluster.vlaunch("front", "keys", "add", "erin").out.strip()
    cluster.vlaunch("stop", "chat")
    layout = ("--backend", "mp", "--tp", "1", "--pp", "1")
    for name, node, port in (("chat", "node1", "8000"), ("other", "node2", "8010")):
        options = ("--name", name, "--nodes", node, "--port", port, *layout)
        serve(cluster, *options, "--", "--served-model-name", f"lab/{name}")
    for padding in (0, 4 << 20):
        for name, status in (("chat", 200), ("other", 200), ("none", 404)):
            body = {"user": "x" * padding, "prompt": "a", "max_tokens": 4, "model": f"lab/{name}"}
            assert ask(cluster, "/v1/completions", key, body) == status, (name, padding)

    log = cluster.docker("node2", "logs", "vlaunch-lab-node2-front")
    assert log.count('"user":"erin","server":"other"') == 2, log
    cluster.vlaunch("stop", "other")


def test_a_bad_certificate_leaves_the_front_as_it_is(cluster: LabCluster) -> None:
    """HAProxy itself rejects its short key, before it is used."""
    key = cluster.vlaunch("front", "keys", "add", "carol").out.strip()
    ip = cluster.lab.host("node2").ip
    names = f"-subj /CN=x -addext subjectAltName=IP:{ip} -keyout front.key -out front.pem"
    command = f"openssl req -x509 -newkey rsa:1024 -nodes {names}"
    subprocess.run(command.split(), cwd=cluster.folder, check=True, capture_output=True)
    before = cluster.inventory.read_text()
    document = yaml.safe_load(before)
    document["front"]["tls"] = {"cert": "front.pem", "key": "front.key"}
    cluster.inventory.write_text(yaml.safe_dump(document))
    ran = cluster.vlaunch("front", "reload")
    assert (ran.code, "unable to load SSL certificate" in ran.err) == (1, True), ran.output

    kill_process(cluster, "haproxy", "node2")
    wait_until(lambda: answers(cluster, key), "the front is back", 60)
    cluster.inventory.write_text(before)
    assert cluster.vlaunch("front").code == 0


@pytest.mark.long
def test_replicas_are_replaced_without_a_loss(cluster: LabCluster) -> None:
    """Short requests and streams go on while one replica after the other is replaced."""
    key = cluster.vlaunch("front", "keys", "add", "dave").out.strip()
    cluster.vlaunch("stop", "chat")
    url = f"https://{cluster.lab.host('node2').ip}:8443/chat/v1"
    options = ("--name", "chat", "--backend", "mp", "--tp", "1")
    serve(cluster, *options, "--replicas", "2")
    traffic = Traffic(
        url, key, MODEL, clients=3, streams=2, pause=0.2, timeout=330, context=trust(cluster)
    )
    with traffic:
        serve(cluster, *options, "--replace", "--", "--max-num-seqs", "8")
    losses = count_losses(traffic.samples)

    assert (losses.failed, losses.cut) == (0, 0), losses
    assert losses.requests > 50
    shown = json.loads(cluster.vlaunch("front", "status", "--json").out)
    replicas = [(row["replica"], row["state"]) for row in shown["nodes"]["node2"]["replicas"]]
    assert replicas == [("chat", "UP"), ("chat.2", "UP")]
    users = {row["user"]: row for row in shown["traffic"]}
    assert users["dave"]["requests"] > 50
    assert users["dave"]["errors"] == 0


def test_nothing_is_left(cluster: LabCluster) -> None:
    """`down` verifies it."""
    down = cluster.vlaunch("down", "--yes")
    assert down.code == 0, down.output
    assert cluster.containers() == {}
