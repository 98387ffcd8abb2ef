"""`vlaunch batch` on simulated nodes, with the real job store on local files."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from launcher.batch import batch_plan, gather
from launcher.batch import watch as watch_batch
from launcher.core.domain import Answer
from launcher.core.transport import Command
from tests import supervision
from tests.app.test_script import Sent, Shell
from tests.batch.batch_job import JOB, Batch, bring_up
from tests.command_line import Cluster


@pytest.fixture
def batch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A running cluster, and a job of ten rows. Waits cost no time."""
    ticks = itertools.count()
    for function in (watch_batch.watch_job, gather.gather):
        defaults = function.__kwdefaults__ or {}
        monkeypatch.setitem(defaults, "clock", lambda: float(next(ticks)))
        monkeypatch.setitem(defaults, "sleep", lambda _: None)
    result = bring_up(cluster)

    def driver(job: dict[str, Any]) -> None:
        result.driver(job)
        if (mark := result.work / "output/ledger/job.json").exists():
            # as the real one does
            mark.write_text(json.dumps({"job": "job", "cluster": "c", "meaning": {}}))

    cluster.world.driver = driver
    return result


def at_fsync(patch: pytest.MonkeyPatch, does: Callable[[int], None]) -> None:
    """Run a callback when gathered bytes are synced; the head's own files do not count."""
    patch.setattr(gather, "os", SimpleNamespace(**{**vars(os), "fsync": does}))


def test_every_row_is_answered_and_gathered(batch: Batch) -> None:
    """Prepared, shipped, submitted, awaited, gathered and reported."""
    ran = batch.run()

    assert ran.code == 0, ran.err
    assert batch.verbs() == ["put", "put", "submit"]
    assert [row["id"] for row in batch.answers()] == list(range(10))
    assert (batch.work / "input/0000-prompts.jsonl").read_bytes() == (
        batch.folder / "prompts.jsonl"
    ).read_bytes()
    assert sorted(batch.gathered()) == [
        ".vlaunch-batch.json",
        "rows/part-000001.jsonl",
        "rows/part-000002.jsonl",
        "rows/part-000003.jsonl",
        "summary.json",
    ]
    assert "answers  10 in out/rows" in ran.out
    assert "10 of 10 rows are done, 0 of them with errors" in ran.err


def test_arguments_that_vllm_rejects_start_nothing(batch: Batch) -> None:
    """The head's vLLM names all mistakes before anything is sent."""
    mistake = "EngineArgs has no argument `max_nun_seqs`"
    batch.cluster.world.machines["gpu01"].flags["mistakes"] = [mistake]
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (2, [])
    assert "vLLM 0.32.0 rejects the arguments; nothing was changed" in ran.err
    assert mistake in ran.err


def test_a_job_is_watched_and_gathered_without_the_lock(batch: Batch) -> None:
    """Others may work on the cluster once the job is submitted, while its rows take hours."""
    trace = batch.cluster.trace
    trace.clear()
    batch.run()
    at = trace.index("free")

    assert (trace[0], trace.count("hold")) == ("hold", 1)
    assert "run" in trace[:at] and trace[at + 1 :].count("run") >= 2


def test_the_submitted_job(batch: Batch) -> None:
    """A Ray job with metadata for later commands."""
    batch.run()
    (job,) = batch.cluster.world.jobs
    work = str(batch.work)

    assert job["submission_id"] == "batch-job-1"
    assert job["argv"] == [
        "env",
        "PYTHONPATH=/opt/vlaunch/batch.pyz",
        "python3",
        "-m",
        "vlaunch_batch",
        work,
    ]
    assert job["metadata"] == {"vlaunch.batch": "job", "vlaunch.gpus": "1"}


def test_a_second_run_has_nothing_to_do(batch: Batch) -> None:
    """It says so after few queries, and changes nothing."""
    batch.run()
    before, command_count = batch.gathered(), len(batch.cluster.commands)
    batch.verbs()
    ran = batch.run()

    assert (ran.code, batch.verbs(), batch.gathered()) == (0, [], before)
    assert "all rows were already done" in ran.err
    assert "all 4 files are up to date" in ran.err
    assert len(batch.cluster.commands) - command_count <= 2 * 2 + 4


