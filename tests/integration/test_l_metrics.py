"""Debian's Prometheus scrapes a real server, Ray and the agent with the exported configuration:
every query of every dashboard returns data, and every alert is evaluated.
"""

from __future__ import annotations

import json
import math
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
from tests.integration.batches import kill_process, wait_until
from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster
from tests.integration.servers import RECOVERY_FACTOR, await_state, read_record, serve, url
from tests.ports import free_port
from tests.prometheus_programs import program

pytestmark = [pytest.mark.lab, pytest.mark.long]
EVERY = "2s"  # between two scrapes, instead of the exported 15 s
NO_DATA_YET = {"vlaunch_server_recovery_seconds"}  # before the first fault


@dataclass(frozen=True)
class Watched:
    """A server under load, and its Prometheus; `started` is the duration of its start."""

    lab_cluster: LabCluster
    folder: Path
    at: str
    started: float

    def query(self, path: str, **parameters: str) -> Any:
        """Query Prometheus' API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.at}/api/v1/{path}?{query}", timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expr: str) -> list[float]:
        """Return the values of a dashboard's expression, as Grafana queries it."""
        expr = expr.replace("$cluster", ".*").replace("$__rate_interval", "30s")
        values = [float(value["value"][1]) for value in self.query("query", query=expr)["result"]]
        return [value for value in values if not math.isnan(value)]

    def empty_queries(self) -> set[str]:
        """Return the queries of all dashboards without data."""
        return {
            target["expr"]
            for path in sorted((self.folder / "dashboards").glob("*.json"))
            for panel in json.loads(path.read_text())["panels"]
            for target in panel["targets"]
            if not self.values(target["expr"])
        }


@pytest.fixture(scope="module")
def watched(lab_cluster: LabCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two nodes with a server in Ray, with a key and steady requests."""
    prometheus = program("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not there: `make machine` unpacks it")
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    up = lab_cluster.vlaunch("up", timeout=900)
    assert up.code == 0, up.output
    result = serve(lab_cluster, "--backend", "ray", "--tp", "1", "--pp", "2")
    folder = tmp_path_factory.mktemp("monitoring")
    assert lab_cluster.vlaunch("export", "prometheus", "-o", str(folder)).code == 0
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", EVERY))
    port = free_port()
    options = (f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}")
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([prometheus, f"--config.file={config}", *options], stderr=log) as running,
    ):
        try:
            with Traffic(url(lab_cluster), API_KEY, MODEL, clients=4, pause=0.0, timeout=60):
                at = f"http://127.0.0.1:{port}"
                yield Watched(lab_cluster, folder, at, max(result.seconds, 100.0))
        finally:
            running.terminate()
            running.wait(30)
    lab_cluster.vlaunch("down", "--yes")


def test_every_query_returns_data_and_every_alert_is_evaluated(watched: Watched) -> None:
    """For a server under load with one dead rank; the metrics show the death, and no other alert
    fires.
    """
    wait_until(lambda: _is_listening(watched), "Prometheus answers", 60)
    wait_until(lambda: watched.values("sum(up)") == [4.0], "all four targets are up", 120)
    wait_until(
        lambda: {*map(_metric_name, watched.empty_queries())} <= NO_DATA_YET,
        "queries return data",
        120,
    )
    assert _firing_alerts(watched) == set()
    assert watched.values("vlaunch_rank_up") == [1.0, 1.0]
    assert watched.values("sum(vlaunch_server_faults_total)") == [0.0]

    kill_process(watched.lab_cluster, "RayWorker", "node2")
    wait_until(
        lambda: watched.values('vlaunch_server_state{state="ready"}') == [0.0],
        "Prometheus sees that it is not ready",
        60,
    )
    await_state(watched.lab_cluster, "answering", within=RECOVERY_FACTOR * watched.started)
    wait_until(
        lambda: watched.empty_queries() == set(),
        f"all queries return data: {watched.empty_queries()}",
        120,
    )

    record = read_record(watched.lab_cluster)
    assert watched.values("vlaunch_server_faults_total") == [record["fault_count"]]
    assert watched.values("vlaunch_server_engine_starts_total") == [record["generation"]]
    rules = [rule for group in watched.query("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def test_the_terminal_shows_the_same(watched: Watched) -> None:
    """Requests, tokens, latencies, and each rank, from vLLM and the supervisor, without
    Prometheus.
    """
    result = watched.lab_cluster.vlaunch("metrics", "--json")
    assert result.code == 0, result.output
    (server,) = json.loads(result.out)["servers"]

    assert server["state"] == "answering"
    assert server["figures"]["requests_per_s"] > 0
    assert server["figures"]["tokens_per_s"] > 0
    assert server["figures"]["first_token"]["p99"] > 0
    assert {(rank["node"], rank["alive"]) for rank in server["ranks"]} == {
        ("node1", True),
        ("node2", True),
    }


def test_the_agent_exposes_no_secret(watched: Watched) -> None:
    """It listens only on the head's address of the cluster network."""
    with urllib.request.urlopen(
        f"http://{watched.lab_cluster.lab.host('node1').ip}:29580/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
    assert "vlaunch_rank_up" in text
    assert not [secret for secret in (API_KEY, HF_TOKEN) if secret in text]

    listening = watched.lab_cluster.on("node1", "ss", "-ltnH", "sport = :29580").split()
    assert listening[3] == f"{watched.lab_cluster.lab.host('node1').ip}:29580"
    assert watched.lab_cluster.on("node2", "ss", "-ltnH", "sport = :29580") == ""


def _is_listening(watched: Watched) -> bool:
    try:
        return bool(watched.query("query", query="1"))
    except OSError:
        return False


def _metric_name(expr: str) -> str:
    return expr.partition("{")[0]


def _firing_alerts(watched: Watched) -> set[str]:
    return {
        alert["labels"]["alertname"]
        for alert in watched.query("alerts")["alerts"]
        if alert["state"] == "firing"
    }
