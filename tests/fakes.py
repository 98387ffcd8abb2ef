"""The one fake, at the one boundary: a Transport that answers from a function and remembers what it
was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from launcher.core.domain import Answer
from launcher.core.transport import Command


class FakeTransport:
    """Answers each command with `handler(command)`; `commands` records them in the order they were
    sent.

    A handler that returns None did not expect the command: that fails the test, with the argv in
    the message.
    """

    def __init__(self, handler: Callable[[Command], Answer | None]) -> None:
        self.handler = handler
        self.commands: list[Command] = []

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Answer every command, in order."""
        for command in commands:
            self.commands.append(command)
            answer = self.handler(command)
            if answer is None:
                raise AssertionError(f"unexpected command for {command.node}: {command.argv}")
            if answer.node != command.node:
                raise AssertionError(
                    f"the handler answered for {answer.node}, asked was {command.node}"
                )
            yield answer
