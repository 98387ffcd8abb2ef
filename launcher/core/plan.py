"""Plans: stages of steps, each closed by gates. Plans are values, without behaviour."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.core.check import Finding
from launcher.core.domain import Answer
from launcher.core.transport import Answers, Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command that changes one node; `title` is shown to users, in the present tense."""

    command: Command
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A condition that must hold before the next stage.

    `queries` are sent to the nodes, `judge` evaluates the answers of each node (in that order). A
    `wait` finding repeats the queries every `every` seconds until `deadline`; a pass must last
    `hold` seconds. `evidence` commands run only when the gate fails, and `explain` adds what their
    answers (by node) say to the findings. `progress_text` is shown while a query runs. With
    `rejects_request`, a failure means an invalid request.
    """

    id: str
    what: str
    judge: Callable[[Answers], Sequence[Finding]]
    queries: tuple[Command, ...] = ()
    deadline: float = 0.0
    every: float = 1.0
    hold: float = 0.0
    evidence: tuple[Command, ...] = ()
    explain: Callable[[Sequence[Finding], Mapping[str, Answer]], Sequence[Finding]] | None = None
    progress_text: str = ""
    rejects_request: bool = False


def precomputed_gate(id: str, what: str, findings: Callable[[], Iterable[Finding]]) -> Gate:
    """Return a gate without queries that judges earlier observations."""

    def judge(_: Answers) -> Sequence[Finding]:
        return list(findings())

    return Gate(id=id, what=what, judge=judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps that run on all nodes at once (in order on each node), then gates, one by one."""

    id: str
    title: str
    steps: tuple[Step, ...] = ()
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a command will do, in order; stages without steps and gates are dropped.

    `notes` describe the differences from the observed state and warn the user. With `keep_going`, a
    failed step or gate does not stop the stages after it: cleanup does as much as it can.
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
        """All steps, in start order."""
        return tuple(step for stage in self.stages for step in stage.steps)


def split_waves(steps: Sequence[Step]) -> list[list[Step]]:
    """Split steps into waves of at most one step per node, in each node's order."""
    waves: list[list[Step]] = []
    depths: dict[str, int] = {}
    for step in steps:
        depth = depths.get(step.command.node, 0)
        if depth == len(waves):
            waves.append([])
        waves[depth].append(step)
        depths[step.command.node] = depth + 1
    return waves
