"""Tables in which packages register commands and extensions.

They are plain data in a package's `__init__.py`, so that reading them imports nothing else:
`COMMANDS` maps names to positions in `vlaunch --help`, of which the tens are the section, and help
lines, `EXTENSIONS` names of commands to decorators that add options of optional packages,
`WORKLOADS` kinds of jobs beside servers, which `status`, `stop` and `down` list and stop, to
modules (`Workload`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from launcher.app.command import CommandContext
    from launcher.app.session import Session
    from launcher.app.terminal import Line
    from launcher.tools.snapshot import ClusterSnapshot

F = TypeVar("F", bound=Callable[..., Any])
_LAUNCHER = Path(__file__).parents[1]


@cache
def entries(table: str) -> tuple[tuple[str, str, Any], ...]:
    """Return the entries of the tables of this name, as package, key and value."""
    packages = [
        importlib.import_module(f"launcher.{file.parent.name}")
        for file in sorted(_LAUNCHER.glob("*/__init__.py"))
    ]
    return tuple(
        (package.__name__, key, value)
        for package in packages
        for key, value in getattr(package, table, {}).items()
    )


def load(package: str, target: str) -> Any:
    """Import the `module` or `module:attribute` of a package."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(f"{package}.{name}")
    return getattr(module, attribute) if attribute else module


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
