"""A server that dies in every way that its supervisor knows, on real parts: it comes back, and nobody types a word.

Requests stream all the while. The first start gives the time that others are compared with.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.lab import faults
from tests.integration.batches import kill_one, running
from tests.integration.conftest import API_KEY, Practice, Ran

pytestmark = [pytest.mark.lab, pytest.mark.long]

LOG = logging.getLogger(__name__)  # shown with `pytest -o log_cli=true --log-cli-level=INFO`
DETECTED = 15.0  # seconds
AGAIN = 3.0  # times a cold start, at which a recovery has failed; what it takes is measured by the fault campaign
REBOOT = 90.0  # seconds more that daemons and Ray may take to come up


@dataclass
class Client:
    """Somebody who asks all the time; `asked` holds when each request ended and whether it was answered."""

    practice: Practice
    asked: list[tuple[float, bool]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def stream(self) -> None:
        """Ask until told to stop."""
        while not self.over.wait(0.2):
            self.asked.append((time.time(), self.ask()))

    def ask(self) -> bool:
        """Ask the endpoint as a client does, and say whether it answered."""
        url = f"http://{self.practice.lab.hosts[0].ip}:8000/v1/completions"
        body = {"model": "/data/huggingface/tiny-llama", "prompt": "def", "max_tokens": 16, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
                return bool(json.loads(answer.read())["usage"]["completion_tokens"] == 16)
        except (OSError, ValueError):
            return False

    def answered_since(self, when: float) -> bool:
        """Whether a request that ended later was answered."""
        return any(good for at, good in self.asked if at > when)


def patient(document: dict[str, Any]) -> None:
    """Let the budget of restarts last for all tests."""
    document["serve"]["restarts"] = 20


@pytest.fixture(scope="module")
def cold(practice: Practice) -> float:
    """Bring the cluster up, serve, and return how long the first answer took."""
    practice.write()
    assert practice.vlaunch("down").code == 0
    practice.write(patient)
    up = practice.vlaunch("up")
    assert up.code == 0, up.said
    ran = practice.vlaunch("serve", "--timeout", "500", timeout=600)
    assert ran.code == 0, ran.said
    return ran.seconds


@pytest.fixture(scope="module")
def client(practice: Practice, cold: float) -> Iterator[Client]:
    """Requests that stream from here on, until the last server of the Ray backend is stopped."""
    with asking(practice) as made:
        yield made


@contextmanager
def asking(practice: Practice) -> Iterator[Client]:
    """Ask all the time."""
    made = Client(practice)
    thread = threading.Thread(target=made.stream)
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        thread.join()


def status(practice: Practice) -> tuple[Ran, dict[str, Any]]:
    """Return what `status` says of the server, and its exit code."""
    ran = practice.vlaunch("status", "--json")
    found: dict[str, Any] = json.loads(ran.out)["server"]
    return ran, found


def recovers(practice: Practice, client: Client, kill: Callable[[], object], *, within: float) -> dict[str, Any]:
    """Do something bad; return the fault that was written down when the server has answered again.

    `status` must be red in time, and the recovery must take no longer than `within`. Whoever asks `status` all the while takes
    the cores that the engine starts with: only requests stream, until one is answered.
    """
    _, before = status(practice)
    began = time.time()
    kill()
    red = None
    while red is None:
        ran, _ = status(practice)
        red = time.time() - began if ran.code == 1 else None
        assert time.time() - began < 60, "status stays green"
    since, deadline = time.time(), time.monotonic() + within + 60
    while not client.answered_since(since) and time.monotonic() < deadline:
        time.sleep(0.5)
    while True:
        ran, now = status(practice)
        kept = now["supervision"] or {}
        new = kept.get("faults", 0) > before["supervision"]["faults"]
        if now["state"] == "answering" and new and kept["fault"]["ready_again_after"] is not None:
            break
        assert time.monotonic() < deadline, ran.said
        time.sleep(1)
    fault: dict[str, Any] = kept["fault"]
    took, detected = fault["ready_again_after"], fault["at"] - began
    lost = [good for at, good in client.asked if began < at].count(False)
    LOG.info("red after %.1fs, noticed after %.1fs, ready again after %.1fs, %d requests refused", red, detected, took, lost)
    LOG.info("of these seconds: %s", fault["phases"])
    LOG.info("%s", fault)
    assert detected <= DETECTED
    assert took <= within
    assert client.answered_since(fault["at"] + took)
    return fault


def test_a_server_is_supervised(practice: Practice, client: Client) -> None:
    """`status` says so; requests are answered."""
    ran, server = status(practice)

    assert ran.code == 0, ran.said
    assert server["state"] == "answering"
    assert (server["supervision"]["state"], server["supervision"]["restarts_left"]) == ("ready", 20)
    assert server["supervision"]["fault"] is None


def test_the_supervisor_costs_next_to_nothing(practice: Practice, client: Client) -> None:
    """Less than 1 % of a core and 50 MB."""
    ((pid, _),) = running(practice, "supervisor.py run")

    def ticks() -> int:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[11]) + int(words[12])

    before = ticks()
    time.sleep(30)
    used = (ticks() - before) / os.sysconf("SC_CLK_TCK") / 30
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    LOG.info("%.2f %% of a core, %.0f MB", 100 * used, resident / 1e6)

    assert used < 0.01
    assert resident < 50e6


def test_a_workers_container_dies(practice: Practice, client: Client, cold: float) -> None:
    """As its machine or Docker kills it: the node is named, and Docker brings it back."""
    host = practice.lab.hosts[1]
    fault = recovers(
        practice, client, lambda: faults.kill_container(host, "vlaunch-lab-node2"), within=AGAIN * cold
    )  # fmt: skip
    shown = practice.vlaunch("status").out

    assert fault["node"] == "node2"
    assert fault["rank"] == "PP1"
    assert "19 restarts left" in shown
    assert "ready again after" in shown


def test_a_rank_dies(practice: Practice, client: Client, cold: float) -> None:
    """One worker process: its rank and its node are named."""
    fault = recovers(practice, client, lambda: kill_one(practice, "RayWorkerProc", "node2"), within=AGAIN * cold)

    assert (fault["node"], fault["rank"]) == ("node2", "PP1")


def test_the_engine_dies(practice: Practice, client: Client, cold: float) -> None:
    """No rank is to blame."""
    fault = recovers(practice, client, lambda: kill_one(practice, "EngineCore", "node1"), within=AGAIN * cold)

    assert fault["evidence"]


def test_the_supervisor_dies(practice: Practice, client: Client, cold: float) -> None:
    """The head's container has somebody who notices."""
    fault = recovers(practice, client, lambda: kill_one(practice, "supervisor.py run", "node1"), within=AGAIN * cold)

    assert fault["what"] == "the supervisor died"


