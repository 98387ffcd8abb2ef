"""Debian's Prometheus scrapes a real server, Ray and the agent with the exported configuration:
every query of every dashboard returns data, and every alert is evaluated.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.traffic import Traffic
from launcher.lab.host_configs import MODEL
from tests.integration.batches import kill_one, until
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice
from tests.integration.servers import AGAIN, await_state, record, serve, url
from tests.prometheus_programs import program

pytestmark = [pytest.mark.lab, pytest.mark.long]
EVERY = "2s"  # between two scrapes, for a test has no time for the exported 15 s
NO_DATA_YET = {"vlaunch_server_recovery_seconds"}  # of a server that has had no fault


@dataclass(frozen=True)
class Watched:
    """A server under load, and a Prometheus that watches it; `started` is how long it took."""

    practice: Practice
    folder: Path
    at: str
    started: float

    def ask(self, path: str, **words: str) -> Any:
        """Ask Prometheus' API."""
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(f"{self.at}/api/v1/{path}?{query}", timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expr: str) -> list[float]:
        """Return what an expression of a dashboard gives, as Grafana would ask for it."""
        expr = expr.replace("$cluster", ".*").replace("$__rate_interval", "30s")
        found = [float(each["value"][1]) for each in self.ask("query", query=expr)["result"]]
        return [each for each in found if not math.isnan(each)]

    def empty(self) -> set[str]:
        """Return the queries of all dashboards that give no data."""
        return {
            target["expr"]
            for path in sorted((self.folder / "dashboards").glob("*.json"))
            for panel in json.loads(path.read_text())["panels"]
            for target in panel["targets"]
            if not self.values(target["expr"])
        }


@pytest.fixture(scope="module")
def watched(practice: Practice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two nodes that serve over Ray, with a key; requests all the time."""
    prometheus = program("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not there: `make machine` unpacks it")
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    up = practice.vlaunch("up", timeout=900)
    assert up.code == 0, up.said
    ran = serve(practice, "--backend", "ray", "--tp", "1", "--pp", "2")
    folder = tmp_path_factory.mktemp("monitoring")
    assert practice.vlaunch("export", "prometheus", "-o", str(folder)).code == 0
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", EVERY))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}")
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([prometheus, f"--config.file={config}", *words], stderr=log) as running,
    ):
        try:
            with Traffic(url(practice), API_KEY, MODEL, clients=4, pause=0.0, timeout=60):
                at = f"http://127.0.0.1:{port}"
                yield Watched(practice, folder, at, max(ran.seconds, 100.0))
        finally:
            running.terminate()
            running.wait(30)
    practice.vlaunch("down", "--yes")


def test_every_query_returns_data_and_every_alert_is_evaluated(watched: Watched) -> None:
    """Of a server under load whose rank has died once; the rank's death is seen, and no alert fires
    that should not.
    """
    until(lambda: _listens(watched), "Prometheus answers", 60)
    until(lambda: watched.values("sum(up)") == [4.0], "all four targets are up", 120)
    until(lambda: {*map(_metric, watched.empty())} <= NO_DATA_YET, "queries return data", 120)
    assert _firing(watched) == set()
    assert watched.values("vlaunch_rank_up") == [1.0, 1.0]
    assert watched.values("sum(vlaunch_server_faults_total)") == [0.0]

    kill_one(watched.practice, "RayWorker", "node2")
    until(
        lambda: watched.values('vlaunch_server_state{state="ready"}') == [0.0],
        "Prometheus sees that it is not ready",
        60,
    )
    await_state(watched.practice, "answering", within=AGAIN * watched.started)
    until(lambda: watched.empty() == set(), f"all queries return data: {watched.empty()}", 120)

    seen = record(watched.practice)
    assert watched.values("vlaunch_server_faults_total") == [seen["fault_count"]]
    assert watched.values("vlaunch_server_engine_starts_total") == [seen["generation"]]
    rules = [each for group in watched.ask("rules")["groups"] for each in group["rules"]]
    assert len(rules) > 15
    assert [each["name"] for each in rules if each["health"] != "ok"] == []


def test_the_terminal_shows_the_same(watched: Watched) -> None:
    """Requests, tokens, latencies, and each rank; from vLLM and the keeper, past Prometheus."""
    ran = watched.practice.vlaunch("metrics", "--json")
    assert ran.code == 0, ran.said
    (server,) = json.loads(ran.out)["servers"]

    assert server["state"] == "answering"
    assert server["figures"]["requests_per_s"] > 0
    assert server["figures"]["tokens_per_s"] > 0
    assert server["figures"]["first_token"]["p99"] > 0
    assert {(each["node"], each["alive"]) for each in server["ranks"]} == {
        ("node1", True),
        ("node2", True),
    }


def test_the_agent_tells_no_secret(watched: Watched) -> None:
    """And listens on the head's address between the nodes, nowhere else."""
    with urllib.request.urlopen(
        f"http://{watched.practice.lab.host('node1').ip}:29580/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
    assert "vlaunch_rank_up" in text
    assert not [each for each in (API_KEY, HF_TOKEN) if each in text]

    listening = watched.practice.on("node1", "ss", "-ltnH", "sport = :29580").split()
    assert listening[3] == f"{watched.practice.lab.host('node1').ip}:29580"
    assert watched.practice.on("node2", "ss", "-ltnH", "sport = :29580") == ""


def _listens(watched: Watched) -> bool:
    try:
        return bool(watched.ask("query", query="1"))
    except OSError:
        return False


def _metric(expr: str) -> str:
    return expr.partition("{")[0]


def _firing(watched: Watched) -> set[str]:
    return {
        each["labels"]["alertname"]
        for each in watched.ask("alerts")["alerts"]
        if each["state"] == "firing"
    }
