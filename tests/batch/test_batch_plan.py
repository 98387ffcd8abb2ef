"""Plans of a repeated `vlaunch batch`: start, resume, wait, nothing, or reject."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.batch import batch_plan
from launcher.batch.batch_plan import (
    BatchOptions,
    BatchRequest,
    BatchSnapshot,
    BatchStart,
    plan_batch,
)
from launcher.batch.checked_job import CheckedJob
from launcher.batch.driver.progress import Progress
from launcher.batch.flags import job_from_file
from launcher.batch.identity import diff_identity, tuning_values
from launcher.batch.inputs import ShippedFile, read_shipped
from launcher.batch.job_spec import job_spec
from launcher.batch.job_store import JobEntry
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError
from launcher.core.plan import Gate
from launcher.tools.host import HostFacts
from launcher.tools.site import Site
from launcher.tools.site.snapshot import ClusterSnapshot

Load = Callable[..., Inventory]
JOB = "model: org/m\nread: in.txt\nwrite: out\n"
DATA = bytes(range(250))
_FIRST, _SECOND = "1" * 64, "2" * 64


@pytest.fixture
def request_(load: Load, tmp_path: Path) -> BatchRequest:
    """Return a request for a job of one small file."""
    (tmp_path / "in.txt").write_text("a\nb\n")
    (tmp_path / "j.yaml").write_text(JOB)
    return ask(load(), job_from_file(tmp_path / "j.yaml", {}))


def ask(inventory: Inventory, job: CheckedJob) -> BatchRequest:
    files = read_shipped(job)
    return BatchRequest(job=job, spec=job_spec(job, files, inventory), files=files)


def entry_of(request: BatchRequest, state: str = "", **changes: Any) -> JobEntry:
    """Return the job's folder after an earlier run."""
    progress = Progress(state=state, updated=1.0 if state else 0.0, rows=2, **changes)
    return JobEntry(
        name="j",
        job=dict(request.spec),
        progress=progress,
        inputs={file.to: file.bytes for file in request.files},
    )


def ray(*states: str) -> dict[str, Any]:
    jobs = [
        {
            "submission_id": f"batch-j-{at}",
            "status": state,
            "metadata": {"vlaunch.batch": "j", "vlaunch.gpus": "1"},
        }
        for at, state in enumerate(states, start=1)
    ]
    return {"jobs": jobs}


def decide(
    load: Load,
    request: BatchRequest,
    entry: JobEntry | None = None,
    payload: dict[str, Any] | None = None,
    **how: bool,
) -> BatchStart:
    snapshot = BatchSnapshot(
        cluster=ClusterSnapshot(site=Site(load()), payload=payload or {}),
        entry=entry or JobEntry(absent=True),
    )
    return plan_batch(snapshot, request, BatchOptions(**how))


def stages(start: BatchStart) -> list[str]:
    return [stage.id for stage in start.plan.stages]


def stdin_payload(start: BatchStart, stage: str) -> dict[str, Any]:
    """Return the input of a stage's only step."""
    stdin = next(entry.steps[0].command.stdin for entry in start.plan.stages if entry.id == stage)
    assert stdin is not None
    payload: dict[str, Any] = json.loads(stdin())
    return payload


def test_a_new_job(load: Load, request_: BatchRequest) -> None:
    """It is stored before its files are sent, to show their owner to the next run."""
    start = decide(load, request_)

    assert (stages(start), start.job) == (["prepare", "ship", "submit"], "batch-j-1")


def start_gates(inventory: Inventory, request: BatchRequest) -> list[Gate]:
    """Return the gates of a new job's plan."""
    site = Site(inventory, {node.name: HostFacts() for node in inventory.nodes})
    snapshot = BatchSnapshot(cluster=ClusterSnapshot(site=site), entry=JobEntry(absent=True))
    stages = plan_batch(snapshot, request, BatchOptions()).plan.stages
    return [gate for stage in stages for gate in stage.gates]


def test_arguments_of_requests_are_those_of_the_server(load: Load, tmp_path: Path) -> None:
    """vLLM's API server answers them in the replicas."""
    (tmp_path / "in.jsonl").write_text("{}\n")
    text = "model: org/m\nread: in.jsonl\nwrite: {path: out, format: openai}\n"
    (tmp_path / "j.yaml").write_text(f"{text}engine: {{args: {{tool_call_parser: hermes}}}}\n")
    request = ask(load(), job_from_file(tmp_path / "j.yaml", {}))
    (query,) = start_gates(load(), request)[-1].queries

    assert query.argv[-4:] == ("serve", "org/m", "--tool-call-parser", "hermes")