def test_whoever_serves_the_same_watches_the_recovery(practice: Practice, client: Client, cold: float) -> None:
    """The same command is patient while the server comes back, and ends well."""
    kill_one(practice, "EngineCore", "node1")
    time.sleep(8)
    ran = practice.vlaunch("serve", "--timeout", "500", timeout=600)

    assert ran.code == 0, ran.said
    assert "this server runs already" in ran.err
    assert "recovering" in ran.err


def test_the_heads_container_dies(practice: Practice, client: Client, cold: float) -> None:
    """Ray and the supervisor die with it; both come back, and the server with them."""
    before = time.time()
    faults.kill_container(practice.lab.hosts[0], "vlaunch-lab-node1")
    comes_back(practice, client, before, AGAIN * cold + REBOOT)


def test_the_head_is_rebooted(practice: Practice, client: Client, cold: float) -> None:
    """The endpoint answers again without anyone typing."""
    before = time.time()
    faults.reboot(practice.lab, practice.lab.hosts[0])
    comes_back(practice, client, before, AGAIN * cold + REBOOT)
    _, server = status(practice)

    assert server["supervision"]["fault"]["what"] == "the head's container was restarted"


def comes_back(practice: Practice, client: Client, since: float, within: float) -> None:
    """Wait until a request is answered again, and look at what `status` says then."""
    while not client.answered_since(since + 5):
        assert time.time() - since < within, practice.vlaunch("status").said
        time.sleep(0.5)
    again = next(at for at, good in client.asked if good and at > since + 5)
    LOG.info("answers again %.0fs after the head died", again - since)
    deadline = time.monotonic() + 30
    while (found := status(practice))[1]["state"] != "answering" or found[0].code:
        assert time.monotonic() < deadline, found[0].said
    LOG.info("%s", found[1]["supervision"]["fault"])


