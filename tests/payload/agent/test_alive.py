"""What probes of Kubernetes and the like are told: whether a server has answered, and whether it
lives.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from launcher.payload.agent import api, head
from launcher.payload.agent.alive import alive, answered
from launcher.payload.agent.api import Where
from tests.payload.agent.web import Replicas, Server

pytestmark = pytest.mark.usefixtures("folders")
TOKENS = 'vllm:generation_tokens_total{{engine="0"}} {}.0\n'


def where(server: Server, **more: Any) -> Where:
    return Where(api=server.port, timeout=0.3, **more)


def silent(server: Server, *, moves: bool | None) -> list[object]:
    """Let completions wait; whoever adds to what is returned lets them go. Counters move, stand
    still, or are none (None).
    """
    count, release = iter(range(100)), list[object]()
    server.answers["/v1/chat/completions"] = lambda _: api.until(lambda: release, 5) or ""
    server.answers["/metrics"] = lambda _: (
        "" if moves is None else TOKENS.format(next(count) if moves else 7)
    )
    return release


def test_who_answers_has_answered_and_lives(server: Server) -> None:
    """With the words of the answer."""
    assert answered(where(server))["text"] == "Hi"
    assert "error" not in alive(where(server))


def test_every_replica_must_have_answered(server: Server) -> None:
    """One that has not is named."""
    server.replicas = Replicas(refusing={1: (500, "EngineDeadError")})

    assert answered(where(server, engines=2))["error"] == "no answer of replica 1"


@pytest.mark.parametrize(("moves", "lives"), [(True, True), (False, False), (None, True)])
def test_who_does_not_answer_in_time(server: Server, moves: bool | None, lives: bool) -> None:
    """It has not started; it lives if anything moves, or if nobody can know."""
    release = silent(server, moves=moves)
    try:
        assert "error" in answered(where(server))
        assert ("error" not in alive(where(server))) is lives
    finally:
        release.append(1)


def test_nobody_listens() -> None:
    """That is no life, whatever cannot be known."""
    gone = Where(api=1, timeout=0.3)

    assert answered(gone)["error"]
    assert "neither answers nor moves" in alive(gone)["error"]


def test_a_refusal_is_a_sign_of_life(server: Server) -> None:
    """Another key does not make it dead, but it is no answer."""
    server.answers["/v1/models"] = (401, "Unauthorized")

    assert answered(where(server))["error"] == "Unauthorized"
    assert "error" not in alive(where(server))


def test_a_dead_engine_is_dead(server: Server) -> None:
    """It says so, with 500, at once."""
    server.answers["/v1/chat/completions"] = (500, "EngineDeadError")
    server.answers["/health"] = (503, "")

    assert "EngineDeadError" in alive(where(server))["error"]


def test_who_rests_on_purpose_lives(server: Server) -> None:
    """Sleeping engines answer nothing and count nothing."""
    release = silent(server, moves=False)
    server.answers["/is_sleeping"] = {"is_sleeping": True}
    try:
        assert alive(where(server))["rests"] == "it sleeps"
    finally:
        release.append(1)


def test_a_server_that_is_rescaled_lives(server: Server) -> None:
    """It answers 503 on every path meanwhile."""
    text = '{"error":"The model is currently scaling. Please try again later."}'
    server.answers |= dict.fromkeys(("/health", "/v1/chat/completions"), (503, text))

    assert alive(where(server))["rests"] == "it is being rescaled"


@pytest.mark.parametrize("verb", ["answered", "alive"])
def test_the_exit_code_is_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """For the kubelet reads nothing else."""

    def code(port: int) -> int:
        monkeypatch.setattr(sys, "argv", ["head.py", verb, "--api", str(port), "--timeout", "1"])
        return head.main()

    assert (code(server.port), code(1)) == (0, 1)
