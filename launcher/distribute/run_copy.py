"""Runner of a copy: starts a program on each node, tells each which nodes come before it in the
chain, and watches them to the end.

It knows nothing of SSH: the caller passes functions that start and reach programs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from launcher.core import untrusted
from launcher.core.domain import Answer, fold
from launcher.core.errors import NodeError, UnreadableAnswer, VlaunchError, together
from launcher.core.events import Event, State
from launcher.core.sizes import told
from launcher.distribute import chain
from launcher.distribute.members import Connections, Member, Part, Spread

_STAGE: Final = "copy"
BEGIN: Final = 90.0  # seconds until all programs listen; a container may have to start
SILENT: Final = 20.0  # seconds without a word, until a program counts as dead
STALLED: Final = 90.0  # seconds in which no byte comes to anybody
_FINISH: Final = 120.0, 5e6  # seconds, and bytes a second that `docker load` takes at least
_LOOK, _POLL, _TELL = 1.0, 0.05, 10.0  # seconds


def spread(
    parts: Sequence[Part],
    connections: Connections,
    *,
    total: int,
) -> Generator[Event, None, Spread]:
    """Run a copy to its end; the first of `parts` is the source, the others follow it in the chain.
    `total` are the bytes of all files.

    A node that fails stops no other: the nodes behind it fetch from the one before it. Whatever
    happens, no program is left running; what nodes have stays, and the same copy continues with it.

    Raises:
        NodeError: a program did not begin, or the source failed.
        VlaunchError: nothing moved for too long.
    """
    run = _Run(parts, connections, total)
    try:
        yield from run.begin()
        yield from run.move()
        yield from run.finish()
        return run.result()
    finally:
        run.end()


class _Run:
    def __init__(
        self,
        parts: Sequence[Part],
        connections: Connections,
        total: int,
    ) -> None:
        self._parts = {each.name: each for each in parts}
        self._source = parts[0].name
        self._connections, self._clock = connections, connections.clock
        self._total = total
        self._began = self._clock()
        self._members: dict[str, Member] = {}
        self._ordered = False
        self._gives_to = ""
        self._moved_at = self._began

    # --- the three parts of a copy

    def begin(self) -> Iterator[Event]:
        """Start all programs, and wait until each listens: who asks before is refused."""
        yield Event(
            kind="wait", stage=_STAGE, text="starting a program on each node", state="running"
        )
        for name, part in self._parts.items():
            self._members[name] = Member(
                held=self._connections.hold(part.command), heard=self._clock()
            )
        until = self._clock() + BEGIN
        while not all(each.listening or not each.alive for each in self._members.values()):
            yield from self._hear()
            if self._clock() > until:
                late = [name for name, each in self._members.items() if not each.listening]
                raise NodeError(fold(late), f"the program did not begin within {BEGIN:.0f}s")
        if errors := [self._error(name) for name, each in self._members.items() if each.failed]:
            raise together(errors)
        for name, each in self._members.items():
            if each.shared:
                text = f"sees the same folder as {each.shared}, which gets the files"
                yield Event(kind="note", stage=_STAGE, node=name, text=text)
            each.began = each.have
        self._began = self._moved_at = self._clock()
        self._tell_order()
        for each in self._members.values():
            if each.alive:
                each.held.say(chain.simply("go"))
        self._give()

    def move(self) -> Iterator[Event]:
        """Watch until all nodes that live have everything."""
        looked = told_at = self._clock()
        while not self._all_have_it():
            yield from self._hear()
            now = self._clock()
            if now - looked >= _LOOK:
                looked = now
                self._connections.check()
                due = now - told_at >= _TELL
                told_at = now if due else told_at
                yield from self._progress(due)
                self._check_stall(now)
            if not self._targets() and len(self._parts) > 1:
                raise together([self._error(name) for name in self._members if self._failed(name)])

    def finish(self) -> Iterator[Event]:
        """Have everything put in its place."""
        text = "writing the files to the disks, and putting them in their places"
        yield Event(kind="wait", stage=_STAGE, text=text, state="running")
        self._compare()
        for each in self._members.values():
            if each.alive:
                each.held.say(chain.simply("finish"))
        seconds, rate = _FINISH
        until = self._clock() + seconds + self._total / rate
        while not all(each.finished or not each.alive for each in self._members.values()):
            yield from self._hear()
            if self._clock() > until:
                late = [name for name, each in self._members.items() if not each.finished]
                raise NodeError(fold(late), "the files were not written to the disk in time")

    def result(self) -> Spread:
        """Return what has come of it."""
        return Spread(seconds=self._clock() - self._began, members=self._members)

    def end(self) -> None:
        """End all programs."""
        for each in self._members.values():
            each.held.end()

    # --- what nodes say

    def _hear(self) -> Iterator[Event]:
        """Take all that was said; wait a little when nothing was."""
        heard = False
        for name, member in self._members.items():
            while (said := member.held.next(0)) is not None:
                heard = True
                yield from self._take(name, member, said)
        if not heard:
            first = next(iter(self._members.values()))
            if (said := first.held.next(_POLL)) is not None:
                yield from self._take(self._source, first, said)
        for name, member in self._members.items():
            silent = self._clock() - member.heard
            if member.alive and member.listening and not member.finished and silent > SILENT:
                yield from self._dies(name, f"it has said nothing for {silent:.0f}s")

    def _take(self, name: str, member: Member, said: Any) -> Iterator[Event]:
        member.heard = self._clock()
        if isinstance(said, Answer):
            if not member.finished and member.alive:
                why = said.tail or "\n".join(member.complaint[-3:])
                yield from self._dies(name, why or f"its program ended with {said.code}")
            return
        if said.error:
            member.complaint.append(untrusted.brief(said.text))
            return
        try:
            event = chain.said(name, said.text)
        except UnreadableAnswer as error:
            yield from self._dies(name, f"{error.message}: {error.evidence[:100]}")
            return
        yield from self._event(name, member, event)

    def _event(self, name: str, member: Member, event: chain.Said) -> Iterator[Event]:
        now = self._clock()
        if event.event == "listening":
            member.listening, member.port, member.have = True, event.port, event.have
        elif event.event == "progress":
            if event.have != member.have or event.sent != member.sent:
                self._moved_at = now
            member.have, member.received = event.have, event.received
            member.sent, member.source = event.sent, event.source
        elif event.event == "complete":
            member.root, member.have, member.seconds = event.root, self._total, now - self._began
            member.received = event.received
        elif event.event == "finished":
            member.finished, member.sent = True, event.sent
            member.cpu, member.start = event.cpu, event.start
        elif event.event == "shared":
            member.shared = event.who
        elif event.event == "failed":
            member.full = event.full
            yield from self._dies(name, event.why)
        elif event.event == "wrong":
            yield from self._wrong(name, event.who, event.number)

    def _wrong(self, name: str, who: str, number: int) -> Iterator[Event]:
        text = f"got wrong bytes from {who}, and asks again"
        if who in self._members:
            self._members[who].held.say(chain.doubt(number))
        yield Event(kind="warning", stage=_STAGE, node=name, text=text, state="warn")

    def _dies(self, name: str, why: str) -> Iterator[Event]:
        member = self._members[name]
        member.failed = why or "its program ended"
        member.held.end()
        if name == self._source:
            raise self._error(name)
        if self._ordered:
            text = f"failed; the copy continues without it: {member.failed.splitlines()[-1]}"
            yield Event(kind="warning", stage=_STAGE, node=name, text=text, state="warn")
            self._give()

    # --- what they are told

    def _tell_order(self) -> None:
        """Tell each node which nodes come before it, the nearest first. It skips dead ones."""
        before: list[tuple[str, str, int]] = []
        for name, member in self._members.items():
            if member.alive:
                member.held.say(chain.before(before[::-1]))
                if member.port:
                    before.append((name, self._parts[name].host, member.port))
        self._ordered = True

    def _give(self) -> None:
        """Have a source that cannot be reached send its files to the first node that lives."""
        first = next(iter(self._targets()), "")
        if self._parts[self._source].gives and first not in ("", self._gives_to):
            self._gives_to = first
            port = self._connections.tunnel(first, self._members[first].port)
            self._members[self._source].held.say(chain.give("127.0.0.1", port))

    # --- what it means

    def _targets(self) -> list[str]:
        return [name for name, each in self._members.items() if each.alive and name != self._source]

    def _failed(self, name: str) -> bool:
        return bool(self._members[name].failed)

    def _all_have_it(self) -> bool:
        there = bool(self._targets()) or len(self._parts) == 1
        return there and all(self._members[name].root for name in (self._source, *self._targets()))

    def _compare(self) -> None:
        """Raise VlaunchError when copies differ, which the digests of all chunks exclude."""
        root = self._members[self._source].root
        if other := [name for name in self._targets() if self._members[name].root != root]:
            raise VlaunchError(f"the copies on {fold(other)} differ from the source's")

    def _check_stall(self, now: float) -> None:
        if now - self._moved_at < STALLED:
            return
        waits = [
            f"{name}: {told(self._members[name].have)} of {told(self._total)}, from"
            f" {self._members[name].source or 'nobody'}"
            for name in self._targets()
            if not self._members[name].root
        ]
        raise VlaunchError(
            f"no byte has moved for {STALLED:.0f}s",
            evidence=waits,
            hint="see whether the nodes reach each other at the copy's port: `vlaunch check --only"
            " ports-reachable`; the same command goes on from there",
        )

    def _error(self, name: str) -> NodeError:
        member = self._members[name]
        hint = "the same command goes on from there"
        if member.full:
            hint = "see what could go there: `vlaunch model list`, `vlaunch image list`"
        return NodeError(name, "cannot take part in the copy", evidence=member.failed, hint=hint)

    def _progress(self, due: bool) -> Iterator[Event]:
        """Tell how far each node is, and the slowest."""
        seconds = max(0.001, self._clock() - self._began)
        for position, name in enumerate(self._targets(), 1):
            each = self._members[name]
            if each.root:
                continue
            rate = (each.have - each.began) / seconds
            data = {
                "bytes": each.have,
                "total": self._total,
                "rate": round(rate),
                "from": each.source,
                "position": position,
            }
            source = f" from {each.source}" if each.source else ""
            text = f"{_share(each.have, self._total)}, {told(round(rate))}/s{source}"
            yield Event(kind="step", stage=_STAGE, node=name, text=text, state="running", data=data)
        slowest = min(self._targets(), key=lambda name: self._members[name].have, default="")
        if slowest:
            each = self._members[slowest]
            rate = (each.have - each.began) / seconds
            left = f", {_duration((self._total - each.have) / rate)} left" if rate else ""
            text = f"{_share(each.have, self._total)} on {slowest}, the last{left}"
            data = {"bytes": each.have, "total": self._total}
            state: State = "running" if due else ""
            yield Event(kind="wait", stage=_STAGE, text=text, state=state, data=data)


def _share(have: int, total: int) -> str:
    return f"{told(have)} of {told(total)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 120 else f"{seconds / 60:.0f} min"
