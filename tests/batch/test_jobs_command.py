"""`vlaunch jobs`, `stop JOB` and `status` with batch jobs, on simulated nodes with the real job
store.
"""

from __future__ import annotations

import fcntl
import itertools
import json

import pytest

from launcher.app import refusal
from launcher.batch import watch as watch_batch
from launcher.core.domain import Answer
from launcher.core.transport import Command
from tests import supervision
from tests.batch.batch_job import Batch, bring_up
from tests.command_line import Cluster
from tests.simulated import query


@pytest.fixture
def batch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A running cluster and a job of ten rows; waits take no time."""
    ticks = itertools.count()
    defaults = watch_batch.watch_job.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "clock", lambda: float(next(ticks)))
    monkeypatch.setitem(defaults, "sleep", lambda _: None)
    return bring_up(cluster)


@pytest.fixture
def running(batch: Batch) -> Batch:
    """The same with the job running."""
    batch.dies = lambda progress: progress.update(
        done=4, status="RUNNING", rows_per_second=2.5, eta=2.4, tokens_per_second=120, gpu_hours=1.5
    )
    assert batch.run("--detach").code == 0
    batch.verbs()
    return batch


def test_no_job_at_all(batch: Batch) -> None:
    """No error."""
    ran = batch.cluster.run("jobs")

    assert (ran.code, ran.out) == (0, "")
    assert "this cluster has no batch jobs" in ran.err


def test_a_running_job_and_the_server_beside_it(running: Batch) -> None:
    """The job's progress; the server is a remark, not a job."""
    supervision.store_server(running.cluster.world, supervision.make_spec("chat"))
    ran = running.cluster.run("jobs")
    header, row, rest = ran.out.splitlines()

    assert ran.code == 0
    columns = "NAME STATE ROWS DONE ERRORS ROWS/S TOK/S GPU-H ETA STARTED"
    assert header.split() == columns.split()
    assert row.split()[:9] == ["job", "running", "10", "4", "0", "2.50", "120", "1.50", "2s"]
    assert rest == "server `chat` with org/m is also running"


@pytest.mark.parametrize(
    ("state", "status", "shown", "expected"),
    [
        ("running", "FAILED", "interrupted", "run the same `vlaunch batch` again"),
        ("running", "ABSENT", "interrupted", "run the same `vlaunch batch` again"),
        ("done", "SUCCEEDED", "done", ""),
        ("failed", "FAILED", "failed", "it broke"),
        ("stopped", "STOPPED", "stopped", ""),
        ("done", "RUNNING", "starting", ""),
    ],
)
def test_states(batch: Batch, state: str, status: str, shown: str, expected: str) -> None:
    """A driver without a final report was interrupted; an earlier run's state does not count."""
    batch.dies = lambda progress: progress.update(
        state=state, status=status, error={"message": "it broke"}
    )
    batch.run("--detach")
    ran = batch.cluster.run("jobs")

    assert ran.out.splitlines()[1].split()[1] == shown
    assert expected in ran.out


def test_jobs_as_json(running: Batch) -> None:
    """All known fields."""
    (job,) = json.loads(running.cluster.run("jobs", "--json").out)["jobs"]

    assert (job["name"], job["state"], job["runs"], job["job"]) == (
        "job",
        "running",
        True,
        "batch-job-1",
    )
    assert (job["rows"], job["done"], job["rows_per_second"]) == (10, 4, 2.5)
    assert job["work"] == str(running.work)


def test_only_the_head_is_queried(running: Batch) -> None:
    """Nodes that are down do not matter."""
    running.cluster.commands.clear()
    running.cluster.run("jobs")

    assert {command.node for command in running.cluster.commands} == {"gpu01"}


@pytest.mark.parametrize("argv", [("jobs",), ("stop", "job", "--dry-run")])
def test_queries_change_nothing(running: Batch, argv: tuple[str, ...]) -> None:
    """And take no lock, while `up` copies a missing node program."""
    world = running.cluster.world
    del world.machines["gpu01"].files["payload/batch.pyz"]
    before = len(world.changes)
    ran = running.cluster.run(*argv)

    assert (ran.code, len(world.changes)) == (1, before)
    assert "gpu01: its node programs are outdated" in ran.err
    assert "hint: run `vlaunch up`" in ran.err


def test_a_running_job_is_not_removed(running: Batch) -> None:
    """It must be stopped first."""
    ran = running.cluster.run("jobs", "remove", "job")

    assert (ran.code, running.verbs(), running.work.exists()) == (2, [], True)
    assert "vlaunch stop job" in ran.err


