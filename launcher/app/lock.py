"""The lock of a cluster: a kernel lock on a file of the head, held by a process that lives as long
as its launcher listens.

Whoever dies or disconnects frees it, so that no lock outlives its owner; the file only tells who
holds it. Where the head's sshd still holds a connection that is dead, the holder's process is ended
by `break_`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from launcher.core import decode, shell
from launcher.core.domain import Answer, Argv
from launcher.core.errors import UnreadableAnswer

FILE = "locks"  # {state_dir}/locks/{cluster}
# exit codes: somebody else holds it, and there is neither `flock` nor Python
BUSY, MISSING = 75, 69
# characters; in JSON each may take twelve, and the line of an owner is read up to 4000
_COMMAND = 250

_Text = Annotated[str, decode.truncate(1000), decode.Default("")]
_Process = Annotated[int, decode.in_range(2, 1 << 31), decode.Default(0)]
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a lock, as they said themselves.

    `since` is the head's clock; `pid` the holder there; `launcher` tells the launcher's process
    from all others, in words of its own machine; `raw` is the line that is there.
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
        """Who it is and what they do, in a few words."""
        if not self.who:
            return "somebody who left no name"
        return f"{self.who}@{self.host} since {self.since} (`{self.command}`)"


def hold_argv(state_dir: str, cluster: str, wait: float = 0.0) -> Argv:
    """Take the lock and keep it until standard input ends.

    Prints `held OWNER` while another one has it, then `locked`.
    """
    return ("sh", "-c", shell.program_text("lock_hold"), "lock", state_dir, cluster, f"{wait:.0f}")


def status_argv(state_dir: str, cluster: str) -> Argv:
    """Print `free`, or `held OWNER`."""
    return ("sh", "-c", shell.program_text("lock_look"), "lock-look", state_dir, cluster)


def break_argv(state_dir: str, cluster: str, owner: Owner) -> Argv:
    """End the process of `owner`, if it still is the one that holds the lock.

    Prints `freed`; `free` when nobody holds it, `changed` when somebody else does, `stranger` when
    the process is another one.
    """
    arguments = (state_dir, cluster, str(owner.pid), owner.raw)
    return ("sh", "-c", shell.program_text("lock_break"), "lock-break", *arguments)


def encode_owner(user: str, host: str, command: str, launcher: str = "") -> bytes:
    """Return what `hold` and `break_` read: the owner's line without what only the head knows."""
    text = json.dumps(
        {"who": user, "host": host, "command": command[:_COMMAND], "launcher": launcher}
    )
    return (text[1:] + "\n").encode()


def parse_owner(text: str) -> Owner:
    """Read the line of an owner; whoever could write it is a stranger, so that nothing is believed
    but its form.
    """
    try:
        parsed = decode.parse_json(Owner, text, "the lock's owner")
    except UnreadableAnswer:
        parsed = Owner()
    return replace(parsed, raw=text)


def parse_breaker(text: str) -> Owner:
    """Read the line of who broke a lock, as `said` wrote it."""
    return parse_owner("{" + text)


def parse_status(answer: Answer) -> Owner | None:
    """Read the answer of `look`: the owner, or None when nobody holds the lock.

    Raises:
        UnreadableAnswer: the head could not say.
    """
    state, _, rest = answer.out.strip().partition(" ")
    if answer.ok and state == "free":
        return None
    if answer.ok and state == "held":
        return parse_owner(rest)
    raise UnreadableAnswer(f"{answer.node}: does not say who holds the lock", evidence=answer.tail)


def identify_process() -> str:
    """Return what tells this process from all others; empty where the system does not say
    enough.
    """
    machine = _machine_id()
    return f"{machine}:{os.getpid()}:{_start_time(os.getpid())}" if machine else ""


def process_ended(text: str) -> bool:
    """Return True when `text`, from `identify_process`, is about this machine, since its last
    start, and that process is no more.

    Of other machines, and of other containers of this one, nothing is known.
    """
    machine, _, rest = text.rpartition(":")[0].rpartition(":")
    started = text.rpartition(":")[2]
    if not machine or machine != _machine_id() or not rest.isascii() or not rest.isdigit():
        return False
    return _start_time(int(rest)) != started


def _machine_id() -> str:
    """Return the machine's present run, and which processes are seen: a container sees others than
    its host.

    Where other users' processes are hidden (`hidepid` of /proc) one that lives would pass for a
    dead one: nothing is known.
    """
    try:
        (_PROC / "1/stat").read_bytes()
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{(_PROC / 'self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""


def _start_time(pid: int) -> str:
    """Return when a process began, in ticks since the machine did (proc(5)); empty when there is
    none.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return rest[19] if len(rest) > 19 and rest[0] not in ("Z", "X") else ""
