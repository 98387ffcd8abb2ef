"""`vlaunch soak`: server, route and output."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from tests import supervision
from tests.command_line import INVENTORY, Cluster
from tests.serving.soak.endpoint import TOKEN, Endpoint

COUNTERS = "Tcp: OutSegs RetransSegs\nTcp: {} {}\n"


@pytest.fixture
def server() -> Iterator[Endpoint]:
    """An endpoint behind the tunnel."""
    with Endpoint(TOKEN, TOKEN) as server:
        yield server


@pytest.fixture
def serving(up: Cluster, server: Endpoint) -> Cluster:
    """A server whose API listens on its node's loopback, on nodes with TCP counters."""
    supervision.store_server(
        up.world, supervision.make_spec(host="127.0.0.1"), task="completion", verdict="answering"
    )
    up.tunnel_port = server.port
    answer, reads = up.world.answer, Counter[str]()

    def answer_counters(command: Command) -> Answer | None:
        if "snmp" not in str(command.argv):
            return answer(command)
        reads[command.node] += 1
        text = COUNTERS.format(1000 * reads[command.node], 3 * reads[command.node])
        return Answer(node=command.node, code=0, out=text)

    up.world.answer = answer_counters  # type: ignore[method-assign]
    return up


@pytest.fixture
def on_pause(
    serving: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], Any]], None]:
    """A function that sets an action to run while a soak waits for its end."""

    def set_action(action: Callable[[], Any]) -> None:
        monkeypatch.setattr("launcher.serving.soak_command._pause", lambda _: action())

    return set_action


def test_a_soak_that_passes(serving: Cluster, server: Endpoint) -> None:
    """It uses the given number of streams and the tunnel, and changes nothing."""
    serving.commands.clear()
    ran = serving.run("soak", "3s", "--streams", "2", "--tokens", "2")

    assert (ran.code, serving.world.changes) == (0, [])
    assert serving.forwards == [("gpu01", "127.0.0.1", 8000, 0)]
    assert server.most_open == 2
    assert {request["model"] for request in server.requests} == {"served-name"}
    assert "2 streams at server `default`, through SSH" in ran.err
    assert "retransmits  gpu01: 3 of 1,000 segments (0.300%)\n" in ran.out
    assert ran.out.endswith("verdict      passed\n")


def test_json_output_is_an_object(serving: Cluster) -> None:
    """Nothing is written to standard error."""
    ran = serving.run("soak", "1s", "--json")
    verdict = json.loads(ran.out)

    assert (ran.code, ran.err, verdict["passed"], verdict["streams"]) == (0, "", True, 4)
    assert verdict["retransmits"]["gpu02"] == {"again": 3, "sent": 1000}


def test_a_restart_during_the_soak(
    serving: Cluster, on_pause: Callable[[Callable[[], Any]], None], server: Endpoint
) -> None:
    """The soak fails, although every request was answered."""

    def restart() -> None:
        server.wait_until(lambda: server.finished >= 8)
        serving.world.observed["default"] |= {"generation": 1, "verdict": "recovering"}

    on_pause(restart)
    ran = serving.run("soak", "30m")

    assert ran.code == 1
    assert "failed: restarts: 1; the server is restarting" in ran.out


def test_ctrl_c_shows_the_results_so_far(
    serving: Cluster, on_pause: Callable[[Callable[[], Any]], None], server: Endpoint
) -> None:
    """It also cancels the requests."""

    def interrupt() -> None:
        server.wait_until(lambda: server.finished >= 4)
        raise KeyboardInterrupt

    before = threading.active_count()
    on_pause(interrupt)
    ran = serving.run("soak", "30m")

    assert ran.code == 130
    assert ran.out.endswith("verdict      interrupted\n")
    assert threading.active_count() < before + 10


def test_a_direct_connection_is_preferred(
    serving: Cluster, monkeypatch: pytest.MonkeyPatch, server: Endpoint
) -> None:
    """It is used if the endpoint is reachable and reports the same model as through SSH."""
    supervision.store_server(
        serving.world,
        supervision.make_spec(host="127.0.0.1", port=server.port),
        task="completion",
        verdict="answering",
    )
    assert "directly" in serving.run("soak", "1s").err
    names = iter(("org/m", "another"))
    monkeypatch.setattr("launcher.serving.soak.load.LoadTarget.query_model", lambda _: next(names))
    assert "through SSH" in serving.run("soak", "1s").err


def test_an_api_key_is_sent_only_through_ssh(
    serving: Cluster, server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From this network, another machine may answer at the endpoint's address."""
    monkeypatch.setenv("KEY", "sk-0123456789")
    serving.write(INVENTORY.replace("{HF_", "{VLLM_API_KEY: {env: KEY}, HF_"))
    supervision.store_server(
        serving.world, supervision.make_spec(host="127.0.0.1", port=server.port), task="completion"
    )
    ran = serving.run("soak", "1s")

    assert "through SSH" in ran.err
    assert set(server.keys) == {"Bearer sk-0123456789"}


def test_a_head_that_stops_answering(
    serving: Cluster, on_pause: Callable[[Callable[[], Any]], None]
) -> None:
    """The rest of the verdict is printed."""
    on_pause(lambda: serving.world.responses.update(servers={"error": "gone"}))
    ran = serving.run("soak", "30m", "--json")
    verdict = json.loads(ran.out)

    assert (ran.code, verdict["health"]) == (1, "unknown")
    assert verdict["failures"] == ["the server is unknown"]


def test_unsuitable_servers_are_rejected(serving: Cluster) -> None:
    """A server must generate text, be ready, and answer."""
    serving.world.observed["default"] |= {"task": "embedding"}
    ran = serving.run("soak", "1s")
    assert (ran.code, "does not generate" in ran.err) == (2, True)
    serving.world.observed["default"] |= {"state": "starting"}
    ran = serving.run("soak", "1s")
    assert (ran.code, "is starting, not ready" in ran.err) == (2, True)
    supervision.store_server(serving.world, supervision.make_spec(host="127.0.0.1"), task="chat")
    serving.tunnel_port = 1
    ran = serving.run("soak", "1s")
    assert (ran.code, "no answer from its API" in ran.err) == (1, True)


def test_an_unreachable_node_has_no_counters(serving: Cluster) -> None:
    """The soak continues without it."""
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached")
    ran = serving.run("soak", "1s")

    assert ran.code == 0
    assert "gpu02" not in ran.out


@pytest.mark.parametrize("arguments", [["30x"], ["8d"], [], ["1s", "--streams", "65"]])
def test_invalid_arguments(serving: Cluster, arguments: list[str]) -> None:
    """Durations have a maximum, as has the number of streams."""
    assert serving.run("soak", *arguments).code == 2
