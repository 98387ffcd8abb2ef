"""The trails of all nodes as one."""

from __future__ import annotations

from launcher.state import audit as plan
from tests.tools.conftest import ENTRY


def test_what_several_nodes_say_is_said_once() -> None:
    """In the order of time; a file that nodes share is read by each of them, and counts once."""
    from dataclasses import replace

    other = replace(ENTRY, node="gpu02")
    late = replace(ENTRY, at="2026-11-21T22:00:00Z", node="gpu02", changes=("removing",))
    found = plan.merge([late, ENTRY, other, ENTRY, late])

    assert [(each.nodes, each.entry.changes[0]) for each in found] == [
        (("gpu01", "gpu02"), "pulling x:1"),
        (("gpu02",), "removing"),
    ]
    assert found[0].as_json()["nodes"] == ["gpu01", "gpu02"]
