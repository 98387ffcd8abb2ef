"""Lock of a cluster: a kernel lock on a file of the head, held by a process there that ends with
its launcher's SSH connection.

A launcher that exits or disconnects thus releases its lock; the file only names the owner. The lock
outlives its owner only while sshd has not noticed a dead connection: see `break_argv`. A command
holds it from before the first query, since plans depend on the answers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from launcher.app.session import Session
from launcher.core import decode, shell
from launcher.core.domain import Answer, Argv, Node
from launcher.core.errors import LockError, NodeError, UnreadableAnswer, VlaunchError
from launcher.core.transport import Command, RecordingTransport

if TYPE_CHECKING:
    from launcher.ssh.background import BackgroundCommand
    from launcher.ssh.fleet import Line

FILE = "locks"  # {state_dir}/locks/{cluster}
# exit codes of `hold_argv`: 75 if the lock is busy, 69 if the head has neither `flock` nor Python
BUSY, MISSING = 75, 69
# characters; in JSON each may take twelve, and the line of an owner is read up to 4000
_MAX_COMMAND = 250
_ANSWER_SECONDS = 30.0  # for the head's answer, beyond the waiting time
_COMPLAINT_LINES = 6  # last lines of the head's standard error

_Text = Annotated[str, decode.truncate(1000), decode.Default("")]
_Process = Annotated[int, decode.in_range(2, 1 << 31), decode.Default(0)]
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Owner of a lock, by its own account.

    `since` is the head's clock; `pid` the lock's process there; `launcher` identifies the
    launcher's process on its own machine; `raw` is the line in the file.
    """

    who: _Text = ""
    host: _Text = ""
    since: _Text = ""
    command: _Text = ""
    pid: _Process = 0
    launcher: _Text = ""
    raw: str = ""

    @property
    def description(self) -> str:
        """The user and the command, in one phrase."""
        if not self.who:
            return "an unknown operator"
        return f"{self.who}@{self.host} since {self.since} (`{self.command}`)"


def hold_argv(state_dir: str, cluster: str, wait: float = 0.0) -> Argv:
    """Return the argv that takes the lock and holds it until standard input ends.

    It prints `held OWNER` while another process has it, then `locked`.
    """
    return ("sh", "-c", shell.program_text("lock_hold"), "lock", state_dir, cluster, f"{wait:.0f}")


def status_argv(state_dir: str, cluster: str) -> Argv:
    """Return the argv that prints `free`, or `held OWNER`."""
    return ("sh", "-c", shell.program_text("lock_look"), "lock-look", state_dir, cluster)


def break_argv(state_dir: str, cluster: str, owner: Owner) -> Argv:
    """Return the argv of `break_command`."""
    arguments = (state_dir, cluster, str(owner.pid), owner.raw)
    return ("sh", "-c", shell.program_text("lock_break"), "lock-break", *arguments)


def break_command(session: Session, owner: Owner, preamble: Argv = ()) -> Command:
    """Return the command that ends the process of `owner`, if it still holds the lock.

    It prints `freed`; `free` if the lock is free, `changed` if its owner has changed, `stranger` if
    the process with the recorded PID does not have the lock's file open.
    """
    head, operator = session.inventory.head, session.operator
    return Command(
        node=head.name,
        argv=break_argv(head.state_dir or "", session.inventory.cluster, owner),
        timeout=40,
        stdin=partial(encode_owner, operator.user, operator.host, operator.command),
        preamble=preamble,
    )


def encode_owner(user: str, host: str, command: str, launcher: str = "") -> bytes:
    """Return the owner as JSON without its opening brace: the head's program puts `pid` first."""
    text = json.dumps(
        {"who": user, "host": host, "command": command[:_MAX_COMMAND], "launcher": launcher}
    )
    return (text[1:] + "\n").encode()


def parse_owner(text: str) -> Owner:
    """Parse the line of an owner; any user may have written it, so only its form is trusted."""
    try:
        parsed = decode.parse_json(Owner, text, "the lock's owner")
    except UnreadableAnswer:
        parsed = Owner()
    return replace(parsed, raw=text)


def parse_breaker(text: str) -> Owner:
    """Parse the line of the user who broke a lock, as written by `encode_owner`."""
    return parse_owner("{" + text)


def parse_status(answer: Answer) -> Owner | None:
    """Parse the answer of `status_argv`: the owner, or None if the lock is free.

    Raises:
        UnreadableAnswer: the head's answer is invalid.
    """
    state, _, rest = answer.out.strip().partition(" ")
    if answer.ok and state == "free":
        return None
    if answer.ok and state == "held":
        return parse_owner(rest)
    raise UnreadableAnswer(f"{answer.node}: cannot read the lock's owner", evidence=answer.tail)


