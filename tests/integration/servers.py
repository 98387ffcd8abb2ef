"""Helpers for the tests of servers: steady traffic, the supervisor's records, faults and
recoveries.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from benchmarks.faults.judge import Sample
from benchmarks.faults.traffic import Traffic, send_request
from launcher.lab.host_configs import MODEL
from launcher.tools.site.servers import DEFAULT
from tests.integration.batches import kill_process, wait_until
from tests.integration.conftest import API_KEY, CommandResult, LabCluster

LOG = logging.getLogger(__name__)  # shown with `pytest -o log_cli=true --log-cli-level=INFO`
DETECTED = 15.0  # seconds
# times a cold start, the limit of a recovery; `benchmarks/serve.py` measures it
RECOVERY_FACTOR = 3.0
REBOOT = 90.0  # additional seconds for daemons and Ray to start


def serve(lab_cluster: LabCluster, *arguments: str) -> CommandResult:
    """Start a server, and assert that it answers."""
    result = lab_cluster.vlaunch("serve", "--timeout", "500", *arguments, timeout=600)
    assert result.code == 0, result.output
    return result


def url(lab_cluster: LabCluster, host: str = "node1", port: int = 8000) -> str:
    """Return the endpoint of a server with its API on a host."""
    return f"http://{lab_cluster.lab.host(host).ip}:{port}/v1"


def steady_traffic(lab_cluster: LabCluster, host: str = "node1", port: int = 8000) -> Traffic:
    """Return a client that sends requests all the time inside the block."""
    return Traffic(url(lab_cluster, host, port), API_KEY, MODEL, clients=1, pause=0.2, timeout=30)


def query_model(lab_cluster: LabCluster, host: str = "node1", port: int = 8000) -> Sample:
    """Send one request."""
    return send_request(url(lab_cluster, host, port), API_KEY, MODEL, 60)


def is_answered_since(traffic: Traffic, when: float) -> bool:
    """Return whether a request that ended later was answered."""
    return any(sample.ok for sample in list(traffic.samples) if sample.ended > when)


def failed_requests(traffic: Traffic) -> list[Sample]:
    """Return the requests that were not answered."""
    return [sample for sample in list(traffic.samples) if not sample.ok]


def query_status(
    lab_cluster: LabCluster, name: str = DEFAULT
) -> tuple[CommandResult, dict[str, Any]]:
    """Return the result of `status`, and its row of a server; an unknown server is in state
    `none`.
    """
    result = lab_cluster.vlaunch("status", "--json")
    servers = {server["name"]: server for server in json.loads(result.out)["servers"]}
    return result, servers.get(name, {"state": "none"})


def read_record(lab_cluster: LabCluster, name: str = DEFAULT) -> dict[str, Any]:
    """Return the supervisor's record of a server; empty without one."""
    text = lab_cluster.on(
        "node1", "sh", "-c", f"cat /root/.vlaunch/lab/server/{name}/observed.json 2>/dev/null; true"
    )
    document: dict[str, Any] = json.loads(text or "{}")
    return document


def await_state(
    lab_cluster: LabCluster, state: str, *, name: str = DEFAULT, within: float
) -> dict[str, Any]:
    """Wait until `status` shows a server in a state; return its row."""
    rows: list[dict[str, Any]] = []

    def is_reached() -> bool:
        rows[:] = [query_status(lab_cluster, name)[1]]
        return bool(rows[0]["state"] == state)

    wait_until(
        is_reached, f"`{name}` is {state}: {read_record(lab_cluster, name).get('doing')}", within
    )
    return rows[0]


def crash_engine(lab_cluster: LabCluster, host: str, name: str = DEFAULT) -> None:
    """Kill the engine of a ready server, and wait until its supervisor has recorded the fault."""
    wait_until(
        lambda: read_record(lab_cluster, name)["state"] == "ready", f"`{name}` is ready", 300
    )
    before = read_record(lab_cluster, name)["fault_count"]
    kill_process(lab_cluster, "EngineCore", host)
    wait_until(
        lambda: read_record(lab_cluster, name)["fault_count"] > before,
        "a fault is written down",
        30,
    )


def await_recovery(
    lab_cluster: LabCluster,
    traffic: Traffic,
    kill: Callable[[], object],
    *,
    within: float,
    name: str = DEFAULT,
) -> dict[str, Any]:
    """Inject a fault; return its record when the server answers again.

    `status` must be red in time, and the recovery must take no longer than `within`, without the
    pause before it. A loop of `status` would take the cores from the engine's start: only requests
    are sent meanwhile.
    """
    before, began = read_record(lab_cluster, name), time.time()
    kill()
    wait_until(lambda: query_status(lab_cluster, name)[0].code == 1, "`status` is red", 60)
    red = time.time() - began
    wait_until(
        lambda: read_record(lab_cluster, name)["fault_count"] > before["fault_count"],
        "a fault is written down",
        60,
    )
    wait_until(
        lambda: read_record(lab_cluster, name)["faults"][-1]["ready_again_after"] is not None,
        "it is ready again",
        within + 700,
    )
    fault: dict[str, Any] = read_record(lab_cluster, name)["faults"][-1]
    back = fault["at"] + fault["ready_again_after"]
    wait_until(lambda: is_answered_since(traffic, back), "a request is answered", 60)
    LOG.info("red after %.1f s; %s", red, fault)
    assert fault["at"] - began <= DETECTED
    assert fault["ready_again_after"] - fault["pause"] <= within, fault
    assert (
        await_state(lab_cluster, "answering", name=name, within=60)["observed"]["generation"]
        > before["generation"]
    )
    return fault


def await_return(
    lab_cluster: LabCluster, traffic: Traffic, since: float, within: float, name: str = DEFAULT
) -> None:
    """Wait until requests are answered again after a fault that stopped the server, and `status`
    agrees.
    """
    wait_until(
        lambda: any(sample.ended > since for sample in failed_requests(traffic)),
        "a request fails",
        60,
    )
    failed = next(sample.ended for sample in failed_requests(traffic) if sample.ended > since)
    wait_until(
        lambda: is_answered_since(traffic, failed),
        f"it answers again: {query_status(lab_cluster, name)[1]}",
        within,
    )
    LOG.info("answers again %.0f s after it broke", time.time() - since)
    await_state(lab_cluster, "answering", name=name, within=60)
