"""Histories of servers on the head."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from launcher.tools.host import HostFacts
from launcher.tools.site import Site, history
from tests.tools.answered import INVENTORY, answer, history_entry


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "{}",
        "[1, null, {}]",
        [history_entry("a", tp="x")],
        [history_entry("a", backend="other")],
        [history_entry("a", args="--x")],
        [{"at": 1, "desired": {"id": "a"}}],
        [{**history_entry("a"), "at": "x"}],
        [history_entry("a", nodes="n1")],
        [history_entry("a", gpus="x")],
        [history_entry("a", port=1e400)],
        *([{**history_entry("a"), "at": at}] for at in ("nan", 1e300, -1e300)),
    ],
)
def test_unreadable_revisions_are_skipped(content: Any) -> None:
    """Nodes are not trusted."""
    assert history.parse_history(answer(content)) == ((), "")


def test_a_failed_query_is_not_an_empty_history() -> None:
    """The connection may have broken."""
    with pytest.raises(UnreadableAnswer, match="n1"):
        history.parse_history(Answer(node="n1", code=255, err="the connection was lost"))


def test_the_query_needs_no_container() -> None:
    """It reads the launcher's folder."""
    command = history.query_history(Site(INVENTORY), "chat")

    assert command.node == "n1"
    folder = "/root/.vlaunch/c/server/chat"
    assert command.argv[4:] == (f"{folder}/history.json", f"{folder}/desired.json")


def test_placements_are_preserved() -> None:
    """A server restarts on its nodes; older versions of vlaunch stored no placement."""
    (old,), _ = history.parse_history(answer([history_entry("a")]))
    (new,), _ = history.parse_history(answer([history_entry("a", nodes=["n1"], gpus=2)]))

    assert [(revision.nodes, revision.gpus) for revision in (old, new)] == [
        ((), None),
        (("n1",), 2),
    ]


def test_all_histories_are_queried_at_once() -> None:
    """Newest first, for all names; a head without histories is not queried."""
    files = dict.fromkeys(("server/chat/history.json", "server/embed/history.json"), "0")
    command = history.query_all_histories(Site(INVENTORY, {"n1": HostFacts(files=files)}))
    reply = answer(
        [history_entry("a")],
        [{**history_entry("b"), "at": 2.5, "held": {"kv_cache_size_tokens": "7"}}],
    )

    assert command is not None
    assert command.argv[4:] == tuple(f"/root/.vlaunch/c/{file}" for file in files)
    assert history.query_all_histories(Site(INVENTORY, {"n1": HostFacts()})) is None
    revisions = history.parse_all_histories(reply)
    assert [(revision.id, dict(revision.held)) for revision in revisions] == [
        ("b", {"kv_cache_size_tokens": "7"}),
        ("a", {}),
    ]


@pytest.mark.parametrize("labels", ["x", [1], {"a": 1}, {"a": {}}])
def test_an_invalid_cache_is_no_server(labels: Any) -> None:
    """Nodes are not trusted."""
    assert history.parse_all_histories(answer([{**history_entry("a"), "held": labels}])) == ()


def test_variables_of_a_revision() -> None:
    """Those of older versions have none."""
    (old, new), _ = history.parse_history(
        answer([history_entry("a"), history_entry("b", env={"A": "1"})])
    )

    assert (old.env, new.env) == ({}, {"A": "1"})
