"""Plans as values."""

from __future__ import annotations

from launcher.core.plan import Plan, Stage, Step, split_waves
from launcher.core.transport import Command


def step(name: str) -> Step:
    return Step(title=name, command=Command(node=name[0], argv=(name,)))


def test_a_wave_has_at_most_a_step_per_node_in_order() -> None:
    """No node runs two commands at once, and fast nodes do not wait for slow ones."""
    waves = split_waves([step("a1"), step("a2"), step("b1"), step("c1"), step("a3"), step("c2")])

    assert [[item.title for item in wave] for wave in waves] == [
        ["a1", "b1", "c1"],
        ["a2", "c2"],
        ["a3"],
    ]
    assert split_waves([]) == []


def test_the_steps_of_a_plan_are_those_of_its_stages_in_order() -> None:
    """Basis of "nothing was changed"."""
    plan = Plan(
        verb="up",
        stages=(
            Stage(id="x", title="X", steps=(step("a1"),)),
            Stage(id="y", title="Y"),
            Stage(id="z", title="Z", steps=(step("b1"),)),
        ),
    )

    assert [item.title for item in plan.steps] == ["a1", "b1"]