@pytest.mark.parametrize("form", ["openai", "jsonl"])
def test_vllm_checks_the_adapters_of_a_job(load: Load, tmp_path: Path, form: str) -> None:
    """With its arguments, before anything is sent."""
    (tmp_path / "in.jsonl").write_text("{}\n")
    text = (
        f"model: org/m\nread: in.jsonl\nlora: {{sql: /l/sql}}\nwrite: {{path: out, format: {form}}}"
    )
    (tmp_path / "j.yaml").write_text(text)
    request = ask(load(), job_from_file(tmp_path / "j.yaml", {}))
    (query,) = start_gates(load(), request)[-1].queries

    if form == "openai":
        words = ("serve", "org/m", "--enable-lora", "--lora-modules", "sql=/l/sql")
        assert query.argv[-5:] == words
    else:
        assert json.loads(query.argv[-1]) == {
            "model": "org/m",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "enable_lora": True,
            "lora_modules": ["sql=/l/sql"],
        }


def test_gates_of_a_job(load: Load, request_: BatchRequest, tmp_path: Path) -> None:
    """Its model must be on the nodes, unless a class loads it."""

    def gates(request: BatchRequest) -> list[str]:
        return [gate.id for gate in start_gates(load(), request)]

    assert gates(request_) == ["cluster", "model", "room", "disk", "engine-flags"]
    (tmp_path / "own.py").write_text("class Own: ...\n")
    text = "read: in.txt\nwrite: out\npredict: {class: own.py:Own}\n"
    (tmp_path / "j.yaml").write_text(text)
    own = ask(load(), job_from_file(tmp_path / "j.yaml", {}))
    assert gates(own) == ["cluster", "disk"]


@pytest.mark.parametrize("state", ["running", "failed", "refused", "stopped", "starting"])
def test_a_job_that_ended_resumes(load: Load, request_: BatchRequest, state: str) -> None:
    """For any end, without sending files twice."""
    start = decide(
        load, request_, entry_of(request_, state, done=1, submission="batch-j-3"), ray("FAILED")
    )

    assert (stages(start), start.job) == (["prepare", "submit"], "batch-j-4")
    assert "continues where it stopped: 1 of 2 rows are done" in start.plan.notes


def test_a_finished_job(load: Load, request_: BatchRequest) -> None:
    """The plan is empty until error rows are to be retried."""
    done, failed = entry_of(request_, "done", done=2), entry_of(request_, "done", done=1, errors=1)

    assert decide(load, request_, done).finished
    assert decide(load, request_, done, retry_errors=True).finished
    assert decide(load, request_, failed).finished
    assert stages(decide(load, request_, failed, retry_errors=True)) == ["prepare", "submit"]


@pytest.mark.parametrize("retry", [True, False])
def test_error_rows_are_retried_on_request_only(
    load: Load, request_: BatchRequest, retry: bool
) -> None:
    """The driver finds the request in job.json."""
    start = decide(
        load, request_, entry_of(request_, "failed", done=1, errors=1), retry_errors=retry
    )
    stdin = start.plan.steps[0].command.stdin

    assert stdin is not None
    assert json.loads(stdin())["retry_errors"] is retry


def test_uncounted_error_rows_are_retried(load: Load, request_: BatchRequest) -> None:
    """A driver that exited early counted none; the retry is still planned."""
    start = decide(load, request_, entry_of(request_, "failed"), retry_errors=True)
    stdin = start.plan.steps[0].command.stdin

    assert stdin is not None
    assert json.loads(stdin())["retry_errors"] is True
    assert "error rows to retry" in start.plan.notes


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_running_job(load: Load, request_: BatchRequest, state: str) -> None:
    """The command waits for it."""
    start = decide(load, request_, entry_of(request_, "running"), ray("FAILED", state))

    assert (start.attached, start.job, stages(start)) == (True, "batch-j-2", [])


def test_a_driver_that_is_still_exiting(load: Load, request_: BatchRequest) -> None:
    """Ray reports its job as finished, but it still has the lock, which a second one would need."""
    entry = entry_of(request_, "running")
    ending = JobEntry(name="j", job=entry.job, progress=entry.progress, alive=True)
    with pytest.raises(RequestError, match="is still exiting"):
        decide(load, request_, ending, ray("STOPPED"))


