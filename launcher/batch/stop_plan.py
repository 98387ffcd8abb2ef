"""Plans that stop batch jobs, or remove the folders of those that are over."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.batch import job_store
from launcher.batch.batches import BatchStatus, query_list
from launcher.core.check import Finding, waiting
from launcher.core.errors import UnreadableAnswer
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.transport import Answers
from launcher.tools import agent_queries, running, serving_judges
from launcher.tools.ray_judges import read_payload
from launcher.tools.serving_judges import Batch
from launcher.tools.site import Site


def plan_remove(site: Site, jobs: Sequence[BatchStatus]) -> Plan:
    """Remove the folders of jobs that are over, with the output that lies in them."""
    steps = tuple(
        Step(
            title=f"removing {job.name}",
            command=site.inside(site.head, job_store.ask("remove", job.work), timeout=300),
        )
        for job in jobs
    )
    return Plan(
        verb="jobs",
        stages=(Stage(id="remove", title="Remove batch jobs", steps=steps),),
        keep_going=True,
    )


def plan_stop_batches(site: Site, jobs: Sequence[Batch], grace: float) -> Plan:
    """Stop batch jobs; `grace` is in seconds, then they are killed."""
    names = {job.name for job in jobs}

    def judge(answers: Answers) -> Sequence[Finding]:
        try:
            about_ray, about_jobs = answers[site.head.name]
            report, entries = read_payload(about_ray), job_store.parse_list(about_jobs)
        except UnreadableAnswer as error:
            return [waiting("", error.message, fix="look at `vlaunch jobs`")]
        alive = [entry.name for entry in entries if entry.alive and entry.name in names]
        return serving_judges.jobs_stopped([job.id for job in jobs], report, alive)

    gate = Gate(
        id="batch-gone",
        what="the jobs' drivers are gone, and what they held is free",
        ask=(running.ask_jobs(site), query_list(site)),
        judge=judge,
        deadline=60,
    )
    ports, timeout = site.inventory.ports, grace + 60
    steps = tuple(
        Step(
            title=f"stopping batch job {job.name} (Ray job {job.id})",
            command=site.inside(
                site.head, agent_queries.stop(ports, job.id, grace), timeout=timeout
            ),
        )
        for job in jobs
    )
    gates = (gate,) if steps else ()
    stage = Stage(id="stop", title="Stop batch jobs", steps=steps, gates=gates)
    return Plan(verb="stop", stages=(stage,))
