"""The batch jobs of a cluster as one list: what lies on the head, put together with what Ray says
of what runs.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.batch import job_store
from launcher.batch.driver.progress import Progress
from launcher.batch.job_spec import jobs_folder
from launcher.batch.job_store import Entry
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools import serving_judges
from launcher.tools.site import Site
from launcher.tools.snapshot import ClusterSnapshot

_LEFT = 'cd "$1" 2>/dev/null && ls -d */ 2>/dev/null; exit 0'


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatus:
    """One batch job.

    `state` is the driver's own word, or `interrupted` when it ended without one; `runs`: it is not
    over.
    """

    name: str
    state: str
    runs: bool
    job: str = ""
    work: str = ""
    progress: Progress = field(default_factory=Progress)
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        progress = {
            key: value
            for key, value in asdict(self.progress).items()
            if key not in ("state", "submission")
        }
        own = {
            "name": self.name,
            "state": self.state,
            "runs": self.runs,
            "job": self.job,
            "work": self.work,
        }
        return {**own, "detail": self.detail, **progress}


def query_list(site: Site) -> Command:
    """Ask the head for all batch jobs."""
    return site.inside(site.head, job_store.ask("list", jobs_folder(site.inventory)))


def ask_left(inventory: Inventory) -> Command:
    """Ask the head, past its containers, for the folders of batch jobs: what they did outlives the
    cluster.
    """
    return Command(
        node=inventory.head.name,
        argv=("sh", "-c", _LEFT, "batches", jobs_folder(inventory)),
        timeout=20,
    )


def read_left(answer: Answer) -> tuple[str, ...]:
    """Return the names of the jobs whose folders are there."""
    names = [each.strip("/") for each in answer.out.splitlines()] if answer.ok else []
    return tuple(name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name))


def read(
    inventory: Inventory, entries: Sequence[Entry], said: Mapping[str, Any]
) -> tuple[BatchStatus, ...]:
    """Put together what lies on the head and what Ray says; those that run come first, then the
    last one begun.
    """
    runs = {job.name: job for job in serving_judges.batches(said)}
    known = {entry.name: entry for entry in entries}
    root = jobs_folder(inventory)
    found = [
        _one(f"{root}/{name}", name, known.get(name, Entry(name=name)), runs.get(name))
        for name in {**runs, **known}
    ]
    return tuple(sorted(found, key=lambda each: (not each.runs, -each.progress.started, each.name)))


def running(snapshot: ClusterSnapshot, answer: Answer | None) -> tuple[BatchStatus, ...]:
    """Return the jobs that run, with their progress from the answer to `query_list`, where
    there is one.
    """
    entries: tuple[Entry, ...] = ()
    with contextlib.suppress(UnreadableAnswer):
        entries = job_store.parse_list(answer) if answer else ()
    return tuple(job for job in read(snapshot.site.inventory, entries, snapshot.said) if job.runs)


def _one(work: str, name: str, entry: Entry, runs: serving_judges.Batch | None) -> BatchStatus:
    state, detail = _state(entry, runs)
    return BatchStatus(
        name=name,
        state=state,
        runs=runs is not None or entry.alive,
        job=runs.id if runs else entry.progress.submission,
        work=work,
        progress=entry.progress,
        detail=detail,
    )


def _state(entry: Entry, runs: serving_judges.Batch | None) -> tuple[str, str]:
    """Return how a job is, and what there is to say of it."""
    progress = entry.progress
    if runs is not None:
        # What an earlier run left there says nothing of this one.
        own = progress.submission == runs.id and not progress.over
        return (progress.state, progress.text) if own else ("starting", "")
    if entry.alive:
        state = "ending" if progress.over else progress.state or "starting"
        return state, progress.text
    if progress.over:
        detail = progress.text if progress.error is None else progress.error.message
        return progress.state, detail
    if progress.state:
        return "interrupted", "its driver is gone; the same `vlaunch batch` goes on"
    return "prepared", "it was never submitted"


def the_batch(found: Sequence[BatchStatus], name: str) -> BatchStatus:
    """Return the batch job called `name`; raises RequestError when there is none."""
    for each in found:
        if each.name == name:
            return each
    near = difflib.get_close_matches(name, [each.name for each in found], n=1)
    raise RequestError(
        f"no batch job `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
        hint="see which there are: `vlaunch jobs`",
    )