def test_a_driver_that_lives_while_ray_is_silent(load: Load, request_: BatchRequest) -> None:
    """No second driver is started."""
    entry = entry_of(request_, "running")
    lives = JobEntry(name="j", job=entry.job, progress=entry.progress, alive=True)
    with pytest.raises(RequestError, match="Ray did not report its job id: timed out"):
        decide(load, request_, lives, {"error": "timed out"})


def test_starting_over(load: Load, request_: BatchRequest) -> None:
    """Existing files are removed, and everything is sent."""
    start = decide(load, request_, entry_of(request_, "done", done=2), restart=True)

    assert (stages(start), start.fresh) == (["clear", "prepare", "ship", "submit"], True)
    assert stdin_payload(start, "prepare")["restart"] is True
    assert "starts over; the previous results (2 of 2 rows) are deleted" in start.plan.notes
    assert len(decide(load, request_, entry_of(request_, "failed"), restart=True).plan.notes) == 1


def test_files_of_another_job_are_not_reused(
    load: Load, request_: BatchRequest, tmp_path: Path
) -> None:
    """They may have the same size."""
    entry = entry_of(request_)
    (tmp_path / "in.txt").write_text("c\nd\n")
    start = decide(load, ask(load(), request_.job), replace(entry, written=False))

    assert stages(start) == ["clear", "prepare", "ship", "submit"]


def test_another_job_of_this_name(load: Load, request_: BatchRequest, tmp_path: Path) -> None:
    """Rejected with the difference."""
    (tmp_path / "in.txt").write_text("c\n")
    with pytest.raises(RequestError) as raised:
        decide(load, ask(load(), request_.job), entry_of(request_, "failed", done=1))

    assert raised.value.evidence == "input in.txt: changed (4 → 2 bytes)"
    assert "`--discard-results`, which deletes the results (1 of 2 rows)" in raised.value.hint


