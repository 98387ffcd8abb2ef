"""Streams of requests at a real endpoint, and what is counted of their answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from launcher.payload.agent.task import CHAT, COMPLETION, Task
from launcher.soak import load
from launcher.soak.load import Load, Stream, Times
from tests.soak.endpoint import MODEL, ROLE, TOKEN, USAGE, Endpoint


def at(port: int, **headers: str) -> load.Endpoint:
    """Return where a local endpoint is."""
    return load.Endpoint(host="127.0.0.1", port=port, headers=headers)


def loaded(
    *ends: Endpoint, streams: int = 2, task: Task = COMPLETION, tokens: int = 3, **headers: str
) -> Load:
    """Return a load on endpoints."""
    places = [at(each.port, **headers) for each in ends]
    return Load(places, "served-name", task, tokens, [Stream() for _ in range(streams)])


def test_tokens_are_counted_and_timed() -> None:
    """Each request has a first token and others; what only tells usage is none."""
    with (
        Endpoint(TOKEN, TOKEN, TOKEN, USAGE) as end,
        loaded(end, Authorization="Bearer k") as run,
    ):
        end.until(lambda: run.done >= 4)

    assert run.errors == Counter()
    assert run.tokens == pytest.approx(3 * run.done, abs=3 * len(run.streams))
    assert run.first.percentile(0.5) is not None and run.between.percentile(0.99) is not None
    assert 0 < run.first.longest <= run.wait and run.waited_until <= run.seconds
    assert set(end.keys) == {"Bearer k"}
    assert end.asked[0]["max_tokens"] == 3
    assert end.asked[0]["stream"] is end.asked[0]["ignore_eos"] is True
    assert len({each["prompt"] for each in end.asked}) == len(end.asked), "none is in the cache"


def test_never_more_than_was_said_are_under_way() -> None:
    """A stream sends its next request when the last has ended."""
    with Endpoint(TOKEN, None) as end:
        with loaded(end, streams=3) as run:
            end.until(lambda: run.tokens == 3)
            end.go.set()
            end.until(lambda: run.done >= 9)

        assert end.most == 3


def test_all_endpoints_get_requests() -> None:
    """Also when there are fewer streams than endpoints."""
    with Endpoint(TOKEN) as one, Endpoint(TOKEN) as other:
        with loaded(one, other, streams=1) as run:
            one.until(lambda: run.done >= 4)

        assert one.finished and other.finished


def test_the_end_cuts_what_is_under_way() -> None:
    """It is neither done nor an error, and its wait counts; nobody waits for the server."""
    with Endpoint(TOKEN, TOKEN, None, TOKEN) as end:
        with loaded(end) as run:
            end.until(lambda: run.tokens == 4)
            stalled = time.monotonic()
            end.until(lambda: time.monotonic() > stalled + 0.05)
        took = time.monotonic() - stalled - 0.05

    assert (run.open, run.done, run.errors.total()) == (2, 0, 0)
    assert run.wait >= 0.05
    assert run.between.longest < run.wait, "the wait has not ended with a token"
    assert took < 4, "the server was not waited for"


def test_the_longest_wait_is_the_one_between_two_tokens() -> None:
    """With the time when it ended."""
    with Endpoint(TOKEN, None, TOKEN) as end, loaded(end, streams=1) as run:
        end.until(lambda: run.tokens == 1)
        stalled = time.monotonic()
        end.until(lambda: time.monotonic() > stalled + 0.2)
        end.go.set()
        end.until(lambda: run.done >= 1)

    assert run.wait == run.between.longest >= 0.2
    assert run.wait <= run.waited_until <= run.seconds


@pytest.mark.parametrize(
    ("events", "more", "words"),
    [
        ([TOKEN], {"whole": False}, "broke off"),
        (["no"], {"status": 500}, "HTTP 500"),
        ([TOKEN, {"error": {"message": "EngineDeadError"}}], {}, "EngineDeadError"),
        (["{"], {}, "JSONDecodeError"),
        (["7"], {}, "TypeError"),
        ([{"choices": [7]}], {}, "AttributeError"),
    ],
)
def test_what_is_no_answer_is_an_error(events: list[Any], more: Any, words: str) -> None:
    """And the stream goes on."""
    with Endpoint(*events, **more) as end, loaded(end, streams=1) as run:
        end.until(lambda: run.errors.total() >= 2)

    ((said, count),) = run.errors.items()
    assert words in said
    assert (count >= 2, run.done) == (True, 0)


def test_an_endpoint_that_is_not_there() -> None:
    """Is an error, too."""
    with Endpoint() as end:
        gone = end.port
    with Endpoint() as end, Load([at(gone)], "m", CHAT, 1, [Stream()]) as run:
        end.until(lambda: run.errors.total() >= 1)

    assert "refused" in str(run.errors)
    with pytest.raises(OSError, match="refused"):
        at(gone).model()


def test_who_speaks_is_no_token() -> None:
    """A chat begins with it."""
    with Endpoint(ROLE, None, TOKEN) as end, loaded(end, streams=1, task=CHAT) as run:
        end.until(lambda: len(end.asked) == 1)
        assert run.tokens == 0
        end.go.set()
        end.until(lambda: run.done >= 2)

    assert run.tokens in (run.done, run.done + 1)
    assert end.asked[0]["messages"]


def test_the_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the API says it; what is no vLLM has none."""
    with Endpoint() as end:
        assert at(end.port).model() == "served-name"
        monkeypatch.setitem(MODEL, "data", [])
        with pytest.raises(ValueError, match="no model"):
            at(end.port).model()


def test_times_are_kept_to_within_two_percent() -> None:
    """In as little memory for a week as for a minute."""
    times = Times()
    assert times.percentile(0.5) is None
    for number in range(1, 1001):
        times.add(number / 1000)

    assert times.percentile(0.5) == pytest.approx(0.5, rel=0.02)
    assert times.percentile(0.99) == pytest.approx(0.99, rel=0.02)
    assert times.percentile(1.0) == times.longest == 1.0
