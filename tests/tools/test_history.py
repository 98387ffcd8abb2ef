"""Which servers have answered, from what the head has written down."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.tools import history
from launcher.tools.host import HostFacts
from launcher.tools.site import Site
from tests.tools.answered import INVENTORY, answer, kept


@pytest.mark.parametrize(
    "said",
    [
        "",
        "nonsense",
        "{}",
        "[1, null, {}]",
        [kept("a", tp="x")],
        [kept("a", backend="other")],
        [kept("a", args="--x")],
        [{"at": 1, "desired": {"id": "a"}}],
        [{**kept("a"), "at": "x"}],
        [kept("a", nodes="n1")],
        [kept("a", gpus="x")],
        [kept("a", port=1e400)],
        *([{**kept("a"), "at": at}] for at in ("nan", 1e300, -1e300)),
    ],
)
def test_what_cannot_be_read_did_not_answer(said: Any) -> None:
    """A node may say anything."""
    assert history.parse_history(answer(said)) == ((), "")


def test_a_head_that_does_not_say_is_not_one_that_has_nothing() -> None:
    """Its connection broke: nobody knows."""
    with pytest.raises(UnreadableAnswer, match="n1"):
        history.parse_history(Answer(node="n1", code=255, err="the connection was lost"))


def test_the_head_is_asked_without_its_containers() -> None:
    """In the launcher's folder there."""
    command = history.query_history(Site(INVENTORY), "chat")

    assert command.node == "n1"
    folder = "/root/.vlaunch/c/server/chat"
    assert command.argv[4:] == (f"{folder}/history.json", f"{folder}/desired.json")


def test_places_are_kept() -> None:
    """A server is started again where it was; what an older vlaunch wrote down had no places."""
    (old,), _ = history.parse_history(answer([kept("a")]))
    (new,), _ = history.parse_history(answer([kept("a", nodes=["n1"], gpus=2)]))

    assert [(each.nodes, each.gpus) for each in (old, new)] == [((), None), (("n1",), 2)]


def test_all_names_are_asked_at_once() -> None:
    """The newest first, whatever its name; a head where nothing is written down is not asked."""
    files = dict.fromkeys(("server/chat/history.json", "server/embed/history.json"), "0")
    asked = history.query_all_histories(Site(INVENTORY, {"n1": HostFacts(files=files)}))
    said = answer([kept("a")], [{**kept("b"), "at": 2.5, "held": {"kv_cache_size_tokens": "7"}}])

    assert asked is not None
    assert asked.argv[4:] == tuple(f"/root/.vlaunch/c/{file}" for file in files)
    assert history.query_all_histories(Site(INVENTORY, {"n1": HostFacts()})) is None
    found = history.parse_all_histories(said)
    assert [(each.id, dict(each.held)) for each in found] == [
        ("b", {"kv_cache_size_tokens": "7"}),
        ("a", {}),
    ]


@pytest.mark.parametrize("held", ["x", [1], {"a": 1}, {"a": {}}])
def test_nonsense_of_a_cache_is_no_server(held: Any) -> None:
    """A node may say anything."""
    assert history.parse_all_histories(answer([{**kept("a"), "held": held}])) == ()


def test_variables_are_those_of_then() -> None:
    """Servers that were written down before there were any have none."""
    (old, new), _ = history.parse_history(answer([kept("a"), kept("b", env={"A": "1"})]))

    assert (old.env, new.env) == ({}, {"A": "1"})
