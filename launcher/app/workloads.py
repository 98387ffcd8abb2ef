"""What features run on a cluster beside its servers: registered for `status`, `stop` and `down`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from launcher.app.command import Call
from launcher.app.registry import entries, load
from launcher.app.session import Session
from launcher.app.terminal import Line
from launcher.tools.snapshot import ClusterSnapshot


class Job(Protocol):
    """One job."""

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""


class Workload(Protocol):
    """One kind of job."""

    def running(self, session: Session, snapshot: ClusterSnapshot) -> tuple[Job, ...]:
        """Query the head for the jobs that run."""

    def lines(self, jobs: Sequence[Any]) -> list[Line]:
        """Return one line for each job."""

    def stop(self, call: Call, session: Session, names: Sequence[str], grace: float) -> None:
        """Stop the jobs of these names, which no server has; `grace` is in seconds. Raises
        RequestError for a name that no job has.
        """

    def report_remains(self, session: Session) -> None:
        """Report what jobs leave on the nodes when the cluster is down."""


def workloads() -> list[Workload]:
    """Import and return what features have registered."""
    return [load(package, module) for package, _, module in entries("WORKLOADS")]
