"""Coordinator of a copy: starts the members' programs, sends each its predecessors in the chain,
and watches them until they finish.

The caller passes functions that start and reach programs, so this module does not depend on SSH.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from launcher.core import untrusted
from launcher.core.domain import Answer, fold
from launcher.core.errors import NodeError, UnreadableAnswer, VlaunchError, combine_errors
from launcher.core.events import Event
from launcher.core.sizes import format_size
from launcher.distribute import chain
from launcher.distribute.chain import ProgramEvent
from launcher.distribute.members import Connections, CopyResult, MemberProgress, MemberSpec

_STAGE: Final = "copy"
START_TIMEOUT: Final = 90.0  # seconds until all programs listen; a container may have to start
SILENCE_TIMEOUT: Final = 20.0  # seconds without a message, after which a program counts as dead
STALL_TIMEOUT: Final = 90.0  # seconds in which no member receives a byte
_FINISH: Final = 120.0, 5e6  # seconds, and the bytes per second that `docker load` takes at least
_LOOK, _POLL = 1.0, 0.05  # seconds


def coordinate_copy(
    specs: Sequence[MemberSpec],
    connections: Connections,
    *,
    total: int,
) -> Generator[Event, None, CopyResult]:
    """Run a copy to its end; the first spec is the source, the others follow it in the chain.
    `total` is the bytes of all files.

    A failed node stops no other: the nodes behind it fetch from the one before it. No program is
    left running in any case. Received chunks stay on the nodes, where the same copy resumes.

    Raises:
        NodeError: a program did not start, or the source failed.
        VlaunchError: no byte moved for STALL_TIMEOUT.
    """
    run = _Coordinator(specs, connections, total)
    try:
        yield from run.start()
        yield from run.watch()
        yield from run.finish()
        return run.result()
    finally:
        run.stop()


class _Coordinator:
    def __init__(
        self,
        specs: Sequence[MemberSpec],
        connections: Connections,
        total: int,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._source = specs[0].name
        self._connections, self._clock = connections, connections.clock
        self._total = total
        self._began = self._clock()
        self._members: dict[str, MemberProgress] = {}
        self._ordered = False
        self._gives_to = ""
        self._moved_at = self._began

    # --- the phases of a copy

    def start(self) -> Iterator[Event]:
        """Start all programs, and wait until each listens: earlier connections would be refused."""
        yield Event(kind="wait", stage=_STAGE, text="starting a program on each node")
        for name, spec in self._specs.items():
            self._members[name] = MemberProgress(
                program=self._connections.start(spec.command), last_message_at=self._clock()
            )
        deadline = self._clock() + START_TIMEOUT
        while not all(member.listening or not member.alive for member in self._members.values()):
            yield from self._receive_messages()
            if self._clock() > deadline:
                late = [name for name, member in self._members.items() if not member.listening]
                problem = f"the program did not start within {START_TIMEOUT:.0f}s"
                raise NodeError(fold(late), problem)
        if errors := self._errors():
            raise combine_errors(errors)
        for name, member in self._members.items():
            if member.shared:
                text = f"shares its folder with {member.shared}, which gets the files"
                yield Event(kind="note", stage=_STAGE, node=name, text=text)
            member.stored_at_start = member.stored
        self._began = self._moved_at = self._clock()
        self._send_order()
        for member in self._members.values():
            if member.alive:
                member.program.say(chain.simple_order("go"))
        self._connect_source()

    def watch(self) -> Iterator[Event]:
        """Watch until all live nodes have all files."""
        checked_at = self._clock()
        while not self._all_complete():
            yield from self._receive_messages()
            now = self._clock()
            if now - checked_at >= _LOOK:
                checked_at = now
                self._connections.check()
                yield from self._report_progress()
                self._check_stall(now)
            if not self._targets() and len(self._specs) > 1:
                raise combine_errors(self._errors())

    def finish(self) -> Iterator[Event]:
        """Have the members install the files."""
        text = "writing the files to disk and moving them into place"
        yield Event(kind="wait", stage=_STAGE, text=text)
        self._compare_digests()
        for member in self._members.values():
            if member.alive:
                member.program.say(chain.simple_order("finish"))
        seconds, rate = _FINISH
        deadline = self._clock() + seconds + self._total / rate
        while not all(member.finished or not member.alive for member in self._members.values()):
            yield from self._receive_messages()
            if self._clock() > deadline:
                late = [name for name, member in self._members.items() if not member.finished]
                raise NodeError(fold(late), "the files were not written to the disk in time")

    def result(self) -> CopyResult:
        """Return the result."""
        return CopyResult(seconds=self._clock() - self._began, members=self._members)

    def stop(self) -> None:
        """Stop all programs."""
        for member in self._members.values():
            member.program.end()

    # --- messages of the programs

    def _receive_messages(self) -> Iterator[Event]:
        """Handle all messages; without any, wait briefly for one of the source."""
        received = False
        for name, member in self._members.items():
            while (message := member.program.next(0)) is not None:
                received = True
                yield from self._handle_message(name, member, message)
        if not received:
            first = next(iter(self._members.values()))
            if (message := first.program.next(_POLL)) is not None:
                yield from self._handle_message(self._source, first, message)
        for name, member in self._members.items():
            silent = self._clock() - member.last_message_at
            expected = member.alive and member.listening and not member.finished
            if expected and silent > SILENCE_TIMEOUT:
                yield from self._drop_member(name, f"no message from it for {silent:.0f}s")

    def _handle_message(self, name: str, member: MemberProgress, message: Any) -> Iterator[Event]:
        member.last_message_at = self._clock()
        if isinstance(message, Answer):
            if not member.finished and member.alive:
                why = message.tail or "\n".join(member.error_lines[-3:])
                yield from self._drop_member(name, why or f"its program exited: {message.code}")
            return
        if message.error:
            member.error_lines.append(untrusted.single_line(message.text))
            return
        try:
            event = chain.parse_event(name, message.text)
        except UnreadableAnswer as error:
            yield from self._drop_member(name, f"{error.message}: {error.evidence[:100]}")
            return
        yield from self._handle_event(name, member, event)

    def _handle_event(
        self, name: str, member: MemberProgress, event: ProgramEvent
    ) -> Iterator[Event]:
        now = self._clock()
        if event.event == "listening":
            member.listening, member.port, member.stored = True, event.port, event.have
        elif event.event == "progress":
            if event.have != member.stored or event.sent != member.sent:
                self._moved_at = now
            member.stored, member.received = event.have, event.received
            member.sent, member.source = event.sent, event.source
        elif event.event == "complete":
            member.root, member.stored, member.seconds = event.root, self._total, now - self._began
            member.received = event.received
        elif event.event == "finished":
            member.finished, member.sent = True, event.sent
            member.cpu, member.start_cpu = event.cpu, event.start
        elif event.event == "shared":
            member.shared = event.who
        elif event.event == "failed":
            member.disk_full = event.full
            yield from self._drop_member(name, event.why)
        elif event.event == "wrong":
            yield from self._handle_wrong_chunk(name, event.who, event.number)

    def _handle_wrong_chunk(self, name: str, sender: str, number: int) -> Iterator[Event]:
        text = f"got corrupt data from {sender}; requesting it again"
        if sender in self._members:
            self._members[sender].program.say(chain.recheck_order(number))
        yield Event(kind="warning", stage=_STAGE, node=name, text=text, state="warn")

    def _drop_member(self, name: str, why: str) -> Iterator[Event]:
        member = self._members[name]
        member.failed = why or "its program exited"
        member.program.end()
        if name == self._source:
            raise self._error(name)
        if self._ordered:
            text = f"failed; the copy continues without it: {member.failed.splitlines()[-1]}"
            yield Event(kind="warning", stage=_STAGE, node=name, text=text, state="warn")
            self._connect_source()

    # --- orders to the programs

    def _send_order(self) -> None:
        """Send each node its live predecessors, the nearest first."""
        before: list[tuple[str, str, int]] = []
        for name, member in self._members.items():
            if member.alive:
                member.program.say(chain.peers_order(before[::-1]))
                if member.port:
                    before.append((name, self._specs[name].host, member.port))
        self._ordered = True

    def _connect_source(self) -> None:
        """Have a source that cannot be reached push its files to the first live node."""
        first = next(iter(self._targets()), "")
        if self._specs[self._source].pushes and first not in ("", self._gives_to):
            self._gives_to = first
            port = self._connections.tunnel(first, self._members[first].port)
            self._members[self._source].program.say(chain.give_order("127.0.0.1", port))

    # --- state and progress

    def _targets(self) -> list[str]:
        members = self._members.items()
        return [name for name, member in members if member.alive and name != self._source]

    def _errors(self) -> list[NodeError]:
        return [self._error(name) for name, member in self._members.items() if member.failed]

    def _all_complete(self) -> bool:
        targets = self._targets()
        names = [self._source, *targets] if targets or len(self._specs) == 1 else []
        return bool(names) and all(self._members[name].root for name in names)

    def _compare_digests(self) -> None:
        """Raise VlaunchError when copies differ, although each chunk was verified."""
        root = self._members[self._source].root
        if different := [name for name in self._targets() if self._members[name].root != root]:
            raise VlaunchError(f"the copies on {fold(different)} differ from the source's")

    def _check_stall(self, now: float) -> None:
        if now - self._moved_at < STALL_TIMEOUT:
            return
        progress = [
            f"{name}: {format_size(self._members[name].stored)} of {format_size(self._total)}, from"
            f" {self._members[name].source or 'no node'}"
            for name in self._targets()
            if not self._members[name].root
        ]
        raise VlaunchError(
            f"no data transferred for {STALL_TIMEOUT:.0f}s",
            evidence=progress,
            hint="check the copy's port: `vlaunch check --only ports-reachable`; then run the"
            " same command again: it continues the copy",
        )

    def _error(self, name: str) -> NodeError:
        member = self._members[name]
        hint = "run the same command again: it continues the copy"
        if member.disk_full:
            hint = "find what to remove: `vlaunch model list`, `vlaunch image list`"
        return NodeError(name, "cannot take part in the copy", evidence=member.failed, hint=hint)

    def _report_progress(self) -> Iterator[Event]:
        """Report the progress of each node, and of the slowest one."""
        seconds = max(0.001, self._clock() - self._began)
        for position, name in enumerate(self._targets(), 1):
            member = self._members[name]
            if member.root:
                continue
            rate = (member.stored - member.stored_at_start) / seconds
            data = {
                "bytes": member.stored,
                "total": self._total,
                "rate": round(rate),
                "from": member.source,
                "position": position,
            }
            source = f" from {member.source}" if member.source else ""
            share = _format_share(member.stored, self._total)
            text = f"{share}, {format_size(round(rate))}/s{source}"
            yield Event(kind="step", stage=_STAGE, node=name, text=text, state="running", data=data)
        slowest = min(self._targets(), key=lambda name: self._members[name].stored, default="")
        if slowest:
            member = self._members[slowest]
            rate = (member.stored - member.stored_at_start) / seconds
            duration = (self._total - member.stored) / rate if rate else 0.0
            remaining = f", {_format_duration(duration)} left" if rate else ""
            text = f"{_format_share(member.stored, self._total)} on {slowest}, the last{remaining}"
            data = {"bytes": member.stored, "total": self._total}
            yield Event(kind="wait", stage=_STAGE, text=text, data=data)


def _format_share(have: int, total: int) -> str:
    return f"{format_size(have)} of {format_size(total)}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 120 else f"{seconds / 60:.0f} min"
