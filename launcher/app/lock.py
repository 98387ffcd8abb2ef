"""Lock of a cluster: a kernel lock on a file of the head, held by a process there that ends with
its launcher's SSH connection.

A launcher that exits or disconnects thus releases its lock; the file only names the owner. The lock
outlives its owner only while sshd has not noticed a dead connection: see `break_argv`.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from launcher.core import decode, shell
from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer

FILE = "locks"  # {state_dir}/locks/{cluster}
# exit codes of `hold_argv`: 75 if the lock is busy, 69 if the head has neither `flock` nor Python
BUSY, MISSING = 75, 69
# characters; in JSON each may take twelve, and the line of an owner is read up to 4000
_MAX_COMMAND = 250

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
    """Return the argv that ends the process of `owner`, if it still holds the lock.

    It prints `freed`; `free` if the lock is free, `changed` if its owner has changed, `stranger` if
    the process with the recorded PID does not have the lock's file open.
    """
    arguments = (state_dir, cluster, str(owner.pid), owner.raw)
    return ("sh", "-c", shell.program_text("lock_break"), "lock-break", *arguments)


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
