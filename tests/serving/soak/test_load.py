"""Streams of requests to a local endpoint, and the counters of a load."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from launcher.agent.health.task import CHAT, COMPLETION, ModelTask
from launcher.serving.soak import load
from launcher.serving.soak.load import DurationHistogram, LoadGenerator
from tests.serving.soak.endpoint import MODEL, ROLE, TOKEN, USAGE, Endpoint


def target(port: int, **headers: str) -> load.LoadTarget:
    """Return the load's view of a local endpoint."""
    return load.LoadTarget(host="127.0.0.1", port=port, headers=headers)


def make_load(
    *endpoints: Endpoint,
    streams: int = 2,
    task: ModelTask = COMPLETION,
    tokens: int = 3,
    **headers: str,
) -> LoadGenerator:
    """Return a load on endpoints."""
    targets = [target(endpoint.port, **headers) for endpoint in endpoints]
    return LoadGenerator(targets, "served-name", task, tokens, streams)


def test_tokens_are_counted_and_timed() -> None:
    """Every request has a first token and others; an event with usage alone has none."""
    with (
        Endpoint(TOKEN, TOKEN, TOKEN, USAGE) as server,
        make_load(server, Authorization="Bearer k") as run,
    ):
        server.wait_until(lambda: run.done >= 4)

    assert run.errors == Counter()
    assert run.tokens == pytest.approx(3 * run.done, abs=3 * run.streams)
    assert run.first.percentile(0.5) is not None and run.between.percentile(0.99) is not None
    assert 0 < run.first.longest <= run.longest_wait and run.waited_until <= run.seconds
    assert set(server.keys) == {"Bearer k"}
    assert server.requests[0]["max_tokens"] == 3
    assert server.requests[0]["stream"] is server.requests[0]["ignore_eos"] is True
    prompts = [request["prompt"] for request in server.requests]
    assert len(set(prompts)) == len(prompts), "a repeated prompt would be in the prefix cache"


def test_open_requests_never_exceed_the_number_of_streams() -> None:
    """A stream sends its next request after the previous one has ended."""
    with Endpoint(TOKEN, None) as server:
        with make_load(server, streams=3) as run:
            server.wait_until(lambda: run.tokens == 3)
            server.go.set()
            server.wait_until(lambda: run.done >= 9)

        assert server.most_open == 3


def test_all_endpoints_get_requests() -> None:
    """Also with fewer streams than endpoints."""
    with Endpoint(TOKEN) as first, Endpoint(TOKEN) as second:
        with make_load(first, second, streams=1) as run:
            first.wait_until(lambda: run.done >= 4)

        assert first.finished and second.finished


def test_the_end_cancels_open_requests() -> None:
    """They are neither done nor errors, and their wait counts; the end is immediate."""
    with Endpoint(TOKEN, TOKEN, None, TOKEN) as server:
        with make_load(server) as run:
            server.wait_until(lambda: run.tokens == 4)
            stalled = time.monotonic()
            server.wait_until(lambda: time.monotonic() > stalled + 0.05)
        elapsed = time.monotonic() - stalled - 0.05

    assert (run.open, run.done, run.errors.total()) == (2, 0, 0)
    assert run.longest_wait >= 0.05
    assert run.between.longest < run.longest_wait, "no token ended the wait"
    assert elapsed < 4, "the load waited for the server"


def test_the_longest_wait_is_between_two_tokens() -> None:
    """Its end is recorded too."""
    with Endpoint(TOKEN, None, TOKEN) as server, make_load(server, streams=1) as run:
        server.wait_until(lambda: run.tokens == 1)
        stalled = time.monotonic()
        server.wait_until(lambda: time.monotonic() > stalled + 0.2)
        server.go.set()
        server.wait_until(lambda: run.done >= 1)

    assert run.longest_wait == run.between.longest >= 0.2
    assert run.longest_wait <= run.waited_until <= run.seconds


@pytest.mark.parametrize(
    ("events", "settings", "message"),
    [
        ([TOKEN], {"complete": False}, "cut off"),
        (["no"], {"status": 500}, "HTTP 500"),
        ([TOKEN, {"error": {"message": "EngineDeadError"}}], {}, "EngineDeadError"),
        (["{"], {}, "JSONDecodeError"),
        (["7"], {}, "TypeError"),
        ([{"choices": [7]}], {}, "AttributeError"),
    ],
)
def test_an_invalid_answer_is_an_error(events: list[Any], settings: Any, message: str) -> None:
    """The stream continues with its next request."""
    with Endpoint(*events, **settings) as server, make_load(server, streams=1) as run:
        server.wait_until(lambda: run.errors.total() >= 2)

    ((error, count),) = run.errors.items()
    assert message in error
    assert (count >= 2, run.done) == (True, 0)


def test_a_closed_port_is_an_error() -> None:
    """Requests fail, and so does reading the model's name."""
    with Endpoint() as server:
        closed = target(server.port)
    with Endpoint() as server, LoadGenerator([closed], "m", CHAT, 1, 1) as run:
        server.wait_until(lambda: run.errors.total() >= 1)

    assert "refused" in str(run.errors)
    with pytest.raises(OSError, match="refused"):
        closed.query_model()


def test_a_role_is_not_a_token() -> None:
    """It is the first event of a chat."""
    with Endpoint(ROLE, None, TOKEN) as server, make_load(server, streams=1, task=CHAT) as run:
        server.wait_until(lambda: len(server.requests) == 1)
        assert run.tokens == 0
        server.go.set()
        server.wait_until(lambda: run.done >= 2)

    assert run.tokens in (run.done, run.done + 1)
    assert server.requests[0]["messages"]


def test_the_models_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the API; without a model in its list, reading fails."""
    with Endpoint() as server:
        assert target(server.port).query_model() == "served-name"
        monkeypatch.setitem(MODEL, "data", [])
        with pytest.raises(ValueError, match="no model"):
            target(server.port).query_model()


def test_percentiles_are_exact_to_two_percent() -> None:
    """They come from a histogram of constant size."""
    times = DurationHistogram()
    assert times.percentile(0.5) is None
    for number in range(1, 1001):
        times.add(number / 1000)

    assert times.percentile(0.5) == pytest.approx(0.5, rel=0.02)
    assert times.percentile(0.99) == pytest.approx(0.99, rel=0.02)
    assert times.percentile(1.0) == times.longest == 1.0
