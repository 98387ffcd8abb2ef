"""First process of a rank's container: vLLM on one of several nodes, started and ended together with those on the others.

Standard library only. vLLM's own multi-node mode does not watch over its ranks: a dead one leaves `/health` at 200, and the
others wait for ever. Rank 0 decides (`group_lead.py`), and the others do what it wants for as long as it says so.

Usage: group.py --rank R --of N --head IP --port P --id DIGEST --node NAME --api-host IP --api PORT [policy] -- vllm serve …
"""

from __future__ import annotations

import argparse
import secrets
import selectors
import signal
import socket
import sys
import time
from typing import Any

from group_engine import Engine
from group_wire import Lost, Peer, proof, proven, say, secret

_CONNECT = 2.0  # seconds for a connection to rank 0


class Follower:
    """A member that is not rank 0. It runs what rank 0 wants, and nothing while rank 0 is not there."""

    def __init__(self, args: argparse.Namespace, engine: Engine, selector: selectors.BaseSelector) -> None:
        self.args, self.engine, self.selector = args, engine, selector
        self.peer: Peer | None = None
        self.words: tuple[object, ...] = ()  # what both sides prove; empty until rank 0 has given its challenge
        self.known = False  # rank 0 has proven who it is
        self.run, self.gave_up = 0, ""
        self.again = self.told = 0.0
        self.report: dict[str, object] = {}
        self.trouble = ""

    def turn(self) -> None:
        """Look at everything once, and do what follows."""
        now = time.monotonic()
        if self.peer is None:
            if now >= self.again:
                self._connect()
        elif now - self.peer.heard > self.args.silence:
            self._lose(f"it has been silent for {self.args.silence:g} s")
        if self.run <= 0 or (self.engine.state == "running" and self.engine.last != self.run):
            self.engine.stop()
        elif self.engine.state == "idle" and self.run > self.engine.last:
            say(f"starting generation {self.run}")
            self.engine.start(self.run)
        self._tell(now)

    def _connect(self) -> None:
        self.again = time.monotonic() + self.args.every
        try:
            sock = socket.create_connection((self.args.head, self.args.port), _CONNECT)
        except OSError as error:
            self._told_once(f"rank 0 at {self.args.head} port {self.args.port} cannot be reached: {error.strerror or error}")
            return
        self.peer, self.words, self.known = Peer(sock), (), False
        self.selector.register(self.peer, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        try:
            while self.peer is not None and (messages := self.peer.read()):
                for said in messages:
                    self._take(said)
        except Lost as why:
            self._lose(str(why))

    def _take(self, said: dict[str, Any]) -> None:
        assert self.peer is not None  # noqa: S101 - this came from it
        if "refused" in said:
            raise Lost(f"it refuses this member: {str(said['refused'])[:300]}")
        if not self.words:
            nonce = secrets.token_hex(16)
            self.words = (self.args.id, self.args.rank, self.args.node, str(said.get("challenge")), nonce)
            self.peer.say(
                id=self.args.id, rank=self.args.rank, node=self.args.node, nonce=nonce,
                proof=proof(secret(), "member", *self.words), **self._state(),
            )  # fmt: skip
            return
        if not self.known:
            if not proven(said.get("proof"), secret(), "lead", *self.words):
                raise Lost("it does not know this cluster's secret")
            self.known, self.trouble = True, ""
            say("rank 0 is here")
        run, gave_up = said.get("run"), str(said.get("gave_up") or "")[:500]
        self.run = run if isinstance(run, int) and 0 <= run < 1 << 31 else 0
        if gave_up and gave_up != self.gave_up:
            say(f"rank 0 says that the group has given up: {gave_up}")
        self.gave_up = gave_up

    def _lose(self, why: str) -> None:
        if self.peer is not None:
            self.selector.unregister(self.peer)
            self.peer.close()
        self.peer, self.run, self.known = None, 0, False
        self.again = time.monotonic() + self.args.every
        self._told_once(f"rank 0 is gone: {why}")

    def _state(self) -> dict[str, object]:
        engine = self.engine
        ended = {"ended": engine.ended, "evidence": engine.evidence} if engine.ended else {}
        return {"state": engine.state, "last": engine.last, **ended}

    def _tell(self, now: float) -> None:
        """Say how this member is: every second, and at once when that changes."""
        report = self._state()
        same = (report["state"], report["last"]) == (self.report.get("state"), self.report.get("last"))
        if self.peer is None or not self.known or (same and now - self.told < self.args.every):
            return
        self.report, self.told = report, now
        try:
            self.peer.say(**report)
        except Lost as why:
            self._lose(str(why))

    def _told_once(self, what: str) -> None:
        if what != self.trouble:
            self.trouble = what
            say(what)

    def leave(self) -> None:
        """Begin to end, because somebody said so."""
        if self.peer is not None:
            self._lose("this member was told to end")
        self.again = float("inf")
        self.engine.stop()


def main() -> int:
    """Be a member until somebody says that it is enough."""
    args = parse(sys.argv[1:])
    engine = Engine(args.command, args.grace)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: told.append(got))
    if args.rank:
        member: Any = Follower(args, engine, selectors.DefaultSelector())
    else:
        from group_lead import Lead  # what asks the API is of no use to the others

        member = Lead(args, engine, selectors.DefaultSelector())
    leaving = False
    while True:
        for each, _ in member.selector.select(min(0.2, args.every / 2)):
            each.data()
        engine.poll()
        if told and not leaving:
            leaving = True
            member.leave()
        if leaving and engine.state == "idle":
            return 0
        if not leaving:
            member.turn()


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` is the engine's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    for name in ("--head", "--id", "--node"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-host", default="127.0.0.1")
    parser.add_argument("--api", type=int, default=8000)
    parser.add_argument("--restarts", type=int, default=3)
    policy = {"canary": 5, "timeout": 8, "window": 3600, "grace": 5, "start-timeout": 1800}
    timing = {"every": 1, "silence": 10, "settle": 1, "stuck": 30}
    for name, seconds in {**policy, **timing}.items():
        parser.add_argument(f"--{name}", type=float, default=float(seconds))
    parser.add_argument("command", nargs="+")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
