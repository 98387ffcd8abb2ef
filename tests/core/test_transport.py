"""Helpers of the transport protocol."""

from __future__ import annotations

from launcher.core.domain import Answer
from launcher.core.transport import Command, run_by_node
from tests.fakes import FakeTransport


def test_answers_by_node_are_in_command_order() -> None:
    """Callers identify several answers of a node by position."""
    transport = FakeTransport(
        lambda command: Answer(node=command.node, code=0, out=command.argv[0])
    )
    pairs = (("n1", "a"), ("n2", "b"), ("n1", "c"))
    commands = [Command(node=node, argv=(argument,)) for node, argument in pairs]

    answers = run_by_node(transport, commands)

    assert {
        node: [answer.out for answer in node_answers] for node, node_answers in answers.items()
    } == {
        "n1": ["a", "c"],
        "n2": ["b"],
    }
