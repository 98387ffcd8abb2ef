"""`vlaunch soak`: which server is loaded, by which way, and what comes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.errors import ConnectError
from launcher.model import Answer
from launcher.transport import Command
from tests import kept
from tests.cli.conftest import INVENTORY, Cluster
from tests.soak.endpoint import TOKEN, Endpoint

COUNTED = "Tcp: OutSegs RetransSegs\nTcp: {} {}\n"


@pytest.fixture
def end() -> Iterator[Endpoint]:
    """An endpoint behind the tunnel."""
    with Endpoint(TOKEN, TOKEN) as made:
        yield made


@pytest.fixture
def serving(up: Cluster, end: Endpoint) -> Cluster:
    """A server whose API listens on its node's loopback, on nodes that count segments."""
    kept.keep(up.world, kept.wanted(host="127.0.0.1"), task="completion", verdict="answering")
    up.tunnel_port = end.port
    answer, asked = up.world.answer, dict[str, int]()

    def counted(command: Command) -> Answer | None:
        if "snmp" not in str(command.argv):
            return answer(command)
        asked[command.node] = asked.get(command.node, 0) + 1
        text = COUNTED.format(1000 * asked[command.node], 3 * asked[command.node])
        return Answer(node=command.node, code=0, out=text)

    up.world.answer = counted  # type: ignore[method-assign]
    return up


@pytest.fixture
def then(serving: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Return what sets what happens while a soak waits for its end."""

    def happens(what: Callable[[], Any]) -> None:
        monkeypatch.setattr("launcher.cli.soak._pause", lambda _: what())

    return happens


def test_a_soak_that_passes(serving: Cluster, end: Endpoint) -> None:
    """For as long as was said, with as many streams, through the tunnel; nothing is changed."""
    serving.commands.clear()
    ran = serving.run("soak", "1s", "--streams", "2", "--tokens", "2")

    assert (ran.code, serving.world.changes) == (0, [])
    assert serving.forwards == [("gpu01", "127.0.0.1", 8000, 0)]
    assert end.most == 2
    assert {each["model"] for each in end.asked} == {"served-name"}
    assert "2 streams at server `default`, through SSH" in ran.err
    assert "retransmits  gpu01: 3 of 1,000 segments (0.300%)\n" in ran.out
    assert ran.out.endswith("verdict      passed\n")


def test_json_is_one_object(serving: Cluster) -> None:
    """And nothing else."""
    ran = serving.run("soak", "1s", "--json")
    said = json.loads(ran.out)

    assert (ran.code, ran.err, said["passed"], said["streams"]) == (0, "", True, 4)
    assert said["retransmits"]["gpu02"] == {"again": 3, "sent": 1000}


def test_a_restart_meanwhile(
    serving: Cluster, then: Callable[[Callable[[], Any]], None], end: Endpoint
) -> None:
    """It fails, although every request was answered."""

    def restarts() -> None:
        end.until(lambda: end.finished >= 8)
        serving.world.observed["default"] |= {"generation": 1, "verdict": "recovering"}

    then(restarts)
    ran = serving.run("soak", "30m")

    assert ran.code == 1
    assert "failed: restarts: 1; the server is recovering" in ran.out


def test_ctrl_c_gives_what_there_is(
    serving: Cluster, then: Callable[[Callable[[], Any]], None], end: Endpoint
) -> None:
    """And ends the requests."""

    def interrupts() -> None:
        end.until(lambda: end.finished >= 4)
        raise KeyboardInterrupt

    then(interrupts)
    ran = serving.run("soak", "30m")

    assert ran.code == 130
    assert ran.out.endswith("verdict      interrupted\n")
    assert threading.active_count() < 10


def test_the_endpoint_itself_is_preferred(
    serving: Cluster, monkeypatch: pytest.MonkeyPatch, end: Endpoint
) -> None:
    """Where this machine reaches it, and it has the same model as on its node."""
    kept.keep(
        serving.world,
        kept.wanted(host="127.0.0.1", port=end.port),
        task="completion",
        verdict="answering",
    )
    assert "directly" in serving.run("soak", "1s").err
    names = iter(("org/m", "another"))
    monkeypatch.setattr("launcher.soak.load.Endpoint.model", lambda _: next(names))
    assert "through SSH" in serving.run("soak", "1s").err


def test_a_key_is_sent_through_ssh_alone(
    serving: Cluster, end: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, another machine may have the endpoint's address."""
    monkeypatch.setenv("KEY", "sk-0123456789")
    serving.write(INVENTORY.replace("{HF_", "{VLLM_API_KEY: {env: KEY}, HF_"))
    kept.keep(serving.world, kept.wanted(host="127.0.0.1", port=end.port), task="completion")
    ran = serving.run("soak", "1s")

    assert "through SSH" in ran.err
    assert set(end.keys) == {"Bearer sk-0123456789"}


def test_a_head_that_has_gone(serving: Cluster, then: Callable[[Callable[[], Any]], None]) -> None:
    """The rest of the verdict is told."""
    then(lambda: serving.world.said.update(servers={"error": "gone"}))
    ran = serving.run("soak", "30m", "--json")
    said = json.loads(ran.out)

    assert (ran.code, said["health"], said["failures"]) == (1, "unknown", ["the server is unknown"])


def test_what_cannot_be_soaked(serving: Cluster) -> None:
    """One that is not ready, one that does not generate, one that does not answer."""
    serving.world.observed["default"] |= {"task": "embedding"}
    ran = serving.run("soak", "1s")
    assert (ran.code, "does not generate" in ran.err) == (2, True)
    serving.world.observed["default"] |= {"state": "starting"}
    ran = serving.run("soak", "1s")
    assert (ran.code, "is starting, not ready" in ran.err) == (2, True)
    kept.keep(serving.world, kept.wanted(host="127.0.0.1"), task="chat")
    serving.tunnel_port = 1
    ran = serving.run("soak", "1s")
    assert (ran.code, "its API does not answer" in ran.err) == (1, True)


def test_a_node_that_is_gone_has_no_count(serving: Cluster) -> None:
    """The soak goes on without it."""
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached")
    ran = serving.run("soak", "1s")

    assert ran.code == 0
    assert "gpu02" not in ran.out


@pytest.mark.parametrize("words", [["30"], ["8d"], [], ["1s", "--streams", "65"]])
def test_what_is_no_soak(serving: Cluster, words: list[str]) -> None:
    """A time without a unit, one that is too long, more streams than there may be."""
    assert serving.run("soak", *words).code == 2
