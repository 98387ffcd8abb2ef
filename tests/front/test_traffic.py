"""Requests by user and server, in a front's access log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.front.traffic import Traffic, parse_traffic


def line(**changes: Any) -> str:
    """Return a line of the log."""
    entry = {
        "user": "alice",
        "server": "chat",
        "status": 200,
        "first_byte_ms": 10,
        "total_ms": 100,
        "end": "----",
    }
    return json.dumps({**entry, **changes}) + "\n"


def test_users_and_servers_are_apart() -> None:
    """Over the logs of all fronts."""
    first = line() + line(user="bob", server="embed", total_ms=3000)
    second = line(total_ms=300) + "[NOTICE] (1) : Loading success.\n"
    common = {"errors": 0, "rejected": 0, "first_byte_p50": 0.01, "first_byte_p99": 0.01}

    assert parse_traffic([first, second]) == (
        Traffic(user="alice", server="chat", requests=2, total_p50=0.3, total_p99=0.3, **common),
        Traffic(user="bob", server="embed", requests=1, total_p50=3.0, total_p99=3.0, **common),
    )


def test_percentiles_are_those_of_answers() -> None:
    """A rejected request is fast."""
    log = "".join(line(total_ms=ms) for ms in range(1, 101)) + line(status=429, total_ms=0) * 100
    (traffic,) = parse_traffic([log])

    assert (traffic.total_p50, traffic.total_p99) == (0.051, 0.1)
    assert (traffic.requests, traffic.rejected, traffic.errors) == (200, 100, 0)


@pytest.mark.parametrize(
    ("changes", "errors"),
    [
        ({"status": 502, "end": "SH--"}, 1),
        ({"end": "SD--"}, 1),  # a cut stream
        ({"end": "sD--"}, 1),
        ({"status": 503, "end": "LR--"}, 1),
        ({"end": "CD--"}, 0),  # the client left
        ({"end": "cD--"}, 0),
    ],
)
def test_errors_are_those_of_servers(changes: dict[str, Any], errors: int) -> None:
    """Also behind a status of 200."""
    (traffic,) = parse_traffic([line(**changes)])

    assert (traffic.errors, traffic.total_p50) == (errors, None if errors else 0.1)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"user": "a"}', line(status="200"), line()[:40], "[" * 100_000]
)
def test_other_lines_are_ignored(text: str) -> None:
    """Whatever a node sends."""
    assert parse_traffic([text]) == ()