def test_missing_local_files_are_fetched_again(batch: Batch) -> None:
    """And files that differ from the head's."""
    batch.run()
    before = batch.gathered()
    (batch.folder / "out/rows/part-000002.jsonl").unlink()
    (batch.folder / "out/rows/part-000003.jsonl").write_text(
        "x" * len(before["rows/part-000003.jsonl"])
    )
    ran = batch.run()

    assert (ran.code, batch.gathered()) == (0, before)
    assert "2 files fetched" in ran.err


def test_large_files_are_sent_in_pieces(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small, and the file is unchanged."""
    monkeypatch.setattr(batch_plan, "PIECE_BYTES", 80)
    ran = batch.run()

    assert ran.code == 0, ran.err
    assert batch.verbs() == [*["put"] * 5, "submit"]
    assert len(batch.answers()) == 10


def test_an_interrupted_transfer_resumes(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks inside a file costs one piece."""
    monkeypatch.setattr(batch_plan, "PIECE_BYTES", 80)
    world, real = batch.cluster.world, batch.cluster.world.answer

    def breaking(command: Command) -> Answer | None:
        if "put" in command.argv and "160" in command.argv:
            return Answer(node=command.node, code=255, err="the connection was lost")
        return real(command)

    monkeypatch.setattr(world, "answer", breaking)
    first = batch.run()
    monkeypatch.setattr(world, "answer", real)
    batch.verbs()
    second = batch.run()

    assert (first.code, second.code) == (1, 0), second.err
    assert batch.verbs() == [*["put"] * 3, "submit"]


def test_existing_inputs_are_not_sent_again(batch: Batch) -> None:
    """A driver that died is restarted on the same files."""
    batch.dies = lambda progress: progress.update(done=4)
    assert batch.run().code == 1
    batch.verbs()
    batch.dies = None
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (0, ["put", "submit"])
    assert "continues where it stopped: 4 of 10 rows are done" in ran.err
    assert batch.cluster.world.jobs[-1]["submission_id"] == "batch-job-2"


def test_an_old_runs_id_is_not_reused(batch: Batch) -> None:
    """Ray forgets its jobs with the head; their folders stay, and old progress must not count as
    new.
    """
    batch.dies = lambda progress: progress.update(done=4)
    batch.run()
    batch.cluster.world.jobs.clear()
    batch.dies = None
    batch.run()

    assert batch.cluster.world.jobs[-1]["submission_id"] == "batch-job-2"


@pytest.mark.parametrize(("extra", "expected"), [((), "`vlaunch"), (("--json",), "")])
def test_a_killed_driver(batch: Batch, extra: tuple[str, ...], expected: str) -> None:
    """The same command continues."""
    batch.dies = lambda progress: progress.update(done=4)
    ran = batch.run(*extra)

    assert ran.code == 1
    assert (
        "the same command again: it continues where this one stopped (4 of 10 rows are done)"
        in ran.err
    )
    assert not (batch.folder / "out/rows").exists()


def test_error_rows(batch: Batch) -> None:
    """They are gathered and reported, with their own exit code under --strict."""
    batch.errors = {2, 7}
    ran = batch.run()
    strict = batch.run("--strict")

    assert (ran.code, strict.code) == (0, 3)
    assert "errors/part-000003.jsonl" in batch.gathered()
    assert "2, see out/errors; retry them with --retry-errors" in ran.out


def test_retry_of_errors(batch: Batch) -> None:
    """Of these alone; their local files are removed as well."""
    batch.errors = {2, 7}
    batch.run()
    batch.errors = {7}
    batch.verbs()
    ran = batch.run("--retry-errors")

    assert (ran.code, batch.verbs()) == (0, ["put", "submit"]), ran.err
    assert "2 error rows to retry" in ran.err
    assert [row["id"] for row in batch.answers()] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert [name for name in batch.gathered() if name.startswith("errors/")] == [
        "errors/part-000005.jsonl"
    ]


def test_retry_without_errors(batch: Batch) -> None:
    """No job is submitted."""
    batch.run()
    batch.verbs()
    ran = batch.run("--retry-errors")

    assert (ran.code, batch.verbs()) == (0, [])
    assert "there are no error rows to retry" in ran.err


def test_another_input_is_another_job(batch: Batch) -> None:
    """The difference is reported; no file is changed."""
    batch.run()
    batch.verbs()
    with (batch.folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    (batch.folder / "job.yaml").write_text(JOB + "sampling: {max_tokens: 9}\n")
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (2, [])
    assert "another job named `job` exists on this cluster" in ran.err
    assert "input prompts.jsonl: changed" in ran.err
    assert "sampling.max_tokens: 512 → 9" in ran.err
    assert "--discard-results" in ran.err


def test_starting_over(batch: Batch) -> None:
    """The job's files are removed, on the head and locally; then every row is processed again."""
    batch.per_file = 1
    batch.run()
    batch.verbs()
    (batch.folder / "prompts.jsonl").write_text('{"id": 0, "prompt": "only one"}\n')
    ran = batch.run("--discard-results", "--yes")

    assert (ran.code, batch.verbs()) == (0, ["remove", "put", "put", "submit"]), ran.err
    assert [row["prompt"] for row in batch.answers()] == ["only one"]
    assert "the previous results (10 of 10 rows) are deleted" in ran.err


def test_deleting_results_requires_confirmation(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected without a terminal, or if declined; a dry run does not prompt."""
    batch.run()
    batch.verbs()
    before = batch.gathered()
    without = batch.run("--discard-results")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answers = [False, True]
    confirm = Confirm(answers)
    monkeypatch.setattr(click, "confirm", confirm)
    dry, declined = batch.run("--discard-results", "--dry-run"), batch.run("--discard-results")

    assert (without.code, dry.code, declined.code) == (2, 0, 1)
    assert "canceled: nothing was changed" in declined.err
    assert (batch.gathered(), batch.verbs()) == (before, [])
    assert "no terminal to confirm: Delete the results of `job` (10 of 10" in without.err
    assert "hint: add `--yes`; without `--discard-results`, the job resumes" in without.err
    assert batch.run("--discard-results").code == 0
    assert batch.verbs() == ["remove", "put", "put", "submit"]
    assert confirm.questions == ["Delete the results of `job` (10 of 10 rows)?"] * 2


def test_no_confirmation_without_results(batch: Batch) -> None:
    """The flag is harmless in a job's first run."""
    assert batch.run("--discard-results").code == 0


class Confirm:
    """Replacement of `click.confirm` that records its prompts."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = answers
        self.questions: list[str] = []

    def __call__(self, question: str, *, err: bool) -> bool:
        """Return the next answer."""
        assert err
        self.questions.append(question)
        return self._answers.pop(0)


def test_a_job_without_written_rows_may_change(batch: Batch) -> None:
    """No row is lost."""
    batch.cluster.world.fail["gpu01", "submit"] = Answer(node="gpu01", code=1, err="no")
    assert batch.run().code == 1
    batch.cluster.world.fail.clear()
    batch.verbs()
    (batch.folder / "prompts.jsonl").write_text('{"prompt": "only one"}\n')
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (0, ["remove", "put", "put", "submit"]), ran.err


def test_a_job_that_failed_before_its_first_row_may_change(batch: Batch) -> None:
    """After a correction of a model or a path, the same command starts over."""
    batch.cluster.world.driver, answer = refusing(batch), batch.cluster.world.driver
    assert batch.run().code == 1
    batch.verbs()
    batch.cluster.world.driver = answer
    (batch.folder / "job.yaml").write_text(JOB.replace("org/m", "org/n"))
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (0, ["remove", "put", "put", "submit"]), ran.err
    assert "replaces another job of this name, which has written no rows" in ran.err
    assert len(batch.answers()) == 10


def refusing(batch: Batch) -> Callable[[dict[str, Any]], None]:
    """Return a driver that fails on the model, after the survey and the claim of the output."""

    def driver(job: dict[str, Any]) -> None:
        (batch.work / "output/ledger").mkdir(parents=True)
        (batch.work / "output/ledger/job.json").write_text(
            json.dumps({"job": "job", "cluster": "c", "meaning": {}})
        )
        (batch.work / "manifest.json").write_text("{}")
        progress = {
            "version": 1,
            "state": "failed",
            "submission": job["submission_id"],
            "rows": 10,
            "updated": 1.0,
        }
        error = {"message": "the model is not there", "evidence": "", "hint": "check `model`"}
        (batch.work / "progress.json").write_text(json.dumps({**progress, "error": error}))
        job["status"] = "FAILED"

    return driver


def test_tuning_may_change(batch: Batch) -> None:
    """The change is reported."""
    batch.dies = lambda progress: progress.update(done=4)
    batch.run()
    batch.dies = None
    (batch.folder / "job.yaml").write_text(JOB.replace("max_model_len: 512", "max_model_len: 256"))
    ran = batch.run("--batch-size", "8")

    assert ran.code == 0, ran.err
    assert "changed since the last run: engine.args.max_model_len: 512 → 256" in ran.err
    assert "changed since the last run: engine.batch_size: 256 → 8" in ran.err


def running(batch: Batch) -> None:
    """Leave the job running."""
    batch.dies = lambda progress: progress.update(done=4, status="RUNNING")
    ran = batch.run("--detach")
    assert ran.code == 0, ran.err
    batch.verbs()


def test_detach(batch: Batch) -> None:
    """The result is the Ray job."""
    batch.dies = lambda progress: progress.update(status="RUNNING")
    ran = batch.run("--detach")

    assert (ran.code, ran.out) == (0, "batch-job-1\n")
    assert "the same command watches it" in ran.err


def test_a_running_job_is_awaited(batch: Batch) -> None:
    """And gathered at its end; no job is submitted."""
    running(batch)
    progress = batch.work / "progress.json"
    (job,) = batch.cluster.world.jobs
    looks = itertools.count()
    follow = batch.cluster.world._follow_job

    def ends(argv: Any) -> dict[str, Any]:
        if next(looks) == 3:
            progress.write_text(
                json.dumps({**json.loads(progress.read_text()), "state": "done", "done": 10})
            )
            job["status"] = "SUCCEEDED"
        return follow(argv)

    batch.cluster.world._follow_job = ends  # type: ignore[method-assign]
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (0, []), ran.err
    assert "the job is already running as Ray job batch-job-1; watching it" in ran.err
    assert len(batch.answers()) == 10


def test_ctrl_c_stops_the_wait(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the job."""
    running(batch)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(watch_batch.watch_job.__kwdefaults__ or {}, "sleep", interrupt)
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (130, [])
    assert (
        "the job continues. Watch it again with the same command, or stop it with `vlaunch stop"
        " job`" in ran.err
    )


def test_ctrl_c_while_the_job_starts(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output says how to find its state; the same command continues."""
    real = batch.cluster.world.answer

    def interrupted(command: Command) -> Answer | None:
        if "put" in command.argv:
            raise KeyboardInterrupt
        return real(command)

    with monkeypatch.context() as patch:
        patch.setattr(batch.cluster.world, "answer", interrupted)
        first = batch.run()
    second = batch.run()

    assert (first.code, second.code) == (130, 0), second.err
    assert "`vlaunch jobs` shows whether it runs; the same command continues it" in first.err
    assert len(batch.answers()) == 10


def test_ctrl_c_stops_the_gathering(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """No partial file is left, and no output lost."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_fsync(patch, interrupt)
        ran = batch.run()
    remaining = list(batch.gathered())
    again = batch.run()

    assert (ran.code, remaining, again.code) == (130, [".vlaunch-batch.json"], 0)
    assert "the same command fetches the missing files" in ran.err
    assert len(batch.answers()) == 10


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--discard-results",), "batch job `job` is running"),
        (("--retry-errors",), "its error rows can be retried after it ends"),
    ],
)
def test_a_running_job_is_not_disturbed(batch: Batch, argv: tuple[str, ...], expected: str) -> None:
    """It must be stopped first."""
    running(batch)
    ran = batch.run(*argv)

    assert (ran.code, batch.verbs()) == (2, [])
    assert expected in ran.err


def test_a_changed_job_while_the_old_job_runs(batch: Batch) -> None:
    """The hint: stop it first."""
    running(batch)
    (batch.folder / "job.yaml").write_text(JOB + "sampling: {max_tokens: 9}\n")
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (2, [])
    assert "stop it first: `vlaunch stop job`" in ran.err


def serve(batch: Batch, gpus: int) -> None:
    """Let a server use GPUs."""
    supervision.store_server(
        batch.cluster.world, supervision.make_spec("chat", backend="mp", places={"gpu01": gpus})
    )


def test_no_room_beside_a_server(batch: Batch) -> None:
    """The user of the GPUs and a fix are reported; the cluster is unchanged."""
    serve(batch, 16)
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (1, [])
    assert "0 of 16 GPUs are free in Ray, the job needs 1: server `chat` uses 16" in ran.err
    assert "`vlaunch stop chat`" in ran.err
    assert "--queue" in ran.err
    assert not (batch.folder / "out").exists()


def test_missing_room_is_reported_before_a_model_is_copied(batch: Batch) -> None:
    """The copies would be useless."""
    serve(batch, 16)
    ran = batch.run("--fetch")

    assert (ran.code, batch.verbs()) == (1, [])
    assert "0 of 16 GPUs are free in Ray" in ran.err
    assert "Look for org/m" not in ran.err


def test_a_job_may_wait_for_room(batch: Batch) -> None:
    """If requested; then it is a warning."""
    serve(batch, 16)
    ran = batch.run("--queue")

    assert ran.code == 0, ran.err
    assert "the job waits until they are free" in ran.err


def test_a_range_uses_free_gpus(batch: Batch) -> None:
    """And reports their number."""
    serve(batch, 13)
    ran = batch.run("--replicas", "1-8")

    assert ran.code == 0, ran.err
    assert "3 of 16 GPUs are free in Ray; the job can use 8" in ran.err


def test_a_server_names_the_user_of_the_gpus(batch: Batch) -> None:
    """A batch job, by name."""
    batch.dies = lambda progress: progress.update(status="RUNNING")
    batch.run("--detach", "--replicas", "12")
    unit = {"bundles": [{"unit_resources": {"GPU": 1.0}}] * 12, "state": "CREATED"}
    world = batch.cluster.world
    world.responses["jobs"] = {
        "jobs": world.jobs,
        "nodes": world.ray_table(),
        "actors": [],
        "groups": [unit],
        **world.head_report(),
    }
    ran = batch.cluster.run("serve", "--model", "org/m", "--no-wait", "--skip-network-check")

    assert ran.code == 1
    assert "batch job `job` uses 12" in ran.err
    assert "`vlaunch stop job`" in ran.err


def test_batch_jobs_require_ray(batch: Batch) -> None:
    """Rejected before any node is contacted."""
    batch.cluster.write(batch.cluster.path.read_text() + "ray: none\n")
    batch.cluster.commands.clear()
    ran = batch.run()

    assert (ran.code, batch.cluster.commands) == (2, [])
    assert "batch jobs run in Ray, and this cluster has none" in ran.err


def test_no_room_on_the_heads_disk(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported before any transfer."""
    real = batch.cluster.world.probe
    monkeypatch.setattr(
        batch.cluster.world, "probe", lambda *argv: real(*argv).replace(" 999999999 ", " 1000 ")
    )
    ran = batch.run()

    assert (ran.code, batch.verbs()) == (1, [])
    assert "1 MiB free under" in ran.err
    assert "vlaunch jobs remove" in ran.err


def test_no_cluster(batch: Batch) -> None:
    """`vlaunch up` comes first."""
    batch.cluster.world.stop("gpu01")
    ran = batch.run()

    assert (ran.code, [verb for verb in batch.verbs() if verb != "unpack"]) == (1, [])
    assert "gpu01: its container is not running (exited)" in ran.err


def test_a_model_that_no_node_may_download(batch: Batch) -> None:
    """As for a server."""
    world = batch.cluster.world
    batch.cluster.write(batch.cluster.path.read_text() + "env: {HF_HUB_OFFLINE: '1'}\n")
    assert batch.cluster.run("up").code == 0
    world.changes.clear()
    ran = batch.run()

    assert ran.code == 1
    assert "does not have org/m in its cache" in ran.err


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["rows/mine.txt"], "contains files that vlaunch did not write"),
        (["errors/notes"], "contains files that vlaunch did not write"),
        (["rows/part-000001.jsonl"], "contains the output of another batch job"),
        (["rows"], "should be a folder, but"),
        (["summary.json"], "contains files that vlaunch did not write"),
    ],
)
def test_an_output_folder_with_other_files(batch: Batch, names: list[str], expected: str) -> None:
    """Rejected before any change."""
    for name in names:
        path = batch.folder / "out" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    before = batch.gathered()
    ran = batch.run()

    assert (ran.code, batch.verbs(), batch.gathered()) == (2, [], before)
    assert expected in ran.err


def test_an_output_folder_of_another_job(batch: Batch) -> None:
    """By its mark."""
    batch.run()
    (batch.folder / "other.yaml").write_text(JOB)
    batch.verbs()
    ran = batch.cluster.run("batch", "other.yaml")

    assert (ran.code, batch.verbs()) == (2, [])
    assert "contains the output of batch job `job` of cluster c" in ran.err


def test_an_output_folder_of_links(batch: Batch) -> None:
    """They may lead anywhere."""
    (batch.folder / "elsewhere").mkdir()
    (batch.folder / "out").mkdir()
    (batch.folder / "out/rows").symlink_to(batch.folder / "elsewhere")
    ran = batch.run()

    assert (ran.code, batch.verbs(), list((batch.folder / "elsewhere").iterdir())) == (2, [], [])
    assert "contains symbolic links, and vlaunch does not write through them" in ran.err


def test_an_output_folder_that_another_job_fills_meanwhile(batch: Batch) -> None:
    """Its answers are not replaced; those of the second job stay on the head."""
    (batch.folder / "other.yaml").write_text(JOB)
    finish = batch.driver

    def meanwhile(job: dict[str, Any]) -> None:
        batch.cluster.world.driver = finish
        assert batch.cluster.run("batch", "other.yaml").code == 0
        finish(job)

    batch.cluster.world.driver = meanwhile
    ran = batch.run()
    remaining = batch.gathered()

    assert (ran.code, json.loads(remaining[".vlaunch-batch.json"])["job"]) == (2, "other")
    assert "out contains the output of batch job `other`" in ran.err
    (batch.folder / "job.yaml").write_text(JOB.replace("path: out", "path: out2"))
    assert batch.run().code == 0
    assert (batch.folder / "out2/summary.json").exists()


def test_output_unknown_to_the_head(batch: Batch) -> None:
    """It is neither mixed with new output nor silently lost."""
    batch.run()
    assert batch.cluster.run("jobs", "remove", "job", "--yes").code == 0
    before = batch.gathered()
    batch.verbs()
    ran = batch.run()

    assert (ran.code, batch.verbs(), batch.gathered()) == (2, [], before)
    assert "but the head has no record of it" in ran.err
    refused = batch.run("--discard-results")
    assert (refused.code, batch.gathered()) == (2, before)
    assert batch.run("--discard-results", "--yes").code == 0


@pytest.mark.parametrize(
    "files",
    [
        [{"path": "../../escape", "bytes": 1, "sha256": "0" * 64}],
        [{"path": "rows/part-000001.jsonl", "bytes": 5, "sha256": "0" * 64}],
    ],
)
def test_a_head_that_lies_about_the_output(batch: Batch, files: list[dict[str, Any]]) -> None:
    """None of its output is stored locally."""
    contents = {"outputs.json": json.dumps({"files": files}).encode()}
    batch.cluster.contents = contents
    ran = batch.run()

    assert ran.code == 1
    assert list(batch.gathered()) == [".vlaunch-batch.json"]
    assert not (batch.folder.parent / "escape").exists()


def test_this_machines_disk_is_full(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """No partial file is left, and the same command continues."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        at_fsync(patch, full)
        ran = batch.run()
    remaining = list(batch.gathered())
    again = batch.run()

    assert (ran.code, again.code, remaining) == (1, 0, [".vlaunch-batch.json"])
    assert "this machine’s disk is full" in ran.err
    assert len(batch.answers()) == 10


def test_a_dry_run_prints_the_runs_commands(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With identical bytes, and without a change."""
    monkeypatch.setattr(batch_plan, "PIECE_BYTES", 80)
    dry = batch.run("--dry-run")
    assert (dry.code, batch.verbs(), (batch.folder / "out").exists()) == (0, [], False), dry.err
    code, by_script = Shell(tmp_path / "elsewhere").run(dry.out)
    batch.run()
    world = batch.cluster.world
    by_run = [
        Sent(
            login=command.node,
            options="",
            argv=command.argv,
            stdin=command.stdin() if command.stdin else b"",
        )
        for command in world.changes
    ]

    assert code == 0
    assert by_script == by_run
    assert len([sent for sent in by_script if "put" in sent.argv]) == 5


@pytest.mark.parametrize(
    ("state", "expected"),
    [("RUNNING", "is already running as Ray job batch-job-1"), ("", "all rows were already done")],
)
def test_a_dry_run_explains_an_empty_plan(batch: Batch, state: str, expected: str) -> None:
    """An empty script alone would look like a mistake."""
    batch.dies = (lambda progress: progress.update(status=state)) if state else None
    batch.run(*(["--detach"] if state else []))
    ran = batch.run("--dry-run")

    assert ran.code == 0, ran.err
    assert "# vlaunch batch: cluster c" in ran.out
    assert f"# note: {'the job ' if state else ''}{expected}" in ran.out


def test_input_that_only_a_driver_can_read(batch: Batch) -> None:
    """It is not reported as unchanged."""
    (batch.folder / "hf/in.jsonl").write_bytes((batch.folder / "prompts.jsonl").read_bytes())
    path = f"nodes:{batch.folder}/hf/in.jsonl"
    (batch.folder / "job.yaml").write_text(JOB.replace("prompts.jsonl", path))
    first, second = batch.run(), batch.run()

    assert (first.code, second.code) == (0, 0), first.err
    assert (
        f"not read again: {path}; if it has changed, start over with --discard-results"
        in second.err
    )


def test_an_offline_dry_run_contacts_no_node(batch: Batch) -> None:
    """It assumes empty nodes."""
    command_count = len(batch.cluster.commands)
    ran = batch.run("--dry-run", "--offline")

    assert ran.code == 0
    assert "batch.pyz put" in ran.out
    assert len(batch.cluster.commands) == command_count


def test_json_events(batch: Batch) -> None:
    """The last one has the counts."""
    batch.errors = {3}
    ran = batch.run("--json")
    last = ran.events[-1]

    assert (last["kind"], last["data"]["done"], last["data"]["errors"], last["data"]["rows"]) == (
        "done",
        9,
        1,
        10,
    )
    assert last["data"]["output"] == "out"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "pass a job file, or --model"),
        (("job.yaml", "--offline"), "--offline requires --dry-run"),
        (("job.yaml", "--discard-results", "--retry-errors"), "choose one"),
        (("job.yaml", "--model", "x"), "--model"),
        (("missing.yaml",), "missing.yaml"),
        (("job.yaml", "--no-wait", "--strict"), "--no-wait does not wait"),
        (
            ("--model", "m", "--input", "a.txt", "--output", "o", "--allow", "/"),
            "--allow applies only to paths in JOB.yaml",
        ),
        (("job.yaml", "--replicas", "17"), "17 GPUs"),
    ],
)
def test_invalid_requests(batch: Batch, argv: tuple[str, ...], expected: str) -> None:
    """Exit code 2, without contacting a node."""
    command_count = len(batch.cluster.commands)
    ran = batch.cluster.run("batch", *argv)

    assert (ran.code, len(batch.cluster.commands)) == (2, command_count)
    assert expected in ran.err


def test_flags_alone(batch: Batch) -> None:
    """The common case needs no file; the same flags mean the same job."""
    argv = (
        "--model",
        "org/m",
        "--input",
        "prompts.jsonl",
        "--output",
        "out/",
        "--output-format",
        "jsonl",
    )
    first = batch.cluster.run("batch", *argv)
    batch.verbs()
    second = batch.cluster.run("batch", *argv)

    assert (first.code, second.code, batch.verbs()) == (0, 0, []), first.err
    assert len(batch.answers()) == 10
