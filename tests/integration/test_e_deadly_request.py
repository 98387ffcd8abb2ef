"""A request that kills the engine each time: cause and pauses are shown, and the server recovers
when it stops.

vLLM loads a plugin from the hosts, which raises in the engine when a request has a certain number
of tokens.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from launcher.lab.host_configs import MODEL
from tests.integration.batches import wait_until
from tests.integration.conftest import API_KEY, LabCluster
from tests.integration.servers import (
    await_state,
    failed_requests,
    query_model,
    query_status,
    read_record,
    serve,
    steady_traffic,
    url,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

_FOLDER = "/srv/deadly"
_TOKENS = 113
_CAUSE = f"the kernel for {_TOKENS} tokens is broken"
_PLUGIN = f'''
def register():
    from vllm.v1.engine import core

    add = core.EngineCore.add_request

    def add_request(self, request, *args):
        if request.max_tokens == {_TOKENS}:
            raise RuntimeError("{_CAUSE}")
        return add(self, request, *args)

    core.EngineCore.add_request = add_request
'''
_FILES = {
    "deadly.py": _PLUGIN,
    "deadly-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: deadly\nVersion: 1.0\n",
    "deadly-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\ndeadly = deadly:register\n",
}


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """A server on each node, both with the plugin."""
    for host in lab_cluster.lab.hosts:
        for name, text in _FILES.items():
            path = host.root / _FOLDER.lstrip("/") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def change(document: dict[str, Any]) -> None:
        document["mounts"] = [{"source": _FOLDER, "target": _FOLDER, "read_only": True}]
        document["env"]["PYTHONPATH"] = _FOLDER

    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    lab_cluster.write(change)
    up = lab_cluster.vlaunch("up")
    assert up.code == 0, up.output
    serve(lab_cluster, "--name", "well", "--backend", "mp", "--nodes", "node1")
    serve(lab_cluster, "--name", "hit", "--backend", "mp", "--nodes", "node2", "--port", "8001")
    yield lab_cluster
    lab_cluster.vlaunch("down", "--yes")
    lab_cluster.write()


@contextmanager
def deadly_traffic(lab_cluster: LabCluster) -> Iterator[None]:
    """Send the deadly request every second inside the block."""
    over = threading.Event()
    body = json.dumps({"model": MODEL, "prompt": "def", "max_tokens": _TOKENS}).encode()
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}

    def send() -> None:
        while not over.wait(1):
            with suppress(OSError):
                request = urllib.request.Request(
                    f"{url(lab_cluster, 'node2', 8001)}/completions", body, headers
                )
                urllib.request.urlopen(request, timeout=10).close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_it_kills_the_engine_repeatedly(cluster: LabCluster) -> None:
    """The cause is the engine's own message, pauses grow, `status` is red with the cause; the other
    server is not affected.
    """
    before = read_record(cluster, "well")
    with steady_traffic(cluster) as traffic, deadly_traffic(cluster):
        wait_until(
            lambda: read_record(cluster, "hit")["fault_count"] >= 3, "it has died three times", 400
        )
        wait_until(lambda: read_record(cluster, "hit")["state"] == "pausing", "it pauses", 60)
        result, server = query_status(cluster, "hit")
        status_text = cluster.vlaunch("status")
    observed = server["observed"]

    assert (result.code, server["state"], status_text.code) == (1, "recovering", 1)
    assert all(_CAUSE in fault["cause"] for fault in observed["faults"])
    assert [fault["pause"] for fault in observed["faults"][:3]] == [5, 10, 20]
    assert _CAUSE in status_text.out
    assert "next restart in" in status_text.out
    assert failed_requests(traffic) == []
    after = read_record(cluster, "well")
    assert (after["generation"], after["fault_count"]) == (before["generation"], 0)


def test_the_server_recovers_without_the_request(cluster: LabCluster) -> None:
    """By itself."""
    await_state(cluster, "answering", name="hit", within=300)
    time.sleep(5)

    assert query_model(cluster, "node2", 8001).ok
    assert query_status(cluster, "hit")[0].code == 0
