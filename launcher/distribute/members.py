"""Members of a copy: their programs, their connections and their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.core.domain import Answer, Argv
from launcher.core.transport import Command
from launcher.distribute import chain


class Held(Protocol):
    """A program that runs on a node; see `launcher.ssh.held.Held`."""

    @property
    def over(self) -> Answer | None: ...

    def next(self, timeout: float) -> Any: ...

    def say(self, line: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """One node's part: the command that starts its program, and where others reach it.

    `gives` is for who cannot be reached: it connects to the node after it.
    """

    name: str
    command: Command
    host: str = ""
    gives: bool = False


@dataclass(kw_only=True)
class Member:
    """Progress of a node. `failed` is the reason why it left the copy; `shared` names the node with
    the same file system; `cpu` is the CPU time of its program in seconds, `start` that until the
    copy began.
    """

    held: Held
    port: int = 0
    have: int = 0
    began: int = 0
    received: int = 0
    sent: int = 0
    source: str = ""
    root: str = ""
    failed: str = ""
    full: bool = False
    shared: str = ""
    listening: bool = False
    finished: bool = False
    heard: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    start: float = 0.0
    complaint: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """True while it takes part."""
        return not self.failed and not self.shared


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Result of a copy: its seconds, and each node's progress or reason of failure."""

    seconds: float
    members: Mapping[str, Member]

    @property
    def failed(self) -> dict[str, str]:
        """The nodes that do not have it, each with the reason."""
        return {name: each.failed for name, each in self.members.items() if each.failed}


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Functions that start and reach programs; `tunnel` returns a local port that leads to a port
    of a node. `check` raises when the copy must not go on.
    """

    hold: Callable[[Command], Held]
    tunnel: Callable[[str, int], int]
    check: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


def command(
    node: str,
    where: chain.Where,
    request: Mapping[str, Any],
    *,
    timeout: float,
    before: Argv = (),
    talk: bool = False,
) -> Command:
    """Return the command that starts a node's program; with `talk` it is told more while it runs,
    at the same time as all others' programs.
    """
    return Command(
        node=node,
        argv=where.argv,
        timeout=timeout,
        stdin=lambda: chain.program(request),
        shown_stdin="printf PROGRAM",
        hold_stdin=True,
        together=talk,
        talk=talk,
        before=before,
    )
