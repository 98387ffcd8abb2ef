"""Members of a copy: their programs, their connections and their progress."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.core.domain import Answer, Argv
from launcher.core.transport import Command
from launcher.distribute import chain


class RunningProgram(Protocol):
    """A program that runs on a node (`launcher.ssh.background`)."""

    @property
    def over(self) -> Answer | None: ...

    def next(self, timeout: float) -> Any: ...

    def say(self, line: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    """The command that starts a member's program, and the host at which others reach it.

    `pushes` is true for a member that cannot be reached: it connects to the node after it.
    """

    name: str
    command: Command
    host: str = ""
    pushes: bool = False


@dataclass(kw_only=True)
class MemberProgress:
    """Progress of a node. `failed` is the reason why it left the copy; `shared` names a node with
    the same file system. `cpu` is the CPU time of its program in seconds, `start_cpu` its CPU time
    before the copy.
    """

    program: RunningProgram
    port: int = 0
    stored: int = 0
    stored_at_start: int = 0
    received: int = 0
    sent: int = 0
    source: str = ""
    root: str = ""
    failed: str = ""
    disk_full: bool = False
    shared: str = ""
    listening: bool = False
    finished: bool = False
    last_message_at: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    start_cpu: float = 0.0
    error_lines: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """True while the node takes part."""
        return not self.failed and not self.shared


@dataclass(frozen=True, kw_only=True)
class CopyResult:
    """Result of a copy: its seconds, and each node's progress or reason of failure."""

    seconds: float
    members: Mapping[str, MemberProgress]

    @property
    def failed(self) -> dict[str, str]:
        """Nodes without a complete copy, each with the reason."""
        return {name: member.failed for name, member in self.members.items() if member.failed}


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Functions that start and reach programs; `tunnel` returns the local port of a tunnel to a
    node's port. `check` raises when the copy must stop.
    """

    start: Callable[[Command], RunningProgram]
    tunnel: Callable[[str, int], int]
    check: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


def program_command(
    node: str,
    runtime: chain.ProgramRuntime,
    request: Mapping[str, Any],
    *,
    timeout: float,
    preamble: Argv = (),
    interactive: bool = False,
) -> Command:
    """Return the command that starts a node's program; if `interactive`, it receives orders while
    it runs, in parallel with the other nodes' programs.
    """
    return Command(
        node=node,
        argv=runtime.argv,
        timeout=timeout,
        stdin=lambda: chain.program_input(request),
        shown_stdin="printf PROGRAM",
        hold_stdin=True,
        simultaneous=interactive,
        interactive=interactive,
        preamble=preamble,
    )
