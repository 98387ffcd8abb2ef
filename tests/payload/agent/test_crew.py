"""The agents of a cluster over their connections, whatever comes over them: it ends the connection
at most, never an agent.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given

from launcher.payload.agent import crew, wire
from launcher.payload.agent.crew import Follower, Lead
from launcher.payload.agent.node import RUN, Order
from tests.hostile import mutate
from tests.payload.agent.stage import Clock

KEY = "a secret"
REPORT = {
    "servers": {
        "chat": {
            "state": "running",
            "last": 1,
            "prepared": 1,
            "lines": {"": 3},
            "probe": {"answers": {}},
        }
    }
}
ORDER = Order(generation=1, phase=RUN, argv=("true",))
CHALLENGE, PROOF = {"challenge": "c"}, {"proof": ""}
ORDERS = {"orders": {"chat": ORDER.as_json()}}


class Node:
    """Starts nothing."""

    def __init__(self) -> None:
        self.orders: Any = {}
        self.said: dict[str, Any] = {"chat": {"state": "idle", "last": 0, "prepared": 1}}

    def turn(self) -> None:
        """Do nothing."""

    def report(self) -> dict[str, Any]:
        """Say what a test says."""
        return self.said


class Far:
    """The other end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.half, self.over = sock, b"", False
        sock.setblocking(False)

    def say(self, *messages: object) -> None:
        """Say something, if anybody still listens; texts go as they are."""
        for each in messages:
            text = each if isinstance(each, str) else json.dumps(each)
            try:
                self.sock.sendall(text.replace("\n", " ").encode("utf-8", "surrogatepass") + b"\n")
            except OSError:
                self.over = True

    def heard(self) -> list[dict[str, Any]]:
        """Return what came."""
        try:
            while data := self.sock.recv(1 << 16):
                self.half += data
            self.over = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.over = True
        *lines, self.half = self.half.split(b"\n")
        return [json.loads(line) for line in lines]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for all that the agents do; everybody knows the secret."""
    made = Clock()
    monkeypatch.setattr(crew, "time", made)
    monkeypatch.setattr(wire, "time", made)
    monkeypatch.setattr(crew, "secret", lambda: KEY)
    return made


class Head:
    """The head's agent, with connections that need no network."""

    def __init__(self) -> None:
        self.lead = Lead("gpu1", "127.0.0.1", 0, Node(), selectors.DefaultSelector())  # type: ignore[arg-type]
        self.near, self.far = socket.socketpair()
        self.lead._server = FakeServer(self.near)  # type: ignore[assignment]
        self.sockets = [self.near, self.far]

    def pending_peer(self) -> Far:
        """Let somebody come in; what it is asked is in `challenge`."""
        near, far = socket.socketpair()
        self.sockets += [near, far]
        self.lead._server.let = near  # type: ignore[union-attr]
        self.lead._accept()
        found = Far(far)
        (found.challenge,) = [each["challenge"] for each in found.heard()]  # type: ignore[attr-defined]
        return found

    def member(self, name: str, key: str = KEY, boot: str = "b1") -> Far:
        """Let an agent come in, which knows the key."""
        found = self.pending_peer()
        proof = wire.proof(key, "member", name, boot, found.challenge, "n")  # type: ignore[attr-defined]
        found.say({"node": name, "boot": boot, "nonce": "n", "proof": proof})
        self.turn()
        return found

    def turn(self) -> None:
        """Hear everybody, and look at everything."""
        for each, _ in self.lead.selector.select(0):
            each.data()
        self.lead.turn()

    def close(self) -> None:
        """End."""
        self.lead.selector.close()
        for each in self.sockets:
            each.close()


class FakeServer:
    """What listens."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.let = sock, sock

    def accept(self) -> tuple[socket.socket, str]:
        """Let the next one in."""
        return self.let, ""


@pytest.fixture
def head(clock: Clock) -> Iterator[Head]:
    """The head's agent."""
    made = Head()
    yield made
    made.close()


# ---- the head's side -----------------------------------------------------------------------------


