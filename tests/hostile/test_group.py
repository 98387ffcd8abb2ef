"""Whatever comes over a group's connections, to rank 0 or from it: it ends the connection at most, and never a member."""

from __future__ import annotations

import io
import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from tests.hostile import mutate

FOLDER = Path(__file__).parents[2] / "launcher" / "payload"
HELLO = {
    "id": "abcd1234", "rank": 1, "node": "n1", "nonce": "n", "proof": "", "state": "idle", "last": 0, "ended": "was killed",
    "evidence": "a line\nanother",
}  # fmt: skip
REPORT = {"state": "running", "last": 1, "ended": "ended with exit code 1", "evidence": "ValueError: no"}
CHALLENGE, WISH, REFUSAL = {"challenge": "c"}, {"proof": "", "run": 1, "gave_up": "the last fault: x"}, {"refused": "no"}


class Engine:
    """Starts nothing."""

    state, last, ended, evidence, grace = "idle", 0, "", "", 5.0

    def start(self, generation: int) -> None:
        """Say that it runs."""
        self.state, self.last = "running", generation

    def stop(self) -> None:
        """Say that it does not."""
        self.state = "idle"


@pytest.fixture(scope="module")
def programs() -> Iterator[SimpleNamespace]:
    """The group's modules, as its siblings find them; nothing is written, and nobody is asked for completions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import group  # type: ignore[import-not-found]
        import group_lead  # type: ignore[import-not-found]
        import group_wire  # type: ignore[import-not-found]

        patch.setattr(group_lead.record, "write", lambda *_, **__: None)
        patch.setattr(group_lead.record, "read", lambda *_: None)
        canary = SimpleNamespace(start=int, stop=int, good=None, note="", dead="", in_flight=None)
        patch.setattr(group_lead, "Watch", lambda *_: canary)
        yield SimpleNamespace(group=group, lead=group_lead, wire=group_wire)


def parsed(programs: SimpleNamespace, rank: int) -> Any:
    return programs.group.parse(
        ["--rank", str(rank), "--of", "2", "--head", "x", "--port", "1", "--id", "abcd1234", "--node", f"n{rank}", "--", "true"]
    )


def hear(member: Any, far: socket.socket, lines: list[str]) -> None:
    """Let a member hear lines, and look at everything after each."""
    for line in lines:
        try:
            far.sendall(line.replace("\n", " ").encode("utf-8", "surrogatepass") + b"\n")
        except OSError:  # it has hung up
            return
        for each, _ in member.selector.select(0):
            each.data()
        member.turn()


@mutate.examples(20)
@given(chance=mutate.chances)
def test_whatever_is_said_to_rank_0(programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, chance: Any) -> None:
    """By strangers, and by members who know the secret or need none."""
    key = chance.choice(["", "a secret"])
    monkeypatch.setattr(programs.lead, "secret", lambda: key)
    lead = programs.lead.Lead(parsed(programs, 0), Engine(), selectors.DefaultSelector())
    lead.server, lead.args.settle = object(), 0  # nobody else comes, and an engine that is dead is so at once
    far, near = socket.socketpair()
    far.settimeout(0)
    with far, near:
        peer = programs.wire.Peer(near)
        stranger = programs.lead.Stranger(peer, "c", time.monotonic())
        lead.strangers.append(stranger)
        lead.selector.register(peer, selectors.EVENT_READ, lambda: lead._hear_stranger(stranger))
        proof = programs.wire.proof(key, "member", "abcd1234", 1, "n1", "c", "n")
        first = json.dumps({**HELLO, "proof": proof}) if chance.random() < 0.5 else mutate.text(HELLO, chance)
        hear(lead, far, [first, json.dumps(REPORT), mutate.text(REPORT, chance), mutate.text(REPORT, chance)])
        for at, member in lead.members.items():
            assert (type(at), type(member.node), type(member.last)) == (int, str, int)
            json.dumps([member.node, member.said], ensure_ascii=False).encode()
    lead.selector.close()


@mutate.examples(20)
@given(chance=mutate.chances)
def test_whatever_rank_0_says(programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, chance: Any) -> None:
    """Somebody else may have its port."""
    monkeypatch.setattr(programs.group, "secret", lambda: "")
    follower = programs.group.Follower(parsed(programs, 1), Engine(), selectors.DefaultSelector())
    far, near = socket.socketpair()
    far.settimeout(0)
    with far, near:
        peer = follower.peer = programs.wire.Peer(near)
        follower.again = float("inf")
        follower.selector.register(peer, selectors.EVENT_READ, follower._hear)
        hear(follower, far, [_spoiled(each, chance) for each in (CHALLENGE, WISH, WISH, REFUSAL)])
        assert 0 <= follower.run < 1 << 31
        follower.gave_up.encode()
    follower.selector.close()


def _spoiled(good: Any, chance: random.Random) -> str:
    return mutate.text(good, chance) if chance.random() < 0.5 else json.dumps(good)


@pytest.mark.parametrize(
    "said",
    ['{"id": "\\ud800"}', '{"\\ud800": "x"}', '{"rank": true}', '{"rank": 1.0}', '{"run": NaN}', '{"run": 1e999}',
     f'{{"last": {10**12}}}', '{"last": -Infinity}', '{"node": ["n1"]}', '{"node": null}', '{"state": 1}', '{"proof": {}}',
     "[]", '"x"', "1", "", "{", '{"a": ' * 20_000],
)  # fmt: skip
def test_what_is_no_message(programs: SimpleNamespace, said: str) -> None:
    """Is refused in one place, before anybody acts on it."""
    with pytest.raises(programs.wire.Lost):
        programs.wire._message(said.encode())


def test_what_is_one(programs: SimpleNamespace) -> None:
    """Also with letters of other languages, and with names that nobody knows yet."""
    for said in (HELLO, REPORT, CHALLENGE, WISH, REFUSAL, {"node": "Knoten-ß-節-🙂", "new": "x"}):
        assert programs.wire._message(json.dumps(said).encode()) == said
        assert programs.wire._message(json.dumps(said, ensure_ascii=False).encode()) == said


def test_words_that_an_output_cannot_show(programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have set another encoding; nobody ends for a stranger's letters."""
    to = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(to, encoding="ascii"))
    programs.wire.say("rank 1 on Knoten-ß\ud800\x1b is here")

    assert to.getvalue() == b"vlaunch supervisor: rank 1 on Knoten-??? is here\n"
