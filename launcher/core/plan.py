"""The shape of a plan: stages of steps, each closed by gates.

A plan is a value; nothing in here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.core.check import Finding
from launcher.core.transport import Answers, Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command that changes one node. `title` is what a person reads, in the present tense."""

    command: Command
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What must hold before the next stage.

    `ask` is sent, `judge` reads every node's answers (in the order asked). A `wait` finding asks
    again each `every` seconds until `deadline`; a pass must last `hold` seconds. `evidence` is
    asked, per node, only when the gate fails. `doing` is what people read while an answer takes its
    time.
    """

    id: str
    what: str
    judge: Callable[[Answers], Sequence[Finding]]
    ask: tuple[Command, ...] = ()
    deadline: float = 0.0
    every: float = 1.0
    hold: float = 0.0
    evidence: tuple[Command, ...] = ()
    doing: str = ""


def observed(id: str, what: str, findings: Callable[[], Iterable[Finding]]) -> Gate:
    """Return a gate that asks nothing: it judges what was seen before the plan was made."""

    def judge(_: Answers) -> Sequence[Finding]:
        return list(findings())

    return Gate(id=id, what=what, judge=judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps that run on all nodes at once (a node's own in order), then gates, one after
    another.
    """

    id: str
    title: str
    steps: tuple[Step, ...] = ()
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be done, in order; stages without steps and gates are left out.

    `notes` say in words what differs from what was observed, and what a person should know first.

    With `keep_going` a step or gate that fails does not spare what comes after it: cleaning up goes
    as far as it can.
    """

    verb: str
    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    keep_going: bool = False

    def __post_init__(self) -> None:
        stages = tuple(stage for stage in self.stages if stage.steps or stage.gates)
        object.__setattr__(self, "stages", stages)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in the order in which they start."""
        return tuple(step for stage in self.stages for step in stage.steps)


def in_waves(steps: Sequence[Step]) -> list[list[Step]]:
    """Split steps so that each wave holds at most one step a node, each node's own order kept."""
    waves: list[list[Step]] = []
    depths: dict[str, int] = {}
    for step in steps:
        depth = depths.get(step.command.node, 0)
        if depth == len(waves):
            waves.append([])
        waves[depth].append(step)
        depths[step.command.node] = depth + 1
    return waves
