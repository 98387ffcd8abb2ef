"""Rank 0's part in a group: it lets all members start together, and ends all of them when one is dead.

Standard library only. What it wants, it tells every member every second, so that a message that is lost is only late; what a
member is, the member tells. An engine starts only when every member is there and idle, each time as a new *generation*.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import head
import record
from group_canary import Watch
from group_engine import Engine
from group_wire import Lost, Peer, listen, proof, proven, say, secret

GAVE_UP = "gave-up.json"  # there while a group has given up: the launcher sees its name without asking anybody
_STRANGERS = 16  # connections that have not proven yet who they are


@dataclass
class Stranger:
    """Somebody who has not proven yet to be a member."""

    peer: Peer
    challenge: str
    since: float


@dataclass
class Member:
    """A member that is connected, and what it said of itself last. `missed` is the generation that ran when it came."""

    peer: Peer
    node: str
    missed: int
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The generation that it started last."""
        last = self.said.get("last")
        return last if isinstance(last, int) and 0 <= last < 1 << 31 else 0

    def text(self, name: str, limit: int = 2000) -> str:
        """Return something that it said, as text."""
        return str(self.said.get(name) or "")[:limit]


@dataclass
class Trouble:
    """Why the engine is dead; `weight` is how near this is to the cause: what one death brings about comes a moment later."""

    weight: int
    what: str
    rank: str = ""
    node: str = ""
    evidence: str = ""


