"""Plan of a batch: from a checked job and a snapshot to the steps that submit a Ray job."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.batch import job_store, preconditions, progress_text
from launcher.batch.checked_job import CheckedJob
from launcher.batch.identity import diff_identity, tuning_values
from launcher.batch.inputs import ShippedFile
from launcher.core.domain import Argv
from launcher.core.errors import RequestError
from launcher.core.plan import Gate, Plan, Stage, Step, precomputed_gate
from launcher.core.transport import Command
from launcher.inventory.engine_args import to_flags
from launcher.tools import agent_queries
from launcher.tools.engine_flags.gates import command_gate, engine_gate
from launcher.tools.host import HostFacts
from launcher.tools.site import Site, serving_judges
from launcher.tools.site.snapshot import ClusterSnapshot

PACKAGE = ("env", "PYTHONPATH=/opt/vlaunch/batch.pyz", "python3", "-m", "vlaunch_batch")
PIECE_BYTES = 24 * 2**20  # bytes of one command's standard input, held in memory
_PIECE_TIMEOUT = 900.0  # seconds per piece: 27 kB/s suffice


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A requested batch job: checked, as its driver reads it, with the local files it needs."""

    job: CheckedJob
    spec: Mapping[str, Any]
    files: tuple[ShippedFile, ...] = ()

    @property
    def work(self) -> str:
        """Job folder on the head."""
        return str(self.spec["work"])

    @property
    def digest(self) -> str:
        """Digest of the job's identity: equal when the same rows get the same answers."""
        return str(self.spec["digest"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of one run, beyond the job's identity."""

    restart: bool = False
    retry_errors: bool = False
    queue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """Snapshot before planning: the cluster and the job's folder on the head."""

    cluster: ClusterSnapshot
    entry: job_store.JobEntry = field(default_factory=lambda: job_store.JobEntry(absent=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStart:
    """Plan of one run.

    `job` is the Ray job to watch; `attached`: it is already running; `finished`: no rows remain;
    `fresh`: the results of an earlier run of this name are removed first.
    """

    plan: Plan
    job: str = ""
    attached: bool = False
    finished: bool = False
    fresh: bool = False


def query_entry(site: Site, work: str) -> Command:
    """Return the command that queries one job folder on the head."""
    return site.in_container(site.head, job_store.build_command("look", work))


def plan_batch(snapshot: BatchSnapshot, request: BatchRequest, options: BatchOptions) -> BatchStart:
    """Plan the run: start, resume, watch, or do nothing.

    Raises:
        RequestError: this is not the job that was begun under its name, it runs and is not to, or
            it can never fit.
    """
    entry, name = snapshot.entry, request.job.name
    preconditions.check_fit(request.job, snapshot.cluster.site.inventory)
    batches = serving_judges.active_batches(snapshot.cluster.payload)
    active = next((batch for batch in batches if batch.name == name), None)
    live = active is not None or entry.alive
    changed = entry.digest not in ("", request.digest)
    _check_earlier_run(request, entry, changed=changed, live=live, restart=options.restart)
    if live:
        return _plan_attach(snapshot, request, options, active)
    fresh = (options.restart or changed) and not entry.absent
    done = entry.progress.state == "done"
    # Only a finished job has counted all of its error rows.
    has_errors = not entry.absent and (entry.progress.errors > 0 or not done)
    retry = options.retry_errors and not fresh and has_errors
    if done and not fresh and not retry:
        notes = ("there are no error rows to retry",) if options.retry_errors else ()
        return BatchStart(plan=Plan(verb="batch", stages=(), notes=notes), finished=True)
    return _plan_start(snapshot, request, options, fresh=fresh, retry=retry)


def _check_earlier_run(
    request: BatchRequest, entry: job_store.JobEntry, *, changed: bool, live: bool, restart: bool
) -> None:
    """Raise RequestError for a restart while the job runs, or for another job of its name."""
    name = request.job.name
    if live and restart:
        raise RequestError(
            f"batch job `{name}` is running", hint=f"stop it first: `vlaunch stop {name}`"
        )
    if changed and not restart and (live or entry.written):
        raise _changed_error(request, entry, live=live)


def _plan_attach(
    snapshot: BatchSnapshot,
    request: BatchRequest,
    options: BatchOptions,
    active: serving_judges.Batch | None,
) -> BatchStart:
    """Plan to watch a running job; raises RequestError if it is not the requested one."""
    name = request.job.name
    if options.retry_errors:
        raise RequestError(
            f"batch job `{name}` is running; its error rows can be retried after it ends",
            hint=(
                "run the same command again after it ends; without --retry-errors, the command"
                " watches it"
            ),
        )
    if active is not None:
        return BatchStart(plan=Plan(verb="batch", stages=()), job=active.id, attached=True)
    if "error" in snapshot.cluster.payload:
        raise RequestError(
            f"`{name}` is running, but Ray did not report its job id:"
            f" {snapshot.cluster.payload['error']}",
            hint="check `vlaunch status`, then run the same command again",
        )
    raise RequestError(
        f"the driver of an earlier run of `{name}` is still exiting",
        hint="run the same command again",
    )


def _plan_start(
    snapshot: BatchSnapshot,
    request: BatchRequest,
    options: BatchOptions,
    *,
    fresh: bool,
    retry: bool,
) -> BatchStart:
    site = snapshot.cluster.site
    job = _next_id(request.job.name, snapshot)
    # Files of an earlier run are reusable if the digests match.
    have = {} if fresh or snapshot.entry.digest != request.digest else snapshot.entry.inputs
    ship = ship_steps(site, request.work, have, request.files)
    gates = _start_gates(snapshot, request, options, have) if site.facts else ()
    clear = Step(
        title=f"removing the files of an earlier run of {request.job.name}",
        command=site.in_container(
            site.head, job_store.build_command("remove", request.work), timeout=300
        ),
    )
    stages = (
        Stage(id="preflight", title="Check the cluster and the model", gates=gates),
        Stage(id="clear", title="Delete the previous results", steps=(clear,) if fresh else ()),
        Stage(
            id="prepare",
            title="Save the job on the head",
            steps=(_prepare_step(site, request, retry=retry, restart=options.restart),),
        ),
        Stage(id="ship", title="Copy the job's files to the head", steps=tuple(ship)),
        Stage(
            id="submit", title="Submit the job to Ray", steps=(_submit_step(site, request, job),)
        ),
    )
    notes = start_notes(request, snapshot.entry, fresh=fresh, retry=retry)
    plan = Plan(verb="batch", stages=stages, notes=notes)
    return BatchStart(plan=plan, job=job, fresh=fresh)


def start_notes(
    request: BatchRequest, entry: job_store.JobEntry, *, fresh: bool, retry: bool
) -> tuple[str, ...]:
    """Describe the planned run and the row it resumes from."""
    job, progress = request.job, entry.progress
    lines = [
        f"{job.name}: {_describe_job(job)}, output in {job.to.shown}",
        *_resume_notes(request, entry, fresh=fresh),
    ]
    if retry:
        count = f"{progress.errors:,} " if progress.errors else ""
        lines.append(f"{count}error row{'' if progress.errors == 1 else 's'} to retry")
    if not fresh and entry.job:
        lines += [
            f"changed since the last run: {line}"
            for line in diff_identity(tuning_values(entry.job), tuning_values(request.spec))
        ]
    return tuple(lines)


def bytes_sent(have: Mapping[str, int], file: ShippedFile) -> int:
    """Return the bytes of a file that the head already has and can be completed from."""
    if have.get(file.to) == file.bytes:
        return file.bytes
    received = have.get(part_name(file.to), 0)
    return received if received < file.bytes else 0


def part_name(name: str) -> str:
    """Return the name of a file while it is being sent."""
    path = PurePosixPath(name)
    return str(path.with_name(f".{path.name}.part"))


def missing_files(have: Mapping[str, int], files: Sequence[ShippedFile]) -> list[ShippedFile]:
    """Return the files that are missing or incomplete on the head."""
    return [file for file in files if have.get(file.to) != file.bytes]


def ship_steps(
    site: Site, work: str, have: Mapping[str, int], files: Sequence[ShippedFile]
) -> list[Step]:
    """Return the steps that send missing files in pieces, resuming where the last run stopped."""
    return [
        _piece_step(site, work, file, offset)
        for file in missing_files(have, files)
        for offset in (
            range(bytes_sent(have, file), file.bytes, PIECE_BYTES) if file.bytes else (0,)
        )
    ]


def _resume_notes(request: BatchRequest, entry: job_store.JobEntry, *, fresh: bool) -> list[str]:
    """Describe the effect on existing results; empty without any."""
    progress = entry.progress
    if not fresh:
        started = progress.accounted or progress.rows is not None
        if not started or progress.state == "done":
            return []
        return [f"continues where it stopped: {progress_text.row_counts(progress)} are done"]
    if entry.digest != request.digest and not entry.written:
        return ["replaces another job of this name, which has written no rows"]
    if progress.accounted:
        return [
            f"starts over; the previous results ({progress_text.row_counts(progress)}) are deleted"
        ]
    return []


def _describe_job(job: CheckedJob) -> str:
    if job.predict is not None and job.mode == "predict":
        return job.predict.class_
    minimum, maximum = job.engine.replicas
    if job.data_parallel is not None:
        return f"{job.model}, {job.data_parallel.size} data-parallel ranks × TP {job.engine.tp}"
    count = f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"
    return f"{job.model}, {count} × (TP {job.engine.tp} × PP {job.engine.pp})"


def _changed_error(request: BatchRequest, entry: job_store.JobEntry, *, live: bool) -> RequestError:
    name = request.job.name
    done = progress_text.row_counts(entry.progress)
    begin = f"start over with `--discard-results`, which deletes the results ({done})"
    named = "`job:` in its file" if request.job.path else "`--name`"
    hints = [
        f"stop it first: `vlaunch stop {name}`; then {begin}" if live else begin,
        f"or keep both: give this one another name ({named}), and another output",
    ]
    return RequestError(
        f"another job named `{name}` {'is running' if live else 'exists'} on this cluster",
        evidence=diff_identity(entry.identity, request.spec["identity"]),
        hint="\n".join(hints),
    )


def _start_gates(
    snapshot: BatchSnapshot, request: BatchRequest, options: BatchOptions, have: Mapping[str, int]
) -> tuple[Gate, ...]:
    job, cluster, site = request.job, snapshot.cluster, snapshot.cluster.site
    minimum, maximum = job.gpus
    size = sum(file.bytes for file in missing_files(have, request.files))
    jobs, holders = cluster.payload, serving_judges.gpu_users(cluster.payload)
    judge_room = partial(
        serving_judges.judge_job_room,
        site.inventory,
        minimum,
        maximum,
        jobs,
        holders,
        queue=options.queue,
    )
    judge_disk = partial(
        serving_judges.judge_job_disk, site.head, size, site.facts_of(site.head) or HostFacts()
    )
    gates = [serving_judges.cluster_gate(cluster)]
    if job.mode != "predict":
        gates.append(serving_judges.model_gate(cluster, site.nodes, job.model))
    if minimum:
        gates.append(precomputed_gate("room", "Ray has enough free resources", judge_room))
    if size:
        gates.append(precomputed_gate("disk", "the head has enough free space", judge_disk))
    if job.mode != "predict":
        gates.append(_arguments_gate(site, job))
    return tuple(gates)


def _arguments_gate(site: Site, job: CheckedJob) -> Gate:
    adapters = [f"{name}={path}" for name, path in (job.lora or {}).items()]
    lora = {"enable_lora": True, "lora_modules": adapters} if adapters else {}
    if job.row_kind == "request":
        argv = ("vllm", "serve", job.model, *to_flags({**lora, **job.engine.args}))
        return command_gate(site, site.head, argv, {})
    sizes = {"tensor_parallel_size": job.engine.tp, "pipeline_parallel_size": job.engine.pp}
    return engine_gate(site, {"model": job.model, **sizes, **lora, **job.engine.args})


def _next_id(name: str, snapshot: BatchSnapshot) -> str:
    """Return an id unknown to Ray and the job's folder, so that old progress is not mistaken for
    new.
    """
    submitted = [
        str(identifier["submission_id"]) for identifier in snapshot.cluster.payload.get("jobs", ())
    ]
    used = [
        int(match[1])
        for identifier in (*submitted, snapshot.entry.progress.submission)
        if (match := re.fullmatch(rf"batch-{re.escape(name)}-([0-9]{{1,9}})", identifier))
    ]
    return f"batch-{name}-{max(used, default=0) + 1}"


def _prepare_step(site: Site, request: BatchRequest, *, retry: bool, restart: bool) -> Step:
    # For output in an object store, which the head cannot reach, the driver clears it on `restart`.
    text = json.dumps({**request.spec, "retry_errors": retry, "restart": restart})
    digest = hashlib.sha256(text.encode()).hexdigest()
    argv = job_store.build_command("put", request.work, "job.json", offset=0, last=digest)
    return Step(title="writing job.json", command=_stdin_command(site, argv, text, 60))


def _submit_step(site: Site, request: BatchRequest, job: str) -> Step:
    metadata = {
        serving_judges.NAME: request.job.name,
        serving_judges.GPUS: f"{request.job.gpus[0]:g}",
    }
    text = json.dumps(
        {"argv": (*PACKAGE, request.work), "submission_id": job, "metadata": metadata}
    )
    return Step(
        title=f"submitting {request.job.name} as Ray job {job}",
        command=_stdin_command(site, agent_queries.submit_job(site.inventory.ports), text, 90),
    )


def _stdin_command(site: Site, argv: Argv, text: str, timeout: float) -> Command:
    return site.in_container(
        site.head,
        argv,
        timeout=timeout,
        stdin=text.encode,
        shown_stdin=f"printf %s {shlex.quote(text)}",
    )


def _piece_step(site: Site, work: str, file: ShippedFile, offset: int) -> Step:
    count = min(PIECE_BYTES, file.bytes - offset)
    last = file.sha256 if offset + count == file.bytes else ""

    def read() -> bytes:
        with file.path.open("rb") as source:
            source.seek(offset)
            return source.read(count)

    return Step(
        title=f"copying {PurePosixPath(file.to).name}",
        command=site.in_container(
            site.head,
            job_store.build_command("put", work, file.to, offset=offset, last=last),
            timeout=_PIECE_TIMEOUT,
            stdin=read,
            shown_stdin=_piece_script(file.path, offset, count, file.bytes),
        ),
    )


def _piece_script(path: Path, offset: int, count: int, size: int) -> str:
    """Return the shell command that reads one piece."""
    # An absolute path, since a leading dash would be an option.
    quoted = shlex.quote(str(path.absolute()))
    if count == size:
        return f"cat {quoted}"
    # `head` exits before `tail` has written everything, which is no failure.
    return f"{{ tail -c +{offset + 1} {quoted} || :; }} | head -c {count}"
