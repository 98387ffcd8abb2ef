"""The boundary between decisions and effects: running commands on nodes. Tests fake only this."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from launcher.core.domain import Answer, Argv

Answers = Mapping[str, Sequence[Answer]]  # by node, in the order of its commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An argv for one node, with a deadline in seconds and optional standard input.

    `stdin` is called when the bytes are needed, so plans hold no large or secret content;
    `shown_stdin` is the shell command that a script would pipe in instead. `hold_stdin` keeps
    standard input open, so that its end tells a program in a container that vlaunch has gone. With
    `interactive`, lines can be sent later (`Held.say`). `simultaneous` commands all run at once,
    whatever the cap.

    `preamble` is an argv prefix that runs `argv` last; it saves a round trip, and is not shown.
    """

    node: str
    argv: Argv
    timeout: float = 60.0
    stdin: Callable[[], bytes] | None = None
    shown_stdin: str = ""
    hold_stdin: bool = False
    interactive: bool = False
    simultaneous: bool = False
    preamble: Argv = ()

    @property
    def full_argv(self) -> Argv:
        """The argv sent to the node."""
        return (*self.preamble, *self.argv)


class Transport(Protocol):
    """Runs commands on many nodes at once, over one connection per node."""

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands concurrently (up to a cap) and yield the answers as they arrive.

        Commands for the same node run in order. A failing node does not stop the others; a lost
        connection is an `Answer` with code 255. Closing the iterator (or KeyboardInterrupt) cancels
        running commands and leaves no process on a node.
        """
        ...


def run_by_node(transport: Transport, commands: Sequence[Command]) -> dict[str, list[Answer]]:
    """Run commands and return the answers by node, in the order of its commands."""
    answers: dict[str, list[Answer]] = {}
    for answer in transport.run(commands):
        answers.setdefault(answer.node, []).append(answer)
    return answers


@runtime_checkable
class RecordingTransport(Transport, Protocol):
    """A transport that records changes in an audit log on the node."""

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Return the `preamble` for the first changing command of each node in `changes`."""
        ...
