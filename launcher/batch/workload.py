"""Batch jobs for `status`, `stop` and `down`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.app import servers as server
from launcher.app.command import CommandContext
from launcher.app.session import Session
from launcher.batch import batches, job_store, jobs_command
from launcher.batch.batches import BatchStatus
from launcher.batch.job_spec import jobs_folder
from launcher.core.check import Finding, failed, judge_removal, waiting
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer
from launcher.core.plan import Gate, Plan, Stage, Step
from launcher.core.transport import Answers
from launcher.tools import agent_queries
from launcher.tools.site import Site, serving_judges
from launcher.tools.site.ray_judges import parse_payload
from launcher.tools.site.servers import shown_state
from launcher.tools.site.serving_judges import Batch, query_jobs
from launcher.tools.site.snapshot import ClusterSnapshot

lines = jobs_command.job_lines


def running(session: Session, snapshot: ClusterSnapshot) -> tuple[BatchStatus, ...]:
    """Query the progress of the running jobs."""
    active = serving_judges.active_batches(snapshot.payload)
    queries = [batches.query_list(snapshot.site)] if active else []
    return batches.running_jobs(snapshot, next(iter(session.transport.run(queries)), None))


def stop(call: CommandContext, session: Session, names: Sequence[str], grace: float) -> None:
    """Stop jobs, and verify that their drivers are gone."""
    inventory, began = session.inventory, time.monotonic()
    snapshot, chosen = _find_jobs(session, names)
    runs = [job for job in serving_judges.active_batches(snapshot.payload) if job.name in names]
    plan = _plan_stop(snapshot.site, runs, grace)
    if call.dry_run:
        call.print_script([plan])
        return
    others = [job for job in chosen if job.name not in {run.name for run in runs}]
    for job in others:
        if not job.runs:
            text = f"{job.name} is not running; it is {shown_state(job.state)}"
            session.note("stop", text, state="unchanged")
    session.apply(plan)
    if alive := [job.name for job in others if job.runs]:
        raise NodeError(
            inventory.head.name,
            f"the driver of batch job `{alive[0]}` is running, but Ray has no record of its job",
            hint="it may be exiting: check `vlaunch jobs`; `vlaunch down` stops everything",
        )
    data = {"stopped": [job.id for job in runs]}
    stopped = ", ".join(job.name for job in runs)
    session.done(
        f"stopped {stopped}; to resume, run the same `vlaunch batch` again"
        if runs
        else "nothing was stopped",
        state="ok" if runs else "unchanged",
        seconds=time.monotonic() - began,
        data=data,
    )


def report_remains(session: Session) -> None:
    """Report job results that stay on the head."""
    inventory = session.inventory
    (answer,) = session.transport.run([batches.query_remains(inventory)])
    if remains := batches.parse_remains(answer):
        where = f"{jobs_folder(inventory)} on {inventory.head.name}"
        note = (
            f"batch results are kept in {where}:"
            f" {', '.join(remains[:5])}{' …' if len(remains) > 5 else ''}"
        )
        session.note("batch", note, data={"jobs": list(remains)})


def _find_jobs(session: Session, names: Sequence[str]) -> tuple[ClusterSnapshot, list[BatchStatus]]:
    """Query the head and return the named batch jobs; raises RequestError for an unknown name."""
    snapshot, listed = jobs_command.query_jobs(session)
    if "jobs" not in snapshot.payload:
        raise server.head_error(session, snapshot)
    listed_names = {job.name for job in listed}
    if unknown := [name for name in names if name not in listed_names]:
        present = [
            *(server.name for server in snapshot.servers_state.running),
            *sorted(listed_names),
        ]
        text = ", ".join(f"`{name}`" for name in present)
        raise RequestError(
            f"no server or batch job is named `{unknown[0]}`",
            evidence=f"existing names: {text}" if text else "",
            hint="list them: `vlaunch status`, `vlaunch jobs`",
        )
    return snapshot, [job for job in listed if job.name in names]


def _plan_stop(site: Site, jobs: Sequence[Batch], grace: float) -> Plan:
    """Plan to stop batch jobs; Ray kills them after `grace` seconds."""
    names = {job.name for job in jobs}

    def judge(answers: Answers) -> Sequence[Finding]:
        try:
            about_ray, about_jobs = answers[site.head.name]
            report, entries = parse_payload(about_ray), job_store.parse_list(about_jobs)
        except UnreadableAnswer as error:
            return [waiting("", error.message, fix="check `vlaunch jobs`")]
        alive = [entry.name for entry in entries if entry.alive and entry.name in names]
        return judge_stopped([job.id for job in jobs], report, alive)

    gate = Gate(
        id="batch-gone",
        what="the jobs' drivers are gone and their resources are free",
        queries=(query_jobs(site), batches.query_list(site)),
        judge=judge,
        deadline=60,
    )
    ports, timeout = site.inventory.ports, grace + 60
    steps = tuple(
        Step(
            title=f"stopping batch job {job.name} (Ray job {job.id})",
            command=site.in_container(
                site.head, agent_queries.stop_job(ports, job.id, grace), timeout=timeout
            ),
        )
        for job in jobs
    )
    gates = (gate,) if steps else ()
    stage = Stage(id="stop", title="Stop batch jobs", steps=steps, gates=gates)
    return Plan(verb="stop", stages=(stage,))


def judge_stopped(
    jobs: Sequence[str], payload: Mapping[str, Any], alive: Sequence[str]
) -> list[Finding]:
    """Check that batch jobs have ended, with their drivers and resources in Ray.

    Args:
        jobs: their Ray jobs.
        payload: the head's report on Ray, or its `error`.
        alive: names of the jobs whose driver holds its lock.
    """
    if "jobs" not in payload:
        text = f"Ray no longer responds: {payload.get('error', 'no answer')}"
        return [failed("", text, fix="check `vlaunch status`")]
    states = {job["submission_id"]: job["status"] for job in payload["jobs"]}
    remains = [
        f"job {name} is {states[name]}"
        for name in jobs
        if states.get(name, "ABSENT") not in serving_judges.OVER
    ]
    remains += [f"the driver of `{name}` is still running" for name in alive]
    # By Ray's own job ids: other jobs' resources do not matter here.
    job_ids = [
        job["job_id"]
        for job in payload["jobs"]
        if job["submission_id"] in jobs and job.get("job_id")
    ]
    # Ray Data's own actors (statistics and others) are detached: created by the first job, shared
    # by all later ones.
    actors = sum(
        row.get("job_id") in job_ids and row.get("state") == "ALIVE" and not row.get("is_detached")
        for row in payload.get("actors", ())
    )
    groups = sum(
        row.get("creator_job_id") in job_ids and row.get("state") != "REMOVED"
        for row in payload.get("groups", ())
    )
    remains += [f"{actors} actors still running"] if actors else []
    remains += [f"{groups} placement groups still there"] if groups else []
    return [judge_removal(remains, "the job is gone; its results are kept")]
