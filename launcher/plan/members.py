"""Who takes part in a copy, how each is reached, and how it is doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.model import Answer, Argv
from launcher.tools import chain
from launcher.transport import Command


class Held(Protocol):
    """A program that runs on a node; see `launcher.remote.held.Held`."""

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
    """How a node is doing. `failed` says why it takes part no more; `shared` names the node whose
    file system it sees; `cpu` is the seconds of processors that its program took in all, `start`
    those until the copy began.
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
    """What came of a copy: seconds, and by node what it received, and why it failed."""

    seconds: float
    members: Mapping[str, Member]

    @property
    def failed(self) -> dict[str, str]:
        """The nodes that do not have it, each with the reason."""
        return {name: each.failed for name, each in self.members.items() if each.failed}


@dataclass(frozen=True, kw_only=True)
class Connections:
    """How programs are started and reached; `tunnel` returns a local port that leads to a port of a
    node. `check` raises when the copy must not go on.
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
