"""The one boundary between deciding and doing: something that runs an argv on nodes.

Fakes stand here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from launcher.core.domain import Answer, Argv

Answers = Mapping[str, Sequence[Answer]]  # by node, each node's in the order asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One argv for one node, with its deadline in seconds and, optionally, what it reads on
    standard input.

    `stdin` is called when the bytes are needed, so that large or secret content is not held by
    plans; `hold_stdin` keeps standard input open afterwards, so that its end tells a program in a
    container that nobody waits for it any more. With `talk`, lines that are said to it later reach
    it, too (`Held.say`). `together` means that the command waits for those
    of other nodes: all of them run at once, whatever the cap.

    `shown_stdin` is how a script would produce the same bytes (shell words for the left side of a
    pipe).

    `before` are words that are sent in front of `argv` and end by running it: what must be done
    first on the node costs no round trip of its own. People and scripts are shown `argv` alone.
    """

    node: str
    argv: Argv
    timeout: float = 60.0
    stdin: Callable[[], bytes] | None = None
    shown_stdin: str = ""
    hold_stdin: bool = False
    talk: bool = False
    together: bool = False
    before: Argv = ()

    @property
    def words(self) -> Argv:
        """What the node is sent."""
        return (*self.before, *self.argv)


class Transport(Protocol):
    """Runs commands on nodes, many at once, over one connection per node."""

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands concurrently (under a cap) and yield each answer as it comes.

        Commands for the same node run in the order given. A node that fails does not stop the
        others; a lost connection is an `Answer` with code 255. Closing the iterator (or
        KeyboardInterrupt) cancels what is still running, and leaves no process behind on a node.
        """
        ...


def by_node(transport: Transport, commands: Sequence[Command]) -> dict[str, list[Answer]]:
    """Run commands and return the answers by node, each node's in the order asked."""
    answers: dict[str, list[Answer]] = {}
    for answer in transport.run(commands):
        answers.setdefault(answer.node, []).append(answer)
    return answers


@runtime_checkable
class Recording(Transport, Protocol):
    """A transport that has it written down, on the node itself, what will be changed there."""

    def record(self, verb: str, changes: Mapping[str, Sequence[str]]) -> Mapping[str, Argv]:
        """Return, for each node of `changes`, what goes `before` the first command that changes
        it.
        """
        ...