@pytest.mark.parametrize("state", ["refused", "failed", "running", "done"])
@pytest.mark.parametrize("retry", [True, False])
def test_a_job_without_written_rows_may_be_replaced(
    load: Load, request_: BatchRequest, tmp_path: Path, state: str, retry: bool
) -> None:
    """For any end and any unwritten answers. Files in an unchecked object store stay."""
    (tmp_path / "in.txt").write_text("c\n")
    entry = entry_of(request_, state, done=1)
    start = decide(
        load, ask(load(), request_.job), replace(entry, written=False), retry_errors=retry
    )

    assert (stages(start), start.fresh, start.finished) == (
        ["clear", "prepare", "ship", "submit"],
        True,
        False,
    )
    assert (
        stdin_payload(start, "prepare")["restart"],
        stdin_payload(start, "prepare")["retry_errors"],
    ) == (
        False,
        False,
    )
    assert start.plan.notes[1:] == ("replaces another job of this name, which has written no rows",)
    with pytest.raises(RequestError, match="another job named `j` is running"):
        decide(load, ask(load(), request_.job), replace(entry, written=False), ray("RUNNING"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShippedFile:
    """Return a file of 250 bytes in a folder with an awkward name; pieces have 100 bytes."""
    monkeypatch.setattr(batch_plan, "PIECE_BYTES", 100)
    path = tmp_path / "it's a $folder" / "-rows"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return ShippedFile(
        to="input/0000-rows",
        label="rows",
        path=path,
        bytes=250,
        sha256=hashlib.sha256(DATA).hexdigest(),
    )


@pytest.mark.parametrize(
    ("have", "offsets"),
    [
        ({}, [0, 100, 200]),
        ({"input/0000-rows": 250}, []),
        ({"input/0000-rows": 249}, [0, 100, 200]),
        ({"input/.0000-rows.part": 130}, [130, 230]),
        # all bytes, but not the announced content
        ({"input/.0000-rows.part": 250}, [0, 100, 200]),
        ({"input/.0000-rows.part": 900}, [0, 100, 200]),
    ],
)
def test_only_missing_bytes_are_sent(
    load: Load, file: ShippedFile, have: dict[str, int], offsets: list[int]
) -> None:
    """From the end of the partial file."""
    steps = batch_plan.ship_steps(Site(load()), "/w", have, [file])
    sent = [step.command.stdin() if step.command.stdin else b"" for step in steps]
    arguments = [step.command.argv for step in steps]

    assert [int(argv[argv.index("--offset") + 1]) for argv in arguments] == offsets
    assert b"".join(sent) == DATA[offsets[0] if offsets else 250 :]
    assert ["--last" in argv for argv in arguments] == [at == offsets[-1] for at in offsets]


@pytest.mark.parametrize("have", [{}, {"input/.0000-rows.part": 130}])
def test_a_script_reads_the_same_bytes(load: Load, file: ShippedFile, have: dict[str, int]) -> None:
    """Even of a file with an option's name, and if `head` exits before `tail`."""
    for step in batch_plan.ship_steps(Site(load()), "/w", have, [file]):
        shown = f"set -euo pipefail; {step.command.shown_stdin} | cat"
        done = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, cwd="/")

        assert step.command.stdin is not None
        assert done.stdout == step.command.stdin()


def test_an_empty_file_is_sent(load: Load, file: ShippedFile, tmp_path: Path) -> None:
    """As one empty piece, which completes it."""
    path = tmp_path / "empty"
    path.touch()
    digest = hashlib.sha256().hexdigest()
    (step,) = batch_plan.ship_steps(
        Site(load()),
        "/w",
        {},
        [ShippedFile(to="input/0000-e", label="e", path=path, bytes=0, sha256=digest)],
    )

    assert step.command.stdin is not None
    assert step.command.stdin() == b""
    assert step.command.argv[-2:] == ("--last", digest)


def test_files_are_read_when_sent(load: Load, file: ShippedFile) -> None:
    """A plan has no file in memory; a missing file is reported then."""
    steps = batch_plan.ship_steps(Site(load()), "/w", {}, [file])
    file.path.unlink()

    assert steps[0].command.stdin is not None
    with pytest.raises(FileNotFoundError):
        steps[0].command.stdin()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"model": "m"}, {"model": "m"}, []),
        ({"prompt.template": "a"}, {"prompt.template": "b"}, ['prompt.template: "a" → "b"']),
        ({"sampling.seed": 1}, {}, ["sampling.seed: 1 → nothing"]),
        ({}, {"read.limit": 5}, ["read.limit: nothing → 5"]),
        ({"keep": ["a", "b: text"]}, {"keep": ["a"]}, ["keep: a, b: text → a"]),
        (
            {"input x.jsonl": f"{_FIRST}, 1234 bytes"},
            {"input x.jsonl": f"{_SECOND}, 1240 bytes"},
            ["input x.jsonl: changed (1,234 → 1,240 bytes)"],
        ),
        (
            {"input x.jsonl": f"{_FIRST}, 1234 bytes"},
            {"input x.jsonl": f"{_SECOND}, 1234 bytes"},
            ["input x.jsonl: changed (still 1,234 bytes)"],
        ),
        (
            {"input x": f"{_FIRST}, 1 bytes", "input order": ["x"]},
            {"input y": f"{_FIRST}, 1 bytes", "input order": ["y"]},
            ["input y: new", "input x: gone"],
        ),
        ({"input order": ["x", "y"]}, {"input order": ["y", "x"]}, ["input order: x, y → y, x"]),
        ({"code a.py": "?"}, {"code a.py": f"{_FIRST}, 1 bytes"}, ["code a.py: changed"]),
    ],
)
def test_changes_are_separate_lines(
    old: dict[str, Any], new: dict[str, Any], expected: list[str]
) -> None:
    """With the job file's keys."""
    assert diff_identity(old, new) == expected


def test_a_long_value_is_shown_around_the_change() -> None:
    """A long template may differ in one character."""
    old, new = "a" * 500 + "X" + "b" * 500, "a" * 500 + "Y" + "b" * 500

    (line,) = diff_identity({"prompt.template": old}, {"prompt.template": new})

    before, after = line.removeprefix("prompt.template: ").split(" → ")
    assert "aX" in before
    assert "Yb" in after
    assert len(line) < 180


def test_differences_are_sanitized() -> None:
    """In values and in keys."""
    lines = diff_identity({"a\x1b[31m\n": "x\x1b]0;y\x07\u202e", "b": {"c": ["\n"]}}, {})

    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_the_settings_of_a_broken_job_are_those_that_can_be_read() -> None:
    """`job.json` of a node may have any form."""
    engine = {"tp": 2, "args": [1]}
    assert tuning_values({"prompt": {"chat": [1]}, "engine": engine, "limits": "x"}) == {
        "engine.tp": 2,
        "limits": "x",
    }