def test_an_agent_comes_in_and_is_ordered(head: Head, clock: Clock) -> None:
    """Both prove that they know the secret; orders come at once when they change, and every
    second.
    """
    member = head.member("gpu2")
    proof, orders = member.heard()
    assert wire.proven(proof["proof"], KEY, "lead", "gpu2", "b1", member.challenge, "n")  # type: ignore[attr-defined]
    assert (orders["orders"], head.lead.here("gpu2"), head.lead.boot_of("gpu2")) == ({}, True, "b1")

    head.lead.orders, head.lead.ray = {"gpu2": {"chat": ORDER}}, "b1.1"
    head.turn()
    (told,) = member.heard()
    assert (told["orders"], told["ray"]) == (
        json.loads(json.dumps({"chat": ORDER.as_json()})),
        "b1.1",
    )
    head.turn()
    assert member.heard() == []
    # what it reports may be of before it was told
    for done in (told["number"] - 1, told["number"]):
        member.say({**REPORT, "done": done})
        head.turn()
        assert head.lead.settled("gpu2") is (done == told["number"])
    clock.now += 1.0
    head.turn()
    assert len(member.heard()) == 1


def test_what_agents_report_is_known(head: Head) -> None:
    """The last word counts; of what it has nothing it says nothing; who is not here cannot be
    asked.
    """
    member = head.member("gpu2")
    assert head.lead.report("gpu2", "chat") == {}
    member.say({"servers": {"chat": {"state": "idle"}}}, REPORT)
    head.turn()

    assert head.lead.report("gpu2", "chat") == REPORT["servers"]["chat"]
    assert head.lead.report("gpu2", "other") == {}
    assert head.lead.report("gpu3", "chat") is None
    assert head.lead.report("gpu1", "chat") == {"state": "idle", "last": 0, "prepared": 1}


def test_an_agent_that_is_cut_off_has_time_to_come_back(head: Head, clock: Clock) -> None:
    """It is not here at once, and gone only after a while; one that is back is here, with the boot
    that it had.
    """
    member = head.member("gpu2")
    member.heard()
    member.sock.close()
    head.turn()
    assert (head.lead.here("gpu2"), head.lead.gone("gpu2"), head.lead.report("gpu2", "chat")) == (
        False,
        "",
        None,
    )
    clock.now += 10.0
    assert head.lead.gone("gpu2") == "its connection was closed"

    head.member("gpu2")
    assert (head.lead.here("gpu2"), head.lead.gone("gpu2"), head.lead.boot_of("gpu2")) == (
        True,
        "",
        "b1",
    )


def test_an_agent_that_is_silent_is_gone_after_a_minute(head: Head, clock: Clock) -> None:
    """Its connection stands, as behind a network that swallows everything; long before, its word is
    not fresh any more.
    """
    head.member("gpu2")
    clock.now += 30.0
    head.turn()
    assert (head.lead.here("gpu2"), head.lead.fresh("gpu2"), head.lead.heard()) == (
        True,
        False,
        {"gpu1": 0.0, "gpu2": 30.0},
    )
    clock.now += 31.0
    head.turn()

    assert (head.lead.here("gpu2"), head.lead.gone("gpu2")) == (
        False,
        "it has been silent for 60 s",
    )


def test_an_agent_that_comes_anew_takes_the_place_of_itself(head: Head) -> None:
    """Its container has started again before anybody noticed that the old one had gone."""
    old = head.member("gpu2")
    head.member("gpu2", boot="b2")
    old.say(REPORT)
    head.turn()

    assert (head.lead.boot_of("gpu2"), head.lead.report("gpu2", "chat")) == ("b2", {})
    old.heard()
    assert old.over


@pytest.mark.parametrize("name", ["gpu1", "gpu2"])
def test_who_does_not_know_the_secret_is_refused(head: Head, name: str) -> None:
    """With words that say what to do; and nobody is this node itself."""
    stranger = head.member(name, KEY if name == "gpu1" else "another")
    (said,) = stranger.heard()

    assert said["refused"] == (
        "gpu1 is this node itself" if name == "gpu1" else "the secrets differ: run `vlaunch up`"
    )
    assert (stranger.over, head.lead.members) == (True, {})


