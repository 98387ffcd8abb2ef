"""The flood's own parts: how many requests are in flight, what counts as an answer, and how it is
judged.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks import client, flood
from benchmarks.client import Endpoint, ServerView

LOADED = {
    "name": "default",
    "state": "busy",
    "load": {"running": 8, "waiting": 892, "tokens_per_s": 310.0},
    "observed": {"asking": 84.0, "generation": 3, "fault_count": 2},
}


class Server(ThreadingHTTPServer):
    """Answers each request after a moment, all of them with `status`; `most` is how many there were
    at once.
    """

    daemon_threads = True

    def __init__(self, status: int, text: str, seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.text, self.seconds = status, text, seconds
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.bodies: list[dict[str, object]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(self.server.seconds)
        with self.server.lock:
            self.server.now -= 1
        with suppress(OSError):  # nobody waits for it any more
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(self.server.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(
    status: int = 200, text: str = '{"usage": {"completion_tokens": 4}}', seconds: float = 0.05
) -> Iterator[Server]:
    """Serve on a port of this machine."""
    with Server(status, text, seconds) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        yield server
        server.shutdown()


def to(server: Server) -> flood.Flood:
    """Return a flood that has not begun."""
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return flood.Flood(Endpoint(url=url, model="m"), tokens=4)


def poured(
    server: Server, requests: int, enough: Callable[[flood.Flood], bool], seconds: float = 60
) -> flood.Flood:
    """Flood a server until it is enough."""

    async def pour(sent: flood.Flood) -> None:
        running = asyncio.create_task(sent.run(requests, seconds))
        while not enough(sent) and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()

    sent = to(server)
    asyncio.run(pour(sent))
    return sent


def test_as_each_request_ends_another_is_sent() -> None:
    """And never more than asked for are in flight."""
    with serving() as server:
        sent = poured(server, 6, lambda sent: sent.answered > 6 and server.most >= 6)

    assert sent.answered > 6
    assert (sent.failed, server.most) == (0, 6)
    assert server.bodies[0] == {
        "model": "m",
        "prompt": "Say hello.",
        "max_tokens": 4,
        "ignore_eos": True,
    }


def test_what_has_no_answer_at_the_end_is_no_failure() -> None:
    """It is counted by itself."""
    with serving(seconds=2) as server:
        sent = to(server)
        asyncio.run(sent.run(3, 0.3))

    assert (sent.answered, sent.failed, sent.open) == (0, 0, 3)


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [(500, "{}", "HTTP 500"), (200, "", "EOFError: the answer is cut off")],
    ids=["500", "cut off"],
)
def test_what_counts_as_a_failure(
    status: int, text: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, and an answer that is cut off; it is followed by another only after a while."""
    monkeypatch.setattr(flood, "_AFTER_A_FAILURE", 60.0)
    with serving(status, text, 0) as server:
        sent = poured(server, 2, lambda sent: sent.failed > 1)

    assert (sent.answered, sent.failed, sent.errors) == (0, 2, [error, error])


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a failure, too."""
    monkeypatch.setattr(flood, "_AFTER_A_FAILURE", 60.0)
    with serving() as server:
        pass
    sent = poured(server, 2, lambda sent: sent.failed > 1)

    assert (sent.answered, sent.failed) == (0, 2)
    assert "Connect" in sent.errors[0]


def test_status_is_read_as_it_is_said() -> None:
    """A loaded server is green, with its queue; one that is not told of is red."""
    view, absent = client.parse_server(LOADED, 10.0, 12.5), client.parse_server({}, 0.0, 0.0)

    assert view == ServerView(
        at=12.5,
        took=2.5,
        state="busy",
        running=8,
        waiting=892,
        tokens_per_s=310.0,
        oldest=84.0,
        generation=3,
        faults=2,
    )
    assert (view.colour, view.queue) == ("green", True)
    assert (absent.colour, absent.queue, absent.state) == ("red", False, "none")
    assert client.parse_server({**LOADED, "state": "silent"}, 0, 0).colour == "red"


def test_a_flood_that_a_server_has_stood() -> None:
    """Every goal is met."""
    view = client.parse_server(LOADED, 0, 1)
    sent = flood.Flood(Endpoint(url="", model=""), 4, answered=320, open=992)

    assert [goal.met for goal in flood.judge_flood(sent, [view, view], 600)] == [True] * 4


@pytest.mark.parametrize(
    ("change", "failed", "missed"),
    [
        ({}, 1, 0),
        ({"state": "silent"}, 0, 1),
        ({"load": {"running": 0, "waiting": 0}}, 0, 2),
        ({"observed": {"generation": 4, "fault_count": 2}}, 0, 3),
        ({"observed": {"generation": 3, "fault_count": 3}}, 0, 3),
    ],
)
def test_one_look_is_enough(change: dict[str, object], failed: int, missed: int) -> None:
    """To miss a goal, and only that one."""
    sent = flood.Flood(Endpoint(url="", model=""), 4, answered=320, failed=failed)
    goals = flood.judge_flood(
        sent,
        [client.parse_server(LOADED, 0, 1), client.parse_server({**LOADED, **change}, 20, 21)],
        600,
    )

    assert [at for at, goal in enumerate(goals) if not goal.met] == [missed]


def test_without_a_look_nothing_is_shown() -> None:
    """A flood that was too short for one has not met its goals."""
    goals = flood.judge_flood(flood.Flood(Endpoint(url="", model=""), 4, answered=1), [], 1)

    assert [goal.met for goal in goals] == [True, False, False, True]


def test_the_report() -> None:
    """A table for people, JSON for programs."""
    goals = [flood.Goal(what="a", seen="1 of 2", met=False)]

    assert flood.format_report(goals, as_json=False).splitlines()[2] == "| a | 1 of 2 | missed |"
    assert json.loads(flood.format_report(goals, as_json=True)) == {
        "goals": [{"what": "a", "seen": "1 of 2", "met": False}],
        "met": False,
    }
