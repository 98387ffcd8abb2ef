"""The agents of a cluster, connected to the head's: who is there, what each reports, and what each
is ordered.

The head's agent (`Lead`) tells every node all its orders each second, so that a message that is
lost is only late; the others (`Follower`) report as often. A connection begins with a proof by both
sides that they have the cluster's secret. One that breaks ends nothing: engines go on, and what
they are is compared when it is back. Standard library only.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import node as nodes
from .node import Node, Order
from .wire import LINE, Lost, Peer, listen, proof, proven, say, secret

EVERY = 1.0  # seconds between two messages
_FRESH = 5.0  # seconds for which a report holds
SILENCE = 60.0  # seconds without one until a connection counts as broken
_RETURN = 10.0  # seconds for an agent whose connection was closed to come back
_CONNECT = 2.0  # seconds for a connection to the head
_MOST_PENDING = 64  # connections that have not proven yet who they are
_PROOF = 10.0  # seconds to do so


@dataclass
class PendingPeer:
    """Somebody who has not proven yet to be an agent of this cluster."""

    peer: Peer
    challenge: str
    since: float


@dataclass
class Member:
    """A node's agent that is connected, and what it reported last.

    `boot` is another one after each start of its container.

    `done` is the number of the orders that it had carried out by then.
    """

    peer: Peer
    boot: str
    said: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0


class Lead:
    """All agents, as the head's sees them; its own node is one of them."""

    def __init__(
        self, name: str, host: str, port: int, node: Node, selector: selectors.BaseSelector
    ) -> None:
        self.name, self.host, self.port, self.node, self.selector = name, host, port, node, selector
        self.boot = secrets.token_hex(4)
        self.members: dict[str, Member] = {}
        self.lost: dict[str, tuple[float, str]] = {}  # since when a node counts as gone, and why
        self.orders: dict[str, dict[str, Order]] = {}
        self.changed = False  # a member came or went
        self.ray = ""  # another word each time that Ray's head is started
        self._pending: list[PendingPeer] = []
        self._server: socket.socket | None = None
        self._told = self._listened = 0.0
        self._sent: dict[str, Any] = {}
        self._number: dict[str, int] = {}  # of the orders of each node
        self._own: Mapping[str, Any] = {}

    # --- what the keeper asks

    def here(self, node: str) -> bool:
        """True when a node's agent is connected."""
        return node == self.name or node in self.members

    def fresh(self, node: str) -> bool:
        """True when a node has been heard a moment ago: what it reported before that may not hold
        any more.
        """
        member = self.members.get(node)
        return node == self.name or (
            member is not None and time.monotonic() - member.peer.heard < _FRESH
        )

    def settled(self, node: str) -> bool:
        """True when a node's report is of after it had carried out what it was ordered last."""
        return node == self.name or (
            node in self.members and self.members[node].done == self._number.get(node)
        )

    def report(self, node: str, server: str) -> Mapping[str, Any] | None:
        """Return what a node reports of a server; empty when it has nothing of it, None when nobody
        can say.
        """
        if node == self.name:
            found = self._own.get(server)
            return found if isinstance(found, Mapping) else {}
        member = self.members.get(node)
        if member is None:
            return None
        found = member.said.get(server)
        return found if isinstance(found, Mapping) else {}

    def boot_of(self, node: str) -> str:
        """Return a word that changes when a node's container starts anew; empty while it is not
        here.
        """
        return (
            self.boot
            if node == self.name
            else self.members[node].boot
            if node in self.members
            else ""
        )

    def gone(self, node: str) -> str:
        """Say why a node that was here is gone, once it has had time to come back; empty while it
        is here, or may be soon.
        """
        since, why = self.lost.get(node, (0.0, ""))
        return why if why and not self.here(node) and time.monotonic() >= since else ""

    def heard(self) -> dict[str, float]:
        """Return how many seconds ago each node's agent was heard."""
        now = time.monotonic()
        return {
            self.name: 0.0,
            **{name: round(now - each.peer.heard, 1) for name, each in self.members.items()},
        }

    # --- connections

    def turn(self) -> None:
        """Listen, order, and part with those who have gone silent."""
        now = time.monotonic()
        if self._server is None and now >= self._listened:
            self._listen(now)
        self.node.orders = self.orders.get(self.name, {})
        self.node.turn()
        self._own = self.node.report()
        again = now - self._told >= EVERY
        if again:
            self._told = now
        for name, member in list(self.members.items()):
            try:
                self._tell(name, member, again=again)
                if now - member.peer.heard > SILENCE:
                    raise Lost(f"it has been silent for {SILENCE:g} s")
            except Lost as why:
                self._lose(name, str(why))
        for pending in [each for each in self._pending if now - each.since > _PROOF]:
            self._turn_away(pending)

    def _tell(self, name: str, member: Member, *, again: bool) -> None:
        """Tell a node its orders when they have changed, or `again`; raises Lost."""
        said = {server: order.as_json() for server, order in self.orders.get(name, {}).items()}
        changed = said != self._sent.get(name)
        if changed:
            self._sent[name], self._number[name] = said, self._number.get(name, 0) + 1
        if again or changed:
            member.peer.say(orders=said, number=self._number[name], ray=self.ray)

    def _listen(self, now: float) -> None:
        try:
            self._server = listen(self.host, self.port)
        except OSError as error:  # after a reboot the address may come later than Docker
            self._listened = now + EVERY
            say(f"cannot listen on {self.host} port {self.port}: {error.strerror}")
            return
        self.selector.register(self._server, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        """Let a peer in, who must prove at once who it is."""
        assert self._server is not None  # noqa: S101 - it is what became readable
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            pending = PendingPeer(Peer(sock), secrets.token_hex(16), time.monotonic())
            self.selector.register(
                pending.peer, selectors.EVENT_READ, lambda: self._hear_pending(pending)
            )
            self._pending.append(pending)
            try:
                pending.peer.say(challenge=pending.challenge)
            except Lost:
                self._turn_away(pending)
            if len(self._pending) > _MOST_PENDING:
                self._turn_away(self._pending[0])

    def _turn_away(self, pending: PendingPeer, why: str = "") -> None:
        self._pending.remove(pending)
        self.selector.unregister(pending.peer)
        if why:
            with contextlib.suppress(Lost):
                pending.peer.say(refused=why)
        pending.peer.close()

    def _hear_pending(self, pending: PendingPeer) -> None:
        try:
            messages = pending.peer.read()
            if messages[1:]:
                raise Lost("it says more than its proof")
            for message in messages:
                self._judge(pending, message)
        except Lost:
            if pending in self._pending:
                self._turn_away(pending)

    def _judge(self, pending: PendingPeer, said: Mapping[str, Any]) -> None:
        name, boot, nonce, key = said.get("node"), said.get("boot"), said.get("nonce"), secret()
        words = (name, boot, pending.challenge, nonce)
        if (
            not isinstance(name, str)
            or not isinstance(boot, str)
            or not proven(said.get("proof"), key, "member", *words)
        ):
            return self._turn_away(pending, "the secrets differ: run `vlaunch up`")
        if name == self.name:
            return self._turn_away(pending, f"{name} is this node itself")
        if name in self.members:
            self._lose(name, "it has connected anew")
        pending.peer.most = LINE
        member = Member(pending.peer, boot[:40])
        self._pending.remove(pending)
        self.selector.modify(pending.peer, selectors.EVENT_READ, lambda: self._hear(name, member))
        self.members[name], self.changed = member, True
        self.lost.pop(name, None)
        self._sent.pop(name, None)
        say(f"the agent of {name[:100]} is here")
        try:
            member.peer.say(proof=proof(key, "lead", *words))
        except Lost as why:
            self._lose(name, str(why))
        return None

    def _hear(self, name: str, member: Member) -> None:
        if self.members.get(name) is not member:
            return
        try:
            while messages := member.peer.read():
                said, done = messages[-1].get("servers"), messages[-1].get("done")
                if isinstance(said, Mapping):
                    member.said, member.done = said, done if isinstance(done, int) else 0
        except Lost as why:
            self._lose(name, str(why))

    def _lose(self, name: str, why: str) -> None:
        member = self.members.pop(name)
        now = time.monotonic()
        # Silence has lasted long enough already; whose end was closed may just have been cut off
        # for a moment.
        self.lost[name] = (now if now - member.peer.heard > SILENCE else now + _RETURN, why)
        self.selector.unregister(member.peer)
        member.peer.close()
        self.changed = True
        say(f"the agent of {name[:100]} is gone: {why}")


class Follower:
    """An agent that is not the head's. Its engines go on while the head is away."""

    def __init__(
        self, name: str, host: str, port: int, node: Node, selector: selectors.BaseSelector
    ) -> None:
        self.name, self.host, self.port, self.node, self.selector = name, host, port, node, selector
        self.boot = secrets.token_hex(4)
        self._peer: Peer | None = None
        # what both sides prove; empty until the head has given its challenge
        self._words: tuple[object, ...] = ()
        self._known = False  # the head has proven who it is
        self.ray = ""  # which start of Ray's head the head's agent told of last
        self._again = self._told = 0.0
        self._report: object = None
        self._number = 0  # of the orders that came last
        self._trouble = ""

    def turn(self) -> None:
        """Look at everything once, and do what follows."""
        now = time.monotonic()
        if self._peer is None:
            if now >= self._again:
                self._connect(now)
        elif now - self._peer.heard > SILENCE:
            self._lose(f"it has been silent for {SILENCE:g} s")
        self.node.turn()
        self._tell(now)

    def _connect(self, now: float) -> None:
        self._again = now + EVERY
        try:
            sock = socket.create_connection((self.host, self.port), _CONNECT)
        except OSError as error:
            self._say_once(
                f"the head's agent at {self.host} port {self.port} cannot be reached:"
                f" {error.strerror or error}"
            )
            return
        self._peer, self._words, self._known = Peer(sock), (), False
        self.selector.register(self._peer, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        try:
            while self._peer is not None and (messages := self._peer.read()):
                for said in messages:
                    self._take(self._peer, said)
        except Lost as why:
            self._lose(str(why))

    def _take(self, peer: Peer, said: dict[str, Any]) -> None:
        if "refused" in said:
            raise Lost(f"it refuses this agent: {str(said['refused'])[:300]}")
        if not self._words:
            nonce = secrets.token_hex(16)
            self._words = (self.name, self.boot, str(said.get("challenge")), nonce)
            peer.say(
                node=self.name,
                boot=self.boot,
                nonce=nonce,
                proof=proof(secret(), "member", *self._words),
            )
            return
        if not self._known:
            if not proven(said.get("proof"), secret(), "lead", *self._words):
                raise Lost("it does not know this cluster's secret")
            self._known, self._trouble, self._report = True, "", None
            peer.most = LINE
            say("the head's agent is here")
            return
        try:
            self.node.orders = nodes.read(said.get("orders"))
            self.ray = str(said.get("ray") or "")[:40]
            self._number = int(said.get("number") or 0)
        except (ValueError, TypeError) as error:
            raise Lost(str(error)) from None

    def _tell(self, now: float) -> None:
        """Report every second, and at once when a state changes."""
        if self._peer is None or not self._known:
            return
        report = self.node.report()
        states = {
            name: [each.get(word) for word in ("state", "last", "prepared", "waits")]
            for name, each in report.items()
        }
        states[""] = [self._number]
        if states == self._report and now - self._told < EVERY:
            return
        self._report, self._told = states, now
        try:
            self._peer.say(servers=report, done=self._number)
        except Lost as why:
            self._lose(str(why))

    def _lose(self, why: str) -> None:
        if self._peer is not None:
            self.selector.unregister(self._peer)
            self._peer.close()
        self._peer, self._known = None, False
        self._again = time.monotonic() + EVERY
        self._say_once(f"the head's agent is gone: {why}; what runs here goes on")

    def _say_once(self, what: str) -> None:
        if what != self._trouble:
            self._trouble = what
            say(what)
