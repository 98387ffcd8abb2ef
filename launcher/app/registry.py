"""Extensions of commands, and kinds of jobs beside servers, which packages register.

`EXTENSIONS` maps names of commands to decorators that add options of optional packages,
`WORKLOADS` kinds of jobs, which `status`, `stop` and `down` list and stop, to modules (`Workload`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from launcher.core.registry import entries, load

if TYPE_CHECKING:
    from launcher.app.command import CommandContext
    from launcher.app.session import Session
    from launcher.app.terminal import Line
    from launcher.tools.site.snapshot import ClusterSnapshot

F = TypeVar("F", bound=Callable[..., Any])


def extend_options(command: str) -> Callable[[F], F]:
    """Add the options that optional packages register for a command."""

    def add(function: F) -> F:
        for package, name, target in entries("EXTENSIONS"):
            if name == command:
                function = load(package, target)(function)
        return function

    return add


class Job(Protocol):
    """One job."""

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""


class Workload(Protocol):
    """One kind of job."""

    def running(self, session: Session, snapshot: ClusterSnapshot) -> tuple[Job, ...]:
        """Query the head for the jobs that run."""

    def lines(self, jobs: Sequence[Any]) -> list[Line]:
        """Return one line for each job."""

    def stop(
        self, call: CommandContext, session: Session, names: Sequence[str], grace: float
    ) -> None:
        """Stop the jobs of these names, which no server has; `grace` is in seconds. Raises
        RequestError for a name that no job has.
        """

    def report_remains(self, session: Session) -> None:
        """Report what jobs leave on the nodes when the cluster is down."""


def workloads() -> list[Workload]:
    """Import and return the registered workloads."""
    return [load(package, module) for package, _, module in entries("WORKLOADS")]