def identify_process() -> str:
    """Return an id of this process, unique across machines; empty if the system has none."""
    machine = _machine_id()
    return f"{machine}:{os.getpid()}:{_start_time(os.getpid())}" if machine else ""


def process_ended(text: str) -> bool:
    """True if `text`, from `identify_process`, is about this machine since its last boot, and that
    process has ended.

    Processes of other machines and containers are unknown.
    """
    machine, _, rest = text.rpartition(":")[0].rpartition(":")
    started = text.rpartition(":")[2]
    if not machine or machine != _machine_id() or not rest.isascii() or not rest.isdigit():
        return False
    return _start_time(int(rest)) != started


def _machine_id() -> str:
    """Return the boot id and PID namespace: a container sees other processes than its host.

    Empty if other users' processes are hidden (`hidepid` of /proc): a living one would pass for
    dead.
    """
    try:
        (_PROC / "1/stat").read_bytes()
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{(_PROC / 'self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""


def _start_time(pid: int) -> str:
    """Return a process's start, in ticks since boot (proc(5)); empty if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return rest[19] if len(rest) > 19 and rest[0] not in ("Z", "X") else ""


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
    with ExitStack() as channels:
        try:
            channel = _acquire(session, head, wait, channels)
            holder = replace(session, transport=LockedTransport(session.transport, head, channel))
        except NodeError as error:
            if required or isinstance(error, LockError):
                raise
            _warn_unlocked(session, (error.evidence.strip() or error.message).splitlines()[-1])
            holder = session
        yield holder


class LockedTransport:
    """Transport that sends nothing any more once the lock is lost."""

    def __init__(self, inner: RecordingTransport, head: Node, channel: BackgroundCommand) -> None:
        self._inner, self._head, self._channel = inner, head, channel
        self._breaker: Owner | None = None

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands while the lock is ours; see `Transport.run`. Raises LockError."""
        while (message := self._channel.next(0)) is not None and not isinstance(message, Answer):
            state, _, rest = message.text.partition(" ")
            if state == "broken" and not message.error:
                self._breaker = parse_breaker(rest)
        if self._breaker is not None or self._channel.over is not None:
            raise _lost_error(self._head, self._breaker, self._channel.over)
        return self._inner.run(commands)

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Record the changes; see `Recording.record`."""
        return self._inner.record(verb, changes)


def _acquire(session: Session, head: Node, wait: float, channels: ExitStack) -> BackgroundCommand:
    """Return the channel that holds the lock. Take over that of a dead launcher of this machine,
    before the head notices its end.
    """
    channel = _request_lock(session, head, wait)
    channels.callback(channel.end)
    if (dead_owner := _await_lock(session, head, channel, wait)) is not None:
        channel.end()
        text = f"taking over the lock of a dead process: {dead_owner.description}"
        session.note("lock", text, node=head.name)
        list(session.transport.run([break_command(session, dead_owner)]))
        channel = _request_lock(session, head, wait)
        channels.callback(channel.end)
        _await_lock(session, head, channel, wait, again=True)
    return channel


def _request_lock(session: Session, head: Node, wait: float) -> BackgroundCommand:
    operator = session.operator
    stdin = partial(
        encode_owner, operator.user, operator.host, operator.command, identify_process()
    )
    argv = hold_argv(head.state_dir or "", session.inventory.cluster, wait)
    return session.fleet.hold(
        Command(node=head.name, argv=argv, timeout=math.inf, stdin=stdin, hold_stdin=True)
    )


def _await_lock(
    session: Session, head: Node, channel: BackgroundCommand, wait: float, *, again: bool = False
) -> Owner | None:
    """Return None once the lock is ours, or its owner if dead; with `again`, wait on."""
    began = time.monotonic()
    owner, complaints = Owner(), list[str]()
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
            owner = parse_owner(rest)
            if not again and owner.pid and process_ended(owner.launcher):
                return owner
            if wait:
                text = f"the cluster's lock, held by {owner.description}"
                session.wait("lock", text, deadline=wait)
        elif state == "locked":
            if owner.raw:
                seconds = time.monotonic() - began
                session.step("lock", "acquired the cluster's lock", node=head.name, seconds=seconds)
            return None


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


def _refusal_error(
    session: Session, head: Node, answer: Answer, owner: Owner, wait: float
) -> VlaunchError:
    if answer.code == BUSY:
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
    hint = f"check its permissions: `ls -ld {head.state_dir or '~/.vlaunch'}/{FILE}`"
    if answer.code == MISSING:
        hint = f"install it on {head.name}: `apt-get install util-linux`"
    elif answer.code == 255:
        hint = f"run the same command again: the connection to {head.name} was lost"
    return NodeError(head.name, "cannot take the cluster's lock", evidence=answer.tail, hint=hint)


def _lost_error(head: Node, breaker: Owner | None, answer: Answer | None) -> LockError:
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
