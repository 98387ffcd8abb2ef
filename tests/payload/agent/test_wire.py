"""Connections between agents, whatever comes over them."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.payload.agent import wire

Pair = tuple[wire.Peer, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """One end as an agent has it, and the other one."""
    near, far = socket.socketpair()
    with near, far:
        yield wire.Peer(near), far


def test_messages_come_whole(pair: Pair) -> None:
    """However the network cuts them; what is half waits for its other half."""
    peer, far = pair
    far.sendall(b'{"a": 1}\n{"b": ')
    assert peer.read() == [{"a": 1}]
    far.sendall(b"2}\n\n"[:3])
    assert (peer.read(), peer.read()) == ([{"b": 2}], [])


def test_what_is_said_arrives(pair: Pair) -> None:
    """As a line of JSON."""
    peer, far = pair
    peer.say(orders={"x": 1}, node="ß")

    assert json.loads(far.recv(4096)) == {"orders": {"x": 1}, "node": "ß"}


@pytest.mark.parametrize("most", [4096, wire.LINE])
@pytest.mark.parametrize("begin", [b"", b'{"a": 1}\n'], ids=["half", "whole"])
def test_a_line_without_end_is_not_kept(pair: Pair, begin: bytes, most: int) -> None:
    """A stranger must not fill the memory: it may say even less until it is known."""
    peer, far = pair
    far.setblocking(False)
    assert peer.most == 4096
    peer.most, said = most, begin + b"x" * most + b"x"

    def pass_on(left: bytes) -> None:
        while left:
            left = left[far.send(left) :]
            peer.read()
        peer.read()

    with pytest.raises(wire.Lost, match="more than an agent would"):
        pass_on(said)


def test_an_end_is_told(pair: Pair) -> None:
    """It was closed, or broke."""
    peer, far = pair
    far.close()
    with pytest.raises(wire.Lost, match="was closed"):
        peer.read()
    with pytest.raises(wire.Lost, match="broke: Broken pipe"):
        peer.say(a=1)
    peer.close()
    with pytest.raises(wire.Lost, match="broke: Bad file descriptor"):
        peer.read()


def test_nobody_is_waited_for_who_does_not_read(pair: Pair) -> None:
    """A while, as an agent that is stopped may read on; not for ever, as all of it is kept."""
    peer, _ = pair
    for _ in range(3):
        peer.say(text="x" * 100_000)
    with pytest.raises(wire.Lost, match="does not read"):
        for _ in range(20):
            peer.say(text="x" * 100_000)


def test_what_waited_is_said_when_the_other_side_reads(pair: Pair) -> None:
    """Nothing of it is lost or doubled."""
    peer, far = pair
    far.setblocking(False)
    got, said = b"", 0
    while said < 200 or got.count(b"\n") < 201:
        if said < 200:
            said += 1
            peer.say(text="x" * 10_000, number=said)
        else:
            peer.say(number=0)
        while True:
            try:
                got += far.recv(1 << 16)
            except BlockingIOError:
                break
    numbers = [json.loads(line)["number"] for line in got.splitlines()]

    assert [each for each in numbers if each] == list(range(1, 201))


@pytest.mark.parametrize(
    "said",
    [
        '{"id": "\\ud800"}',
        '{"\\ud800": "x"}',
        "[]",
        '"x"',
        "1",
        "null",
        "",
        "{",
        '{"a": ' * 20_000,
        f'{{"a": {"9" * 5000}}}',
    ],
)
def test_what_is_no_message(said: str) -> None:
    """Is refused in one place, before anybody acts on it: also halves of letters, which can be
    neither hashed nor shown.
    """
    with pytest.raises(wire.Lost):
        wire._message(said.encode())


def test_what_is_one() -> None:
    """Also with letters of other languages, and with names that nobody knows yet."""
    for said in ({}, {"node": "Knoten-ß-節-🙂", "new": [1.5, None, {}]}):
        assert wire._message(json.dumps(said).encode()) == said
        assert wire._message(json.dumps(said, ensure_ascii=False).encode()) == said


def test_only_who_has_the_key_can_prove_it() -> None:
    """About these words and in this role; without a key nobody is believed, for whoever leads can
    start programs.
    """
    good = wire.proof("key", "member", "n1", "challenge")

    assert wire.proven(good, "key", "member", "n1", "challenge")
    for said, key, words in (
        (good, "other", ("member", "n1", "challenge")),
        (good, "key", ("lead", "n1", "challenge")),
        (good, "key", ("member", "n1", "other")),
        (None, "key", ("member",)),
        (7, "key", ("member",)),
        ("", "", ("member", "n1")),
        (wire.proof("", "x"), "", ("x",)),
        ("é", "key", ("x",)),
    ):
        assert not wire.proven(said, key, *words)


def test_the_secret_is_read_each_time(folders: Path) -> None:
    """It may be rotated; where there is none, it is empty."""
    assert wire.secret() == "ray-token"
    (folders / "secrets" / "RAY_AUTH_TOKEN").write_text("new\n")
    assert wire.secret() == "new"
    (folders / "secrets" / "RAY_AUTH_TOKEN").unlink()
    assert wire.secret() == ""


def test_listening_where_there_is_no_such_address() -> None:
    """Is an error at once: an address may come later than Docker, so it is tried again."""
    with pytest.raises(OSError, match=r"."):
        wire.listen("192.0.2.1", 0)
    with wire.listen("127.0.0.1", 0) as one, pytest.raises(OSError, match="in use"):
        wire.listen("127.0.0.1", one.getsockname()[1])


def test_words_that_an_output_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have set another encoding; nobody ends for a stranger's letters, or draws on the
    terminal.
    """
    to: Any = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(to, encoding="ascii"))
    wire.say("the agent of Knoten-ß\ud800\x1b[2J is here")

    assert to.getvalue() == b"vlaunch agent: the agent of Knoten-???[2J is here\n"
