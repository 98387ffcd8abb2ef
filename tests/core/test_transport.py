"""What stands beside the one boundary."""

from __future__ import annotations

from launcher.core.domain import Answer
from launcher.core.transport import Command, run_by_node
from tests.fakes import FakeTransport


def test_answers_by_node_are_in_the_order_asked() -> None:
    """Who asks a node twice tells the answers apart by that."""
    transport = FakeTransport(lambda each: Answer(node=each.node, code=0, out=each.argv[0]))
    words = (("n1", "a"), ("n2", "b"), ("n1", "c"))
    asked = [Command(node=node, argv=(word,)) for node, word in words]

    found = run_by_node(transport, asked)

    assert {node: [each.out for each in said] for node, said in found.items()} == {
        "n1": ["a", "c"],
        "n2": ["b"],
    }
