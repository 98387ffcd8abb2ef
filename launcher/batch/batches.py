"""Batch jobs of a cluster: their folders on the head, merged with Ray's list of running jobs."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.batch import job_store
from launcher.batch.driver.progress import Progress
from launcher.batch.job_spec import jobs_folder
from launcher.batch.job_store import JobEntry
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.similar import did_you_mean
from launcher.core.transport import Command
from launcher.tools.site import Site, serving_judges
from launcher.tools.site.snapshot import ClusterSnapshot

_REMAINS_SCRIPT = 'cd "$1" 2>/dev/null && ls -d */ 2>/dev/null; exit 0'


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatus:
    """Status of one batch job.

    `state` is the driver's own, or `interrupted` when it exited without reporting one; `runs`: the
    job is not finished.
    """

    name: str
    state: str
    runs: bool
    job: str = ""
    work: str = ""
    progress: Progress = field(default_factory=Progress)
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the status for JSON output."""
        progress = {
            key: value
            for key, value in asdict(self.progress).items()
            if key not in ("state", "submission")
        }
        fields = {
            "name": self.name,
            "state": self.state,
            "runs": self.runs,
            "job": self.job,
            "work": self.work,
        }
        return {**fields, "detail": self.detail, **progress, "end": self.progress.end}


def query_list(site: Site) -> Command:
    """Return the command that lists all batch jobs on the head."""
    return site.in_container(
        site.head, job_store.build_command("list", jobs_folder(site.inventory))
    )


def query_remains(inventory: Inventory) -> Command:
    """List the batch job folders on the head's host: results outlive the containers."""
    return Command(
        node=inventory.head.name,
        argv=("sh", "-c", _REMAINS_SCRIPT, "batches", jobs_folder(inventory)),
        timeout=20,
    )


def parse_remains(answer: Answer) -> tuple[str, ...]:
    """Return the names of the jobs with a folder on the head."""
    names = [line.strip("/") for line in answer.out.splitlines()] if answer.ok else []
    return tuple(name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name))


def merge_jobs(
    inventory: Inventory, entries: Sequence[JobEntry], payload: Mapping[str, Any]
) -> tuple[BatchStatus, ...]:
    """Merge job folders with Ray's jobs; running jobs first, then by start, latest first."""
    runs = {job.name: job for job in serving_judges.active_batches(payload)}
    by_name = {entry.name: entry for entry in entries}
    root = jobs_folder(inventory)
    statuses = [
        _merge_job(f"{root}/{name}", name, by_name.get(name, JobEntry(name=name)), runs.get(name))
        for name in {**runs, **by_name}
    ]
    return tuple(sorted(statuses, key=lambda job: (not job.runs, -job.progress.started, job.name)))


def running_jobs(snapshot: ClusterSnapshot, answer: Answer | None) -> tuple[BatchStatus, ...]:
    """Return the running jobs, with their progress from the answer to `query_list`, if any."""
    entries: tuple[JobEntry, ...] = ()
    with contextlib.suppress(UnreadableAnswer):
        entries = job_store.parse_list(answer) if answer else ()
    return tuple(
        job for job in merge_jobs(snapshot.site.inventory, entries, snapshot.payload) if job.runs
    )


def _merge_job(
    work: str, name: str, entry: JobEntry, runs: serving_judges.Batch | None
) -> BatchStatus:
    state, detail = _job_state(entry, runs)
    return BatchStatus(
        name=name,
        state=state,
        runs=runs is not None or entry.alive,
        job=runs.id if runs else entry.progress.submission,
        work=work,
        progress=entry.progress,
        detail=detail,
    )


def _job_state(entry: JobEntry, runs: serving_judges.Batch | None) -> tuple[str, str]:
    """Return a job's state and its detail text."""
    progress = entry.progress
    if runs is not None:
        # Progress of an earlier run says nothing about this one.
        is_current = progress.submission == runs.id and not progress.over
        return (progress.state, progress.text) if is_current else ("starting", "")
    if entry.alive:
        state = "ending" if progress.over else progress.state or "starting"
        return state, progress.text
    if progress.over:
        detail = progress.text if progress.error is None else progress.error.message
        return progress.state, detail
    if progress.state:
        return "interrupted", "its driver is gone; to resume it, run the same `vlaunch batch` again"
    return "prepared", "it was never submitted"


def find_job(statuses: Sequence[BatchStatus], name: str) -> BatchStatus:
    """Return the batch job called `name`; raises RequestError if it does not exist."""
    for status in statuses:
        if status.name == name:
            return status
    suggestion = did_you_mean(name, [status.name for status in statuses])
    raise RequestError(
        f"no batch job `{name}`{suggestion}",
        hint="list them: `vlaunch jobs`",
    )
