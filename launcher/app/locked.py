"""The cluster's lock, held from before the first query, since plans depend on the answers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.app import lock
from launcher.app.session import Session
from launcher.core.domain import Answer, Argv, Node
from launcher.core.errors import LockError, NodeError, VlaunchError
from launcher.core.transport import Command, RecordingTransport

if TYPE_CHECKING:
    from launcher.ssh.background import BackgroundCommand
    from launcher.ssh.fleet import Line

_ANSWER_SECONDS = 30.0  # for the head's answer, beyond the waiting time
_COMPLAINT_LINES = 6  # last lines of the head's standard error


@contextmanager
def locked(
    session: Session, *, wait: float = 0.0, skip: bool = False, required: bool = True
) -> Iterator[Session]:
    """Hold the cluster's lock inside the block; its session sends no more commands once the lock is
    lost. Without a connection to the head, warn and continue without the lock.

    Args:
        session: the session without the lock.
        wait: seconds to wait for another operator; with 0 the command fails at once.
        skip: take no lock, for a dry run or if nothing is to be changed.
        required: if false, only warn if the head cannot lock: a clean-up goes as far as it can.

    Raises:
        LockError: another operator holds the lock, or, inside the block, it was lost.
        NodeError: the head cannot lock, and `required` is true.
    """
    head = session.inventory.head
    if skip:
        yield session
        return
    if head.name in session.missing:
        _warn_unlocked(session, f"cannot connect to {head.name}")
        yield session
        return
    channel = _request_lock(session, head, wait)
    reason = ""
    try:
        try:
            if (dead_owner := _await_lock(session, head, channel, wait)) is not None:
                channel.end()
                _break_dead_lock(session, head, dead_owner)
                channel = _request_lock(session, head, wait)
                _await_lock(session, head, channel, wait, again=True)
        except LockError:
            raise
        except NodeError as error:
            if required:
                raise
            reason = (error.evidence.strip() or error.message).splitlines()[-1]
        if reason:
            _warn_unlocked(session, reason)
            yield session
        else:
            yield replace(session, transport=LockedTransport(session.transport, head, channel))
    finally:
        channel.end()


class LockedTransport:
    """Transport that sends nothing any more once the lock is lost."""

    def __init__(self, inner: RecordingTransport, head: Node, channel: BackgroundCommand) -> None:
        self._inner, self._head, self._channel = inner, head, channel
        self._breaker: lock.Owner | None = None

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands while the lock is ours; see `Transport.run`. Raises LockError."""
        while (message := self._channel.next(0)) is not None and not isinstance(message, Answer):
            state, _, rest = message.text.partition(" ")
            if state == "broken" and not message.error:
                self._breaker = lock.parse_breaker(rest)
        if self._breaker is not None or self._channel.over is not None:
            raise _lost_error(self._head, self._breaker, self._channel.over)
        return self._inner.run(commands)

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Record the changes; see `Recording.record`."""
        return self._inner.record(verb, changes)


def _request_lock(session: Session, head: Node, wait: float) -> BackgroundCommand:
    operator = session.operator
    stdin = partial(
        lock.encode_owner, operator.user, operator.host, operator.command, lock.identify_process()
    )
    argv = lock.hold_argv(head.state_dir or "", session.inventory.cluster, wait)
    return session.fleet.hold(
        Command(node=head.name, argv=argv, timeout=math.inf, stdin=stdin, hold_stdin=True)
    )


def _break_dead_lock(session: Session, head: Node, owner: lock.Owner) -> None:
    """Take over the lock of a dead launcher of this machine, before the head notices its end."""
    text = f"taking over the lock of a dead process: {owner.description}"
    session.note("lock", text, node=head.name)
    operator = session.operator
    argv = lock.break_argv(head.state_dir or "", session.inventory.cluster, owner)
    stdin = partial(lock.encode_owner, operator.user, operator.host, operator.command)
    list(session.transport.run([Command(node=head.name, argv=argv, timeout=40, stdin=stdin)]))


def _await_lock(
    session: Session, head: Node, channel: BackgroundCommand, wait: float, *, again: bool = False
) -> lock.Owner | None:
    """Return None once the lock is ours, or its owner if dead; with `again`, wait on."""
    began = time.monotonic()
    owner, complaints = lock.Owner(), list[str]()
    while True:
        message = _next_message(head, channel, wait, began + wait + _ANSWER_SECONDS)
        if isinstance(message, Answer):
            answer = replace(message, err="\n".join((*complaints[-_COMPLAINT_LINES:], message.err)))
            raise _refusal_error(session, head, answer, owner, wait)
        state, _, rest = message.text.partition(" ")
        if message.error:
            complaints.append(message.text)
            continue
        if state == "held":
            owner = lock.parse_owner(rest)
            if not again and _is_dead(owner):
                return owner
            if wait:
                text = f"the cluster's lock, held by {owner.description}"
                session.wait("lock", text, deadline=wait)
        elif state == "locked":
            if owner.raw:
                _confirm_lock(session, head, time.monotonic() - began)
            return None


def _is_dead(owner: lock.Owner) -> bool:
    """True for a launcher of this machine that no longer runs."""
    return bool(owner.pid) and lock.process_ended(owner.launcher)


def _next_message(
    head: Node, channel: BackgroundCommand, wait: float, until: float
) -> Line | Answer:
    """Return the head's next message about the lock; raise NodeError after `until`."""
    remaining = until - time.monotonic()
    message: Line | Answer | None = channel.next(remaining) if remaining > 0 else None
    if message is None:
        raise NodeError(
            head.name,
            f"did not respond to the lock request within {wait + _ANSWER_SECONDS:.0f}s",
        )
    return message


def _confirm_lock(session: Session, head: Node, seconds: float) -> None:
    session.step("lock", "acquired the cluster's lock", node=head.name, seconds=seconds)


def _refusal_error(
    session: Session, head: Node, answer: Answer, owner: lock.Owner, wait: float
) -> VlaunchError:
    if answer.code == lock.BUSY:
        waited = f" (waited {wait:.0f}s)" if wait else ""
        return LockError(
            head.name,
            f"cluster {session.inventory.cluster} is locked by another operator:"
            f" {owner.description}{waited}",
            hint=(
                f"wait for it: `--lock-wait {max(600, round(2 * wait))}`\n"
                "if that process is dead: `vlaunch lock break`"
            ),
        )
    hint = f"check its permissions: `ls -ld {head.state_dir or '~/.vlaunch'}/{lock.FILE}`"
    if answer.code == lock.MISSING:
        hint = f"install it on {head.name}: `apt-get install util-linux`"
    elif answer.code == 255:
        hint = f"run the same command again: the connection to {head.name} was lost"
    return NodeError(head.name, "cannot take the cluster's lock", evidence=answer.tail, hint=hint)


def _lost_error(head: Node, breaker: lock.Owner | None, answer: Answer | None) -> LockError:
    text, evidence = "lost the cluster's lock with the connection", answer.tail if answer else ""
    if breaker is not None:
        name = f"{breaker.who}@{breaker.host}" if breaker.who else "an unknown operator"
        text, evidence = f"{name} broke the cluster's lock (`vlaunch lock break`)", ""
    return LockError(
        head.name,
        f"{text}; stopped before the next step",
        evidence=evidence,
        hint="run `vlaunch status`, then the same command, which continues where it stopped",
    )


def _warn_unlocked(session: Session, reason: str) -> None:
    text = f"continuing without the lock ({reason}): other operators are not blocked"
    session.warn("lock", text)