def test_what_was_stopped_stays_stopped(practice: Practice, client: Client) -> None:
    """Also when the head restarts: nobody wants it any more."""
    client.over.set()
    stopped = practice.vlaunch("stop")
    faults.kill_container(practice.lab.hosts[0], "vlaunch-lab-node1")
    time.sleep(5)
    deadline = time.monotonic() + REBOOT
    while (found := status(practice))[0].code:
        assert time.monotonic() < deadline, found[0].said
        time.sleep(1)
    time.sleep(5)

    assert stopped.code == 0, stopped.said
    assert status(practice)[1]["state"] == "none"
    assert list(running(practice, "supervisor.py run")) == []


def test_it_gives_up_loudly(practice: Practice, client: Client) -> None:
    """With the reason, in `status` and as a failed job; the same command starts it again."""

    def once(document: dict[str, Any]) -> None:
        document["serve"]["restarts"] = 0

    practice.write(once)
    ran = practice.vlaunch("serve", "--timeout", "500", timeout=600)
    assert ran.code == 0, ran.said
    kill_one(practice, "EngineCore", "node1")
    deadline = time.monotonic() + 90
    while (found := status(practice))[1]["state"] != "gave-up":
        assert time.monotonic() < deadline, found[0].said
    shown = practice.vlaunch("status")

    assert found[0].code == 1
    assert "no restart is left of 0" in shown.out
    assert "GIVING UP" in practice.vlaunch("logs").out


def test_without_a_supervisor(practice: Practice, client: Client) -> None:
    """`--no-supervise`: what is dead stays dead."""
    ran = practice.vlaunch("serve", "--no-supervise", "--timeout", "500", timeout=600)
    _, server = status(practice)
    kill_one(practice, "EngineCore", "node1")
    deadline = time.monotonic() + 60
    # vLLM's own exit code decides: its API ends well when its engine is dead.
    while (found := status(practice))[1]["state"] not in ("failed", "none"):
        assert time.monotonic() < deadline, found[0].said

    assert ran.code == 0, ran.said
    assert server["supervision"] is None
    assert list(running(practice, "supervisor.py run")) == []


def test_a_rank_and_the_head_die_under_the_mp_backend(practice: Practice, cold: float) -> None:
    """Its containers are the ranks: the group comes back as one, also after a reboot."""
    practice.write(patient)
    ran = practice.vlaunch("serve", "--backend", "mp", "--replace", "--timeout", "500", timeout=600)
    assert ran.code == 0, ran.said
    with asking(practice) as client:
        host = practice.lab.hosts[1]
        fault = recovers(
            practice, client, lambda: faults.kill_container(host, "vlaunch-lab-node2-rank"), within=AGAIN * cold
        )  # fmt: skip
        before = time.time()
        faults.reboot(practice.lab, practice.lab.hosts[0])
        comes_back(practice, client, before, AGAIN * cold + REBOOT)
    stopped = practice.vlaunch("stop")

    assert fault["node"] == "node2"
    assert stopped.code == 0, stopped.said
    assert set(practice.containers()) == {"vlaunch-lab-node1", "vlaunch-lab-node2"}


def test_nothing_is_left(practice: Practice, client: Client) -> None:
    """`down` removes the record too, whose files belong to the container's root."""
    practice.write()
    ran = practice.vlaunch("down")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
    assert practice.on("node1", "sh", "-c", "ls -d /root/.vlaunch/lab* 2>/dev/null || true") == ""
