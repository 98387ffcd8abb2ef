"""How a server is: by what came back from it, else by its keeper's word; and when nobody can
tell.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.payload.agent.observed import Observed
from tests import kept
from tests.simulated import World
from tests.state.conftest import ANSWER, LATE, jobs, look, serve


@pytest.mark.parametrize(
    ("how", "state"),
    [
        (None, "waiting"),
        (kept.seen(state="waiting", doing="waiting for gpu02"), "waiting"),
        (kept.seen(state="starting"), "starting"),
        (kept.seen(state="stopping"), "stopping"),
        (kept.seen(state="waiting", fault_count=1), "recovering"),
        (kept.seen(state="starting", fault_count=1), "recovering"),
        (kept.seen(state="stopping", fault_count=1), "recovering"),
        (kept.seen(state="pausing", fault_count=1), "recovering"),
        (kept.seen(state="failed", doing="no GPU", fault_count=1), "failed"),
        (kept.seen(state="gave-up", fault_count=4), "gave-up"),
    ],
)
def test_what_the_keeper_does_with_a_server(world: World, how: Observed | None, state: str) -> None:
    """A first start is no recovery; what follows a fault is one, and red."""
    server = serve(world, how)

    assert server.state == state
    assert server.detail == (how.doing if how else "its keeper has not begun with it")
    assert look(world).whole is (state in ("waiting", "starting", "stopping"))


def test_a_server_that_answers_before_its_keeper_knows_answers(world: World) -> None:
    """And one whose keeper has died is green with a warning: it works."""
    assert (
        serve(world, kept.seen(state="starting", fault_count=1), default=ANSWER).state
        == "answering"
    )

    server = serve(world, kept.seen(), agent=75.0, default=ANSWER)
    assert (server.state, server.warning) == (
        "answering",
        "the head's agent has said nothing for 75 s, so that nobody keeps it",
    )


@pytest.mark.parametrize(
    ("how", "completion", "state"),
    [
        # vLLM's own counters moved while the completion waited.
        (kept.seen(still=0.0, asking=84.0), {**LATE, "moved": True}, "busy"),
        (kept.seen(still=40.0), {**LATE, "moved": True}, "busy"),
        # They did not, or are not there, but the keeper saw something move: a log line, GPU time.
        (kept.seen(still=3.0, asking=20.0), {**LATE, "moved": False}, "busy"),
        (kept.seen(still=3.0, asking=20.0), {**LATE, "moved": None}, "busy"),
        (kept.seen(still=3.0, warning="refused"), {"status": 500, "error": "no"}, "busy"),
        # Nothing moved.
        (kept.seen(still=42.0, asking=42.0), {**LATE, "moved": False}, "silent"),
        (kept.seen(still=42.0, asking=42.0), LATE, "silent"),
        (kept.seen(), {**LATE, "moved": False}, "silent"),
        (kept.seen(), {"status": 500, "error": "EngineDeadError"}, "silent"),
    ],
)
def test_a_busy_server_is_no_silent_one(
    world: World, how: Observed, completion: dict[str, Any], state: str
) -> None:
    """It is green while anything of it moves; `/health` says 200 of both."""
    server = serve(world, how, default=completion)

    assert server.state == state
    assert look(world, default=completion).whole is (state == "busy")


def test_the_word_of_a_keeper_that_is_old_makes_nothing_busy(world: World) -> None:
    """It may have been frozen with its server."""
    assert serve(world, kept.seen(still=3.0, asking=20.0), age=30.0, default=LATE).state == "silent"


def test_silence_says_for_how_long_and_what_the_keeper_does(world: World) -> None:
    """With nodes' names in the place of addresses."""
    server = serve(world, kept.seen(still=42.0, doing="nothing comes from 10.0.0.12"), default=LATE)

    assert (
        server.detail
        == "no completion: timed out; nothing has moved for 42 s; its keeper: nothing comes from"
        " gpu02"
    )


def test_a_replica_that_gives_no_answer_is_silence(world: World) -> None:
    """Another one's answer proves nothing for it: a part of the requests hangs.

    Under a flood it is busy like the others.
    """
    good = {"status": 200, "seconds": 0.1, "error": "", "answered": True}
    late = {"status": 0, "seconds": 8.0, "error": "timed out", "answered": False}
    completion = {**ANSWER, "replicas": [good, late]}
    server = serve(world, kept.seen(), default=completion)

    assert (server.state, server.detail) == (
        "silent",
        "replica 1 of 2 gave no completion: timed out",
    )
    assert serve(world, kept.seen(asking=9.0), default=completion).state == "busy"
    assert (
        serve(world, kept.seen(), default={**ANSWER, "replicas": [good, good]}).state == "answering"
    )


@pytest.mark.parametrize(
    ("agent", "said"), [(75.0, "has said nothing for 75 s"), (None, "says nothing")]
)
def test_a_keeper_that_has_died_leaves_a_server_unknown(
    world: World, agent: float | None, said: str
) -> None:
    """Whatever it wrote last; not whole."""
    server = serve(world, kept.seen(), agent=agent, default=LATE)

    assert (server.state, server.detail) == ("unknown", f"the head's agent {said}")
    assert not look(world).whole


def test_a_server_whose_node_was_not_asked_is_unknown(world: World) -> None:
    """Its keeper may hear it all the same."""
    jobs(world, kept.one(kept.wanted(node="gpu02"), kept.seen()))
    seen = look(world, "gpu02")

    assert [(each.state, each.detail) for each in seen.servers] == [
        ("unknown", "the node that has its API was not asked")
    ]


@pytest.mark.parametrize(
    ("ended", "said"), [("exited", "the head's container is exited: `vlaunch up` starts it")]
)
def test_without_the_head_s_container_nobody_knows(world: World, ended: str, said: str) -> None:
    """What is wanted still lies on its disk."""
    world.stop("gpu01")

    assert [(each.state, each.detail) for each in look(world).servers] == [("unknown", said)]


@pytest.mark.parametrize(
    ("known", "said", "detail"),
    [
        ("embedding", LATE, "no embedding: timed out"),
        ("", {**LATE, "task": "rerank"}, "no score: timed out"),
        ("embedding", {"status": 200, "error": "no answer of /v1/embeddings: []"}, "no embedding:"),
    ],
)
def test_what_does_not_come_is_called_by_its_name(
    world: World, known: str, said: dict[str, Any], detail: str
) -> None:
    """An embedding is no completion; an answer without one is none."""
    server = serve(world, kept.seen(task=known), default=said)

    assert server.state == "silent"
    assert server.detail.startswith(detail)