def test_without_a_secret_nobody_comes_in(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leads can start programs."""
    monkeypatch.setattr(crew, "secret", lambda: "")
    head.member("gpu2", "")

    assert head.lead.members == {}


def test_a_stranger_who_says_nothing_is_not_waited_for(head: Head, clock: Clock) -> None:
    """It may prove who it is, but must do so at once."""
    stranger = head.pending_peer()
    clock.now += 9.0
    head.turn()
    stranger.heard()
    assert not stranger.over
    clock.now += 2.0
    head.turn()
    stranger.heard()

    assert stranger.over


def test_strangers_who_say_nothing_keep_nobody_out(head: Head) -> None:
    """However many: those who came first go first."""
    silent = [head.pending_peer() for _ in range(100)]
    head.member("gpu2")
    for each in silent:
        each.heard()

    assert head.lead.here("gpu2")
    assert [each.over for each in silent] == [True] * 37 + [False] * 63


@pytest.mark.parametrize("said", [["x" * 5000], [{}, {}]], ids=["much", "often"])
def test_a_stranger_may_say_one_short_message(head: Head, said: list[object]) -> None:
    """More is not even read; a member may say as much as its reports need."""
    stranger, member = head.pending_peer(), head.member("gpu2")
    stranger.say(*said)
    member.say({**REPORT, "more": "x" * 100_000})
    for _ in range(3):
        head.turn()
        stranger.heard()

    assert stranger.over
    assert head.lead.report("gpu2", "chat") == REPORT["servers"]["chat"]


@mutate.examples(60)
@given(chance=mutate.chances)
def test_whatever_is_said_to_the_head(clock: Clock, chance: mutate.Chance) -> None:
    """By strangers, and by members who know the secret; somebody else is heard all the same."""
    head = Head()
    other = head.member("gpu3")
    far = head.pending_peer()
    good = {
        "node": "gpu2",
        "boot": "b",
        "nonce": "n",
        "proof": wire.proof(KEY, "member", "gpu2", "b", far.challenge, "n"),
    }  # type: ignore[attr-defined]
    for said in (
        good if chance.random() < 0.6 else mutate.text(good, chance),
        REPORT,
        *(mutate.text(REPORT, chance) for _ in range(3)),
    ):
        far.say(said)
        head.turn()
        assert isinstance(head.lead.report("gpu2", "chat"), (dict, type(None)))
        json.dumps(head.lead.heard(), ensure_ascii=False).encode()
    other.say(REPORT)
    head.turn()
    assert head.lead.report("gpu3", "chat") == REPORT["servers"]["chat"]
    head.close()


# ---- the others' side ----------------------------------------------------------------------------


class Other:
    """An agent that is not the head's, connected to whoever a test is."""

    def __init__(self) -> None:
        self.node = Node()
        self.follower = Follower("gpu2", "127.0.0.1", 1, self.node, selectors.DefaultSelector())  # type: ignore[arg-type]
        self.sockets: list[socket.socket] = []

    def connect(self) -> Far:
        """Connect it."""
        near, far = socket.socketpair()
        self.sockets += [near, far]
        self.follower._peer, self.follower._words, self.follower._known = wire.Peer(near), (), False
        self.follower.selector.register(
            self.follower._peer, selectors.EVENT_READ, self.follower._hear
        )
        self.follower._again = float("inf")
        return Far(far)

    def welcome(self) -> Far:
        """Connect it to a head that knows the secret."""
        far = self.connect()
        far.say(CHALLENGE)
        self.turn()
        (hello,) = far.heard()
        assert wire.proven(
            hello["proof"], KEY, "member", hello["node"], hello["boot"], "c", hello["nonce"]
        )
        far.say(
            {"proof": wire.proof(KEY, "lead", hello["node"], hello["boot"], "c", hello["nonce"])}
        )
        self.turn()
        return far

    def turn(self) -> None:
        """Hear the head, and look at everything."""
        for each, _ in self.follower.selector.select(0):
            each.data()
        self.follower._again = float("inf")
        self.follower.turn()

    def close(self) -> None:
        """End."""
        self.follower.selector.close()
        for each in self.sockets:
            each.close()


@pytest.fixture
def other(clock: Clock) -> Iterator[Other]:
    """An agent that is not the head's."""
    made = Other()
    yield made
    made.close()


def test_it_does_what_the_head_says_and_reports(other: Other, clock: Clock) -> None:
    """At once when a state changes, else every second: lines and counters change all the time."""
    far = other.welcome()
    assert far.heard() == [{"servers": other.node.said, "done": 0}]
    far.say({**ORDERS, "ray": "b1.1", "number": 7})
    other.turn()
    assert (other.node.orders, other.follower.ray) == ({"chat": ORDER}, "b1.1")

    other.node.said = {"chat": {**other.node.said["chat"], "lines": {"": 9}}}
    other.turn()
    assert [each["done"] for each in far.heard()] == [7]  # it was told something: that is a change
    other.node.said = {"chat": {**other.node.said["chat"], "lines": {"": 10}}}
    other.turn()
    assert far.heard() == []
    other.node.said = {"chat": {**other.node.said["chat"], "state": "running"}}
    other.turn()
    assert far.heard() == [{"servers": other.node.said, "done": 7}]
    clock.now += 1.0
    other.turn()
    assert len(far.heard()) == 1


def test_what_runs_goes_on_without_the_head(
    other: Other, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A connection that breaks, or over which nothing comes, ends nothing: the last orders hold."""
    far = other.welcome()
    far.say(ORDERS)
    other.turn()
    clock.now += 61.0
    other.turn()
    far.heard()

    assert far.over
    assert other.node.orders == {"chat": ORDER}
    assert "it has been silent for 60 s; what runs here goes on" in capsys.readouterr().out


def test_a_head_that_does_not_know_the_secret_is_not_obeyed(other: Other) -> None:
    """Whoever takes its port could make the nodes run things; the secret itself is never said."""
    far = other.connect()
    far.say(CHALLENGE)
    other.turn()
    (hello,) = far.heard()
    far.say(PROOF, ORDERS)
    other.turn()
    far.heard()

    assert (far.over, other.node.orders) == (True, {})
    assert KEY not in json.dumps(hello)


def test_why_it_was_refused_is_said_once(other: Other, capsys: pytest.CaptureFixture[str]) -> None:
    """And draws nothing on a terminal."""
    for _ in range(3):
        far = other.connect()
        far.say({"refused": "\x1b[2J the secrets differ"})
        other.turn()
    said = capsys.readouterr().out

    assert said.count("it refuses this agent: ?[2J the secrets differ") == 1


@mutate.examples(60)
@given(chance=mutate.chances)
def test_whatever_the_head_says(clock: Clock, chance: mutate.Chance) -> None:
    """Somebody else may have its port; and one that knows the secret may be of another version."""
    other = Other()
    if chance.random() < 0.5:
        far, said = other.connect(), [CHALLENGE, PROOF, ORDERS, {"refused": "no"}]
    else:
        far, said = other.welcome(), [ORDERS, ORDERS, {}, {"orders": {}}]
    for each in said:
        far.say(mutate.text(each, chance) if chance.random() < 0.6 else each)
        other.turn()
        assert all(isinstance(order, Order) for order in other.node.orders.values())
    other.close()


def test_the_head_listens_when_its_address_comes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a reboot it may come later than Docker; it is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lead = Lead("gpu1", "127.0.0.1", port, Node(), selectors.DefaultSelector())  # type: ignore[arg-type]
        lead.turn()
        lead.turn()
    assert capsys.readouterr().out.count("cannot listen on 127.0.0.1") == 1
    clock.now += 1.0
    lead.turn()
    with socket.create_connection(("127.0.0.1", port), 5) as sock, sock.makefile("rb") as lines:
        lead._accept()
        assert b"challenge" in lines.readline()
    lead._turn_away(lead._pending[0])
    assert lead._server is not None
    lead._server.close()
    lead.selector.close()