class Lead:
    """The group, seen from rank 0. `turn` is called again and again; it never blocks."""

    def __init__(self, args: argparse.Namespace, engine: Engine, selector: selectors.BaseSelector) -> None:
        self.args, self.engine, self.selector = args, engine, selector
        self.server: socket.socket | None = None
        self.strangers: list[Stranger] = []
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}  # why a member that was there is not there
        self.nodes = {0: args.node}
        self.generation, self.began = 0, 0.0  # 0: nothing is to run
        self.canary: Watch | None = None
        self.good: tuple[float, float] | None = None  # the last completion that was written down
        self.suspected: float | None = None
        self.told = 0.0
        self.listened = 0.0
        self.wanted = wanted(args)
        # Not on the command line, by which a later run recognises the same server.
        vars(args).update(self.wanted["policy"])
        engine.grace = args.grace
        self._open()

    def _open(self) -> None:
        """Go on where this program was when it ended: its container, or the whole host, may have been restarted."""
        before = record.read(record.SERVER) or {}
        same = before.get("id") == self.wanted["id"]
        gave_up = record.read(GAVE_UP) or {}
        self.record = record.Record(self.wanted)
        self.gave_up = str(gave_up.get("why") or "") if gave_up.get("id") == self.wanted["id"] else ""
        self.ever = bool(same and before.get("ready_at"))  # it has answered once, so that what ends it now is a fault
        if self.ever:
            self.record.set("starting", ready_at=before["ready_at"])
        if self.gave_up:
            self.record.set("gave-up", self.gave_up)
            say(f"has given up earlier: {self.gave_up}. `vlaunch serve` starts it anew")
            return
        record.remove(GAVE_UP)
        state = before.get("state") if same else ""
        if state in ("ready", "recovering") or (state == "starting" and self.ever):
            if state == "ready":
                what = "rank 0 ended without a word: its container or its host was restarted"
                self.record.fault(what, node=self.args.node, rank="0")
            self._again(what="rank 0 was restarted")

    # --- the members

    def accept(self) -> None:
        """Let a stranger in, who must prove at once who it is."""
        assert self.server is not None  # noqa: S101 - it is what became readable
        with contextlib.suppress(OSError):
            sock, _ = self.server.accept()
            stranger = Stranger(Peer(sock), secrets.token_hex(16), time.monotonic())
            self.selector.register(stranger.peer, selectors.EVENT_READ, lambda: self._hear_stranger(stranger))
            self.strangers.append(stranger)
            try:
                stranger.peer.say(challenge=stranger.challenge)
            except Lost:
                self._turn_away(stranger)
            if len(self.strangers) > _STRANGERS:
                self._turn_away(self.strangers[0])

    def _turn_away(self, stranger: Stranger, why: str = "") -> None:
        self.strangers.remove(stranger)
        self.selector.unregister(stranger.peer)
        if why:
            with contextlib.suppress(Lost):
                stranger.peer.say(refused=why)
        stranger.peer.close()

    def _hear_stranger(self, stranger: Stranger) -> None:
        try:
            for said in stranger.peer.read():
                if stranger in self.strangers:
                    self._judge(stranger, said)
        except Lost:
            if stranger in self.strangers:
                self._turn_away(stranger)

    def _judge(self, stranger: Stranger, said: Mapping[str, Any]) -> None:
        rank, nonce, key = said.get("rank"), said.get("nonce"), secret()
        words = (said.get("id"), rank, said.get("node"), stranger.challenge, nonce)
        if not proven(said.get("proof"), key, "member", *words):
            return self._turn_away(stranger, "the secrets differ: run `vlaunch up`, then `vlaunch serve`")
        if said.get("id") != self.args.id:
            return self._turn_away(stranger, "another server is served here")
        if not isinstance(rank, int) or not 0 < rank < self.args.of:
            return self._turn_away(stranger, f"there is no rank {str(rank)[:20]}")
        if rank in self.members:
            self._lose(rank, "it has connected anew")
        node = str(said.get("node") or "")[:200]
        member = Member(stranger.peer, node, self.generation, said)
        self.strangers.remove(stranger)
        self.selector.modify(stranger.peer, selectors.EVENT_READ, lambda: self._hear(rank, member))
        self.members[rank], self.nodes[rank] = member, node
        say(f"rank {rank} on {node} is here ({len(self.members) + 1} of {self.args.of})")
        try:
            member.peer.say(proof=proof(key, "lead", *words), **self._wish(member))
        except Lost as why:
            self._lose(rank, str(why))
        return None

    def _hear(self, rank: int, member: Member) -> None:
        if self.members.get(rank) is not member:
            return
        try:
            for said in member.peer.read():
                member.said = said
        except Lost as why:
            self._lose(rank, str(why))

    def _lose(self, rank: int, why: str) -> None:
        member = self.members.pop(rank)
        self.lost[rank] = why
        self.selector.unregister(member.peer)
        member.peer.close()
        say(f"rank {rank} on {member.node} is gone: {why}")

    def _wish(self, member: Member) -> dict[str, object]:
        """What a member is to do; one that was started anew must not join an engine that has lost it."""
        return {"run": 0 if member.missed == self.generation else self.generation, "gave_up": self.gave_up}

    def tell(self, *, now: bool = False) -> None:
        """Tell everybody what is wanted, and part with those who have gone silent."""
        if not now and time.monotonic() - self.told < self.args.every:
            return
        self.told = time.monotonic()
        for rank, member in list(self.members.items()):
            try:
                member.peer.say(**self._wish(member))
                if time.monotonic() - member.peer.heard > self.args.silence:
                    raise Lost(f"it has been silent for {self.args.silence:g} s")
            except Lost as why:
                self._lose(rank, str(why))
        for stranger in [each for each in self.strangers if self.told - each.since > self.args.silence / 2]:
            self._turn_away(stranger)

    # --- the engine

    def turn(self) -> None:
        """Look at everything once, and do what follows."""
        if self.server is None and self.args.of > 1 and time.monotonic() >= self.listened:
            self._listen()
        self.tell()
        if self.generation:
            self._watch()
        elif not self.gave_up:
            self._gather()

    def _listen(self) -> None:
        try:
            self.server = listen(self.args.head, self.args.port)
        except OSError as error:  # After a reboot the address may come later than Docker.
            self.listened = time.monotonic() + self.args.every
            self._doing(f"cannot listen on {self.args.head} port {self.args.port}: {error.strerror}")
            return
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)

    def _gather(self) -> None:
        """Start when every member is there and idle."""
        if self.server is None and self.args.of > 1:
            return
        missing = [rank for rank in range(1, self.args.of) if rank not in self.members]
        busy = [rank for rank, member in self.members.items() if member.said.get("state") != "idle"]
        busy += [0] if self.engine.state != "idle" else []
        if self.ever and not busy:
            self.record.reached("stopped")
        if missing or busy:
            named = ", ".join(self._named(rank) for rank in missing or sorted(busy))
            self._doing(f"waiting for {named} to come back" if missing else f"stopping the engine of {named}")
            return
        self.generation = 1 + max([self.engine.last, *(member.last for member in self.members.values())])
        self.began, self.suspected = time.monotonic(), None
        doing = head.AGAIN if self.ever else "starting the engine"
        say(f"{doing}: all {self.args.of} members are here (generation {self.generation})")
        self.engine.start(self.generation)
        self.canary = Watch(self.wanted, self.args.canary, self.args.timeout, self.args.stuck)
        self.canary.start()
        self.record.set("recovering" if self.ever else "starting", "starting the engine")
        if self.ever:
            self.record.reached("started")
        self.tell(now=True)

    def _watch(self) -> None:
        """Find out whether the engine lives; several signs of one death are waited for, and the nearest to its cause told."""
        troubles = self._troubles()
        if troubles:
            now = time.monotonic()
            self.suspected = now if self.suspected is None else self.suspected
            if now - self.suspected >= self.args.settle:
                self._fail(max(troubles, key=lambda each: each.weight))
            return
        self.suspected = None
        assert self.canary is not None  # noqa: S101 - there is one for every generation
        good, note = self.canary.good, self.canary.note
        if good is None:
            return
        if self.record.said["state"] != "ready":
            self.ever = True
            with contextlib.suppress(OSError):
                record.answered(self.wanted)
            self.record.ready()
            say(f"the server answers, {time.monotonic() - self.began:.1f} s after its start")
        if good != self.good:
            self.good = good
            self.record.alive(good[1], self.canary.in_flight)
        if note != self.record.said["doing"]:
            self.record.set("ready", note)

    def _troubles(self) -> list[Trouble]:
        found = []
        age = time.monotonic() - self.began
        if self.engine.state != "running":
            found.append(self._ended(0, self.engine.ended, self.engine.evidence))
        for rank in range(1, self.args.of):
            member, node = self.members.get(rank), self.nodes.get(rank, "")
            if member is None or member.missed == self.generation:
                found.append(Trouble(5, f"{self._named(rank)} is gone: {self.lost.get(rank, '')}", str(rank), node))
            elif member.last == self.generation and member.said.get("state") != "running":
                found.append(self._ended(rank, member.text("ended", 200) or "was stopped", member.text("evidence")))
            elif member.last != self.generation and age > self.args.silence:
                found.append(Trouble(2, f"{self._named(rank)} did not start", str(rank), node))
        if self.canary is not None and self.canary.dead:
            found.append(Trouble(1, self.canary.dead, evidence=self.engine.evidence))
        # The first start of all has no deadline, as without a supervisor: whoever waits for it has one.
        if self.ever and self.canary is not None and self.canary.good is None and age > self.args.start_timeout:
            what = f"no answer within {self.args.start_timeout:g} s of a restart"
            found.append(Trouble(0, what, evidence=self.engine.evidence))
        return found

    def _ended(self, rank: int, how: str, evidence: str) -> Trouble:
        """A killed engine is nearer to the cause than one that ended by itself, and rank 0's own ends with any other."""
        weight = 4 if "killed" in how else 3 if rank else 2
        return Trouble(weight, f"the engine of {self._named(rank)} {how}", str(rank), self.nodes.get(rank, ""), evidence)

    def _fail(self, trouble: Trouble) -> None:
        assert self.canary is not None  # noqa: S101 - there is one for every generation
        say(f"{trouble.what}: stopping the engine everywhere")
        for line in trouble.evidence.splitlines() if trouble.rank not in ("", "0") else ():
            say(f"  {line}")  # what rank 0's engine printed is here already
        self.record.fault(
            trouble.what, node=trouble.node, rank=trouble.rank, evidence=trouble.evidence, in_flight=self.canary.in_flight
        )
        self.halt()
        if not self.ever:
            self._give_up(f"the first start failed: {trouble.what}")
        else:
            self._again(trouble.what)
        self.tell(now=True)

    def _again(self, what: str) -> None:
        """Take a restart from the budget, or give up."""
        if self.record.may_restart():
            self.record.set("recovering", "stopping the engine")
            say(f"restarts left: {self.record.said['restarts_left']}")
        else:
            used = f"all {self.args.restarts} restarts within {self.args.window:g} s are used up"
            self._give_up(f"{used}; the last fault: {what}")

    def _give_up(self, why: str) -> None:
        self.gave_up = why
        with contextlib.suppress(OSError):
            record.write(GAVE_UP, {"id": self.wanted["id"], "why": why})
        self.record.set("gave-up", why)
        say(f"GIVES UP: {why}. `vlaunch serve` starts it anew")

    def halt(self) -> None:
        """Let nothing run any more, here and on the other members."""
        self.generation = 0
        self.engine.stop()
        if self.canary is not None:
            self.canary.stop()

    def leave(self) -> None:
        """Begin to end, because somebody said so; the members stop as well."""
        self.halt()
        if not self.gave_up or not record.wants(self.wanted):  # a host that is switched off forgets no failure; `stop` does
            self.record.set("stopped")
        self.tell(now=True)

    def _doing(self, what: str) -> None:
        if what != self.record.said["doing"]:
            self.record.set("recovering" if self.ever else "starting", what)
            say(what)
        elif time.time() - self.record.said["written"] > self.args.canary:
            self.record.save(durable=False)  # so that whoever reads it knows that somebody waits

    def _named(self, rank: int) -> str:
        return f"rank {rank}" + (f" on {self.nodes[rank]}" if rank in self.nodes else "")


def wanted(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is served: as the launcher wrote it down, if this is that server, with what this program was told."""
    there = record.read(record.WANTED)
    found = there if isinstance(there, dict) and there.get("id") == args.id else {"version": 1, "id": args.id, "backend": "mp"}
    given = {
        name: getattr(args, name) for name in ("canary", "timeout", "restarts", "window", "grace", "start_timeout", "stuck")
    }
    policy = {**given, **(found.get("policy") or {})}
    return {"dashboard": 0, **found, "api": {"host": args.api_host, "port": args.api}, "policy": policy}
