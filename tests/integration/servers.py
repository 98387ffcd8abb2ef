"""What the tests of servers share: who asks them all the time, what their keeper says, and how they
die and come back.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from benchmarks.faults.judge import Sample
from benchmarks.faults.traffic import Traffic, ask
from launcher.lab.host_configs import MODEL
from launcher.tools.servers import DEFAULT
from tests.integration.batches import kill_one, until
from tests.integration.conftest import API_KEY, Practice, Ran

LOG = logging.getLogger(__name__)  # shown with `pytest -o log_cli=true --log-cli-level=INFO`
DETECTED = 15.0  # seconds
# times a cold start, at which a recovery has failed; what it takes is measured by
# `benchmarks/serve.py`
AGAIN = 3.0
REBOOT = 90.0  # seconds more that daemons and Ray may take to come up


def serve(practice: Practice, *words: str) -> Ran:
    """Start a server that must answer."""
    ran = practice.vlaunch("serve", "--timeout", "500", *words, timeout=600)
    assert ran.code == 0, ran.said
    return ran


def url(practice: Practice, host: str = "node1", port: int = 8000) -> str:
    """Return the endpoint of a server whose API is on a host."""
    return f"http://{practice.lab.host(host).ip}:{port}/v1"


def asking(practice: Practice, host: str = "node1", port: int = 8000) -> Traffic:
    """Somebody who asks all the time, while the block is entered."""
    return Traffic(url(practice, host, port), API_KEY, MODEL, clients=1, pause=0.2, timeout=30)


def answers(practice: Practice, host: str = "node1", port: int = 8000) -> Sample:
    """Ask once."""
    return ask(url(practice, host, port), API_KEY, MODEL, 60)


def answered_since(traffic: Traffic, when: float) -> bool:
    """Whether a request that ended later was answered."""
    return any(each.ok for each in list(traffic.samples) if each.ended > when)


def lost(traffic: Traffic) -> list[Sample]:
    """Return the requests that were not answered."""
    return [each for each in list(traffic.samples) if not each.ok]


def status(practice: Practice, name: str = DEFAULT) -> tuple[Ran, dict[str, Any]]:
    """Return what `status` says of a server, and how it ended; a server that it does not know is in
    state `none`.
    """
    ran = practice.vlaunch("status", "--json")
    found = {each["name"]: each for each in json.loads(ran.out)["servers"]}
    return ran, found.get(name, {"state": "none"})


def record(practice: Practice, name: str = DEFAULT) -> dict[str, Any]:
    """Return what the keeper has written of a server; empty where it has written nothing."""
    text = practice.on(
        "node1", "sh", "-c", f"cat /root/.vlaunch/lab/server/{name}/observed.json 2>/dev/null; true"
    )
    found: dict[str, Any] = json.loads(text or "{}")
    return found


def await_state(
    practice: Practice, state: str, *, name: str = DEFAULT, within: float
) -> dict[str, Any]:
    """Wait until `status` says that a server is in a state; return what it says."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [status(practice, name)[1]]
        return bool(found[0]["state"] == state)

    until(there, f"`{name}` is {state}: {record(practice, name).get('doing')}", within)
    return found[0]


def crash(practice: Practice, host: str, name: str = DEFAULT) -> None:
    """Kill the engine of a server that is ready, and wait until its keeper has written it down."""
    until(lambda: record(practice, name)["state"] == "ready", f"`{name}` is ready", 300)
    before = record(practice, name)["fault_count"]
    kill_one(practice, "EngineCore", host)
    until(lambda: record(practice, name)["fault_count"] > before, "a fault is written down", 30)


def recovers(
    practice: Practice,
    traffic: Traffic,
    kill: Callable[[], object],
    *,
    within: float,
    name: str = DEFAULT,
) -> dict[str, Any]:
    """Do something bad; return the fault that was written down when the server has answered again.

    `status` must be red in time, and the recovery must take no longer than `within`, without the
    pause before it. Whoever asks `status` all the while takes the cores that the engine starts
    with: only requests stream, until one is answered.
    """
    before, began = record(practice, name), time.time()
    kill()
    until(lambda: status(practice, name)[0].code == 1, "`status` is red", 60)
    red = time.time() - began
    until(
        lambda: record(practice, name)["fault_count"] > before["fault_count"],
        "a fault is written down",
        60,
    )
    until(
        lambda: record(practice, name)["faults"][-1]["ready_again_after"] is not None,
        "it is ready again",
        within + 700,
    )
    fault: dict[str, Any] = record(practice, name)["faults"][-1]
    back = fault["at"] + fault["ready_again_after"]
    until(lambda: answered_since(traffic, back), "a request is answered", 60)
    LOG.info("red after %.1f s; %s", red, fault)
    assert fault["at"] - began <= DETECTED
    assert fault["ready_again_after"] - fault["pause"] <= within, fault
    assert (
        await_state(practice, "answering", name=name, within=60)["observed"]["generation"]
        > before["generation"]
    )
    return fault


def comes_back(
    practice: Practice, traffic: Traffic, since: float, within: float, name: str = DEFAULT
) -> None:
    """Wait until requests are answered again after something that ended the server, and `status`
    says so.
    """
    until(lambda: any(each.ended > since for each in lost(traffic)), "a request fails", 60)
    failed = next(each.ended for each in lost(traffic) if each.ended > since)
    until(
        lambda: answered_since(traffic, failed),
        f"it answers again: {status(practice, name)[1]}",
        within,
    )
    LOG.info("answers again %.0f s after it broke", time.time() - since)
    await_state(practice, "answering", name=name, within=60)
