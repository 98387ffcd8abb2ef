"""A request that kills the engine each time it is sent: cause and pauses are shown, and when it
stops coming, all is well.

vLLM loads a plugin that lies on the hosts; it raises in the engine when a request asks for a
certain number of tokens.
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
from tests.integration.batches import until
from tests.integration.conftest import API_KEY, Practice
from tests.integration.servers import answers, asking, await_state, lost, record, serve, status, url

pytestmark = [pytest.mark.lab, pytest.mark.long]

_FOLDER = "/srv/deadly"
_TOKENS = 113
_CAUSE = f"the kernel for {_TOKENS} tokens is broken"
_PLUGIN = f'''
def register():
    from vllm.v1.engine import core

    add = core.EngineCore.add_request

    def add_request(self, request, *more):
        if request.max_tokens == {_TOKENS}:
            raise RuntimeError("{_CAUSE}")
        return add(self, request, *more)

    core.EngineCore.add_request = add_request
'''
_FILES = {
    "deadly.py": _PLUGIN,
    "deadly-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: deadly\nVersion: 1.0\n",
    "deadly-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\ndeadly = deadly:register\n",
}


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """A server on each node, both with the plugin."""
    for host in practice.lab.hosts:
        for name, text in _FILES.items():
            path = host.root / _FOLDER.lstrip("/") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def change(document: dict[str, Any]) -> None:
        document["mounts"] = [{"source": _FOLDER, "target": _FOLDER, "read_only": True}]
        document["env"]["PYTHONPATH"] = _FOLDER

    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    practice.write(change)
    up = practice.vlaunch("up")
    assert up.code == 0, up.said
    serve(practice, "--name", "well", "--backend", "mp", "--nodes", "node1")
    serve(practice, "--name", "hit", "--backend", "mp", "--nodes", "node2", "--port", "8001")
    yield practice
    practice.vlaunch("down", "--yes")
    practice.write()


@contextmanager
def sending(practice: Practice) -> Iterator[None]:
    """Send the deadly request every second while the block is entered."""
    over = threading.Event()
    body = json.dumps({"model": MODEL, "prompt": "def", "max_tokens": _TOKENS}).encode()
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}

    def send() -> None:
        while not over.wait(1):
            with suppress(OSError):
                asked = urllib.request.Request(
                    f"{url(practice, 'node2', 8001)}/completions", body, headers
                )
                urllib.request.urlopen(asked, timeout=10).close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_it_kills_again_and_again(cluster: Practice) -> None:
    """The cause is the engine's own words, pauses grow, `status` is red with the cause; the other
    server is untouched.
    """
    before = record(cluster, "well")
    with asking(cluster) as traffic, sending(cluster):
        until(lambda: record(cluster, "hit")["fault_count"] >= 3, "it has died three times", 400)
        until(lambda: record(cluster, "hit")["state"] == "pausing", "it pauses", 60)
        ran, server = status(cluster, "hit")
        shown = cluster.vlaunch("status")
    found = server["observed"]

    assert (ran.code, server["state"], shown.code) == (1, "recovering", 1)
    assert all(_CAUSE in fault["cause"] for fault in found["faults"])
    assert [fault["pause"] for fault in found["faults"][:3]] == [5, 10, 20]
    assert _CAUSE in shown.out
    assert "next restart in" in shown.out
    assert lost(traffic) == []
    after = record(cluster, "well")
    assert (after["generation"], after["fault_count"]) == (before["generation"], 0)


def test_it_is_back_when_the_request_stops_coming(cluster: Practice) -> None:
    """By itself."""
    await_state(cluster, "answering", name="hit", within=300)
    time.sleep(5)

    assert answers(cluster, "node2", 8001).ok
    assert status(cluster, "hit")[0].code == 0