def test_a_finished_job_is_removed(batch: Batch) -> None:
    """Its folder on the head; gathered output stays."""
    batch.run()
    batch.verbs()
    refused = batch.cluster.run("jobs", "remove", "job")
    assert (refused.code, batch.verbs()) == (2, [])
    assert "no terminal to confirm: Remove job, with the results on the head?" in refused.err
    ran = batch.cluster.run("jobs", "remove", "job", "--yes")

    assert (ran.code, batch.verbs(), batch.work.exists()) == (0, ["remove"], False), ran.err
    assert len(batch.answers()) == 10


def test_a_missing_job(batch: Batch) -> None:
    """A similar name is suggested."""
    batch.run()
    ran = batch.cluster.run("jobs", "remove", "jop")

    assert ran.code == 2
    assert "no batch job `jop`; did you mean `job`?" in ran.err
    log = refusal.load("c")
    assert log is not None and log.title == "vlaunch jobs remove"


def test_stop_a_job(running: Batch) -> None:
    """Its Ray job stops; finished rows stay, and the same command resumes."""
    ran = running.cluster.run("stop", "job")

    assert (ran.code, running.verbs(), running.work.exists()) == (0, ["stop"], True), ran.err
    assert "stopped job; to resume, run the same `vlaunch batch` again" in ran.err


def test_stop_a_job_that_does_not_run(batch: Batch) -> None:
    """No error."""
    batch.run()
    batch.verbs()
    ran = batch.cluster.run("stop", "job")

    assert (ran.code, batch.verbs()) == (0, [])
    assert "job is not running; it is done" in ran.err
    assert "nothing was stopped" in ran.err


def test_a_driver_that_ray_has_forgotten(running: Batch) -> None:
    """It may still be running."""
    running.cluster.world.jobs.clear()
    with (running.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = running.cluster.run("stop", "job")

    assert (ran.code, running.verbs()) == (1, [])
    assert "the driver of batch job `job` is running, but Ray has no record of its job" in ran.err
    assert "does not run" not in ran.err


def test_a_job_that_does_not_stop(running: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported with its processes."""
    world, answer = running.cluster.world, running.cluster.world.answer

    def stubborn(command: Command) -> Answer | None:
        if query(command.argv) == "stop":
            return Answer(node=command.node, code=0, out="{}")
        return answer(command)

    monkeypatch.setattr(world, "answer", stubborn)
    ran = running.cluster.run("stop", "job")

    assert ran.code == 1
    assert "timed out after 60s: job batch-job-1 is RUNNING" in ran.err


def test_stop_without_a_name_is_about_the_server(running: Batch) -> None:
    """Batch jobs continue, which is reported."""
    ran = running.cluster.run("stop")

    assert (ran.code, running.verbs()) == (0, [])
    assert "batch job `job` keeps running; stop it: `vlaunch stop job`" in ran.err


def test_a_dry_run_of_a_stop(running: Batch) -> None:
    """It prints the commands."""
    ran = running.cluster.run("stop", "job", "--dry-run")

    assert (ran.code, running.verbs()) == (0, [])
    assert "http://agent/stop?dashboard=8265&job=batch-job-1" in ran.out


def test_status_has_a_line_per_running_job(running: Batch) -> None:
    """With its progress; without finished jobs."""
    ran = running.cluster.run("status")
    running.cluster.world.jobs[0]["status"] = "FAILED"
    over = running.cluster.run("status")

    assert "batch job: running  4 of 10 rows, 2.50 rows/s, 2s left, 120 tokens/s" in ran.out
    assert "batch" not in over.out


def test_status_as_json(running: Batch) -> None:
    """The same for programs."""
    (job,) = json.loads(running.cluster.run("status", "--json").out)["batches"]

    assert (job["name"], job["state"], job["done"]) == ("job", "running", 4)


def test_texts_of_the_head_are_sanitized(running: Batch) -> None:
    """Without terminal codes."""
    path = running.work / "progress.json"
    text = "\x1b[2J\x1b]0;title\x07red [bold]"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "waiting", "text": text}))
    ran = running.cluster.run("jobs")

    assert "\x1b" not in ran.out
    assert "red [bold]" in ran.out


@pytest.mark.parametrize("command", ["jobs", "stop"])
def test_a_stopped_head(running: Batch, command: str) -> None:
    """`vlaunch up` comes first."""
    running.cluster.world.stop("gpu01")
    ran = running.cluster.run(command, *(["job"] if command == "stop" else []))

    assert ran.code == 1
    assert "its container is not running" in ran.err
