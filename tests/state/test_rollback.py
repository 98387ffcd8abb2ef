"""Which server a rollback returns to, from what the head has written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError, UnreadableAnswer
from launcher.model import Answer, Inventory, Node
from launcher.site import Site
from launcher.state import rollback
from launcher.tools.host import HostFacts

INVENTORY = Inventory(
    path=Path("inventory.yaml"),
    cluster="c",
    image="base:1",
    nodes=(Node(name="n1", host="n1", ip="10.0.0.1", gpus=8, head=True),),
)


def kept(id: str, **changes: Any) -> dict[str, Any]:
    asked = {
        "model": f"org/{id}",
        "backend": "ray",
        "host": "0.0.0.0",
        "port": 8000,
        "tp": 8,
        "pp": 2,
        "dp": 1,
        "args": ["--x", "1"],
    }
    return {
        "at": 1.5,
        "desired": {"id": id, "image": "sha256:1", "asked_for": {**asked, **changes}},
    }


def answer(answered: Any, wanted: Any = None) -> Answer:
    texts = [
        each if isinstance(each, str) else json.dumps(each) if each is not None else ""
        for each in (answered, wanted)
    ]
    return Answer(
        node="n1", code=0, out="".join(f"{text}\n\x1e\n" for text in texts), err="", seconds=0.1
    )


def test_the_newest_other_one_is_chosen() -> None:
    """Not the one that is wanted now, whether it has answered or not."""
    found, wanted = rollback.read(answer([kept("a"), kept("b")], {"id": "a"}))

    assert wanted == "a"
    assert [each.id for each in found] == ["a", "b"]
    assert rollback.choose(found, wanted, "sha256:1").id == "b"
    assert rollback.choose(found, "never-answered", "sha256:1").id == "a"
    assert rollback.choose(found, "", "").what == "org/a (TP=8 PP=2, ray) --x 1"


def test_nothing_to_return_to_is_said() -> None:
    """With what is known."""
    with pytest.raises(RequestError, match="no other server has answered") as none:
        rollback.choose((), "a", "")
    with pytest.raises(RequestError) as one:
        rollback.choose(rollback.read(answer([kept("a")]))[0], "a", "")

    assert "none is written down" in none.value.evidence
    assert "org/a" in one.value.evidence


def test_another_image_is_refused() -> None:
    """The same words would start another server."""
    found, _ = rollback.read(answer([kept("b")]))

    with pytest.raises(RequestError, match="another image"):
        rollback.choose(found, "a", "sha256:2")


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
    assert rollback.read(answer(said)) == ((), "")


def test_a_head_that_does_not_say_is_not_one_that_has_nothing() -> None:
    """Its connection broke: nobody knows."""
    with pytest.raises(UnreadableAnswer, match="n1"):
        rollback.read(Answer(node="n1", code=255, err="the connection was lost"))


def test_the_head_is_asked_without_its_containers() -> None:
    """In the launcher's folder there."""
    command = rollback.ask(Site(INVENTORY), "chat")

    assert command.node == "n1"
    assert command.argv[4:] == ("/root/.vlaunch/c/server/chat", "history.json", "desired.json")


def test_places_are_kept() -> None:
    """A server is started again where it was; what an older vlaunch wrote down had no places."""
    (old,), _ = rollback.read(answer([kept("a")]))
    (new,), _ = rollback.read(answer([kept("a", nodes=["n1"], gpus=2)]))

    assert [(each.nodes, each.gpus) for each in (old, new)] == [((), None), (("n1",), 2)]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ((), "default"),
        (("chat/history",), "chat"),
        (("chat/history", "embed/history", "embed/desired"), "embed"),
        (("chat/history", "embed/history"), None),
        (("chat/desired", "embed/desired"), None),
    ],
)
def test_one_server_need_not_be_named(files: tuple[str, ...], name: str | None) -> None:
    """It is the one that is wanted, or else the one that has answered; several are listed."""
    paths = [*(f"server/{file}.json" for file in files), "network.json", "server/x/y/desired.json"]
    found = HostFacts(files=dict.fromkeys(paths, "0"))
    if name is not None:
        assert rollback.pick(Site(INVENTORY, {"n1": found}), None) == name
    else:
        with pytest.raises(RequestError, match="2 servers are known: `chat`, `embed`"):
            rollback.pick(Site(INVENTORY, {"n1": found}), None)
    assert rollback.pick(Site(INVENTORY, {"n1": found}), "other") == "other"
