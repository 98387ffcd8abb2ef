"""A transport that answers from a function and records its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from launcher.core.domain import Answer
from launcher.core.transport import Command


class FakeTransport:
    """Answers commands with `handler(command)`; `commands` records them in order. A handler returns
    None for an unexpected command, which fails the test.
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
