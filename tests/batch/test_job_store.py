"""Commands for the job store and parsers of its answers, including a hostile head's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.batch import job_store
from launcher.batch.driver.progress import JobFailure, Progress, parse_progress
from launcher.batch.job_store import OutputFile
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer

WORK = "/data/huggingface/vlaunch/c/batch/j"
SHA = "a" * 64


def answer(payload: object, *, code: int = 0) -> Answer:
    return Answer(
        node="gpu01", code=code, out=payload if isinstance(payload, str) else json.dumps(payload)
    )


def test_commands() -> None:
    """With the program's exact arguments."""
    program = ("python3", "/opt/vlaunch/batch.pyz")

    assert job_store.build_command("list", "/a") == (*program, "list", "/a")
    put = (*program, "put", WORK, "x", "--offset", "0")
    assert job_store.build_command("put", WORK, "x", offset=0, last="") == put
    assert job_store.build_command("put", WORK, "x", offset=0, last=SHA) == (*put, "--last", SHA)


def test_a_missing_job() -> None:
    """No error."""
    assert job_store.parse_entry(answer({"absent": True})).absent


def test_a_job() -> None:
    """All fields that a repeated command depends on."""
    payload = {
        "name": "j",
        "job": {"job": "j", "digest": "d", "identity": {"model": "m"}},
        "alive": True,
        "progress": {
            "state": "running",
            "rows": 9,
            "done": 3,
            "errors": 1,
            "replicas": {"ready": 1, "wanted": 2},
        },
        "inputs": {"input/0000-x": 5, "input/.0001-y.part": 2},
    }
    entry = job_store.parse_entry(answer(payload))

    assert (entry.name, entry.digest, entry.identity, entry.alive) == (
        "j",
        "d",
        {"model": "m"},
        True,
    )
    assert (entry.progress.rows, entry.progress.accounted, entry.progress.ready) == (9, 4, 1)
    assert entry.inputs == {"input/0000-x": 5, "input/.0001-y.part": 2}


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-rf", "A", "x" * 41, "x\ny"])
def test_invalid_names_are_not_listed(name: str) -> None:
    """Names from a node become parts of paths and command lines."""
    assert (
        job_store.parse_list(
            answer({"jobs": [{"name": name, "job": {}}, {"name": "good", "job": {}}, "nonsense"]})
        )[0].name
        == "good"
    )


def outputs(files: Any) -> tuple[OutputFile, ...]:
    """Parse a head's list of files."""
    return job_store.parse_outputs("n1", json.dumps({"files": files}))


@pytest.mark.parametrize(
    "path",
    [
        "../../.ssh/authorized_keys",
        "/etc/passwd",
        "rows/../../x",
        "rows/part-000001.parquet/../../x",
        "rows/x.parquet",
        "ledger/part-000001.json",
        "rows/part-1.parquet",
        "summary.json\n",
        "rows\\part-000001.jsonl",
        "",
        "rows/part-٠٠٠٠٠١.jsonl",
        "errors/part-000001.parquet",
    ],
)
def test_a_hostile_head_names_no_other_files(path: str) -> None:
    """Only files that vlaunch jobs write are ever fetched."""
    with pytest.raises(UnreadableAnswer, match="no vlaunch job writes"):
        outputs([{"path": path, "bytes": 1, "sha256": SHA}])


@pytest.mark.parametrize(
    "files",
    [
        [{"path": 7, "bytes": 1, "sha256": SHA}],
        [{"path": None, "bytes": 1, "sha256": SHA}],
        [{"path": "summary.json", "bytes": -1, "sha256": SHA}],
        [{"path": "summary.json", "bytes": True, "sha256": SHA}],
        [{"path": "summary.json", "bytes": 1, "sha256": None}],
        [{"path": "summary.json"}],
        ["summary.json"],
        [{"path": "summary.json", "bytes": 1, "sha256": SHA}] * 2,
        7,
    ],
)
def test_an_invalid_list_of_files(files: Any) -> None:
    """An error."""
    with pytest.raises(UnreadableAnswer):
        outputs(files)


def test_output_files() -> None:
    """With their expected sizes and checksums."""
    paths = [
        "rows/part-000001.parquet",
        "rows/part-1234567.jsonl",
        "errors/part-000002.jsonl",
        "summary.json",
    ]
    message = [{"path": path, "bytes": at, "sha256": SHA} for at, path in enumerate(paths)]

    assert outputs(message) == tuple(
        OutputFile(path=path, bytes=at, sha256=SHA) for at, path in enumerate(paths)
    )


@pytest.mark.parametrize(
    "expected",
    ["", "Traceback", "[]", "7", '{"error": "no such job"}', "{…[truncated]", "[" * 99_999],
)
def test_no_answer(expected: str) -> None:
    """The program's own error is reported verbatim; other output is no answer."""
    with pytest.raises(UnreadableAnswer) as raised:
        job_store.parse_answer(answer(expected, code=1))

    assert ("no such job" in raised.value.message) == ("error" in expected)


def test_a_running_job() -> None:
    """Ray's status, the driver's progress, and log lines; progress bars in them use carriage
    returns.
    """
    payload = {
        "job": {"status": "FAILED", "message": "exit code -9", "driver_exit_code": -9},
        "log": "a\r50%\r\n\nb\n",
        "offset": 12,
        "progress": {"state": "running", "submission": "batch-j-1"},
    }
    update = job_store.parse_follow(answer(payload))

    assert (update.status, update.exit_code, update.lines, update.offset) == (
        "FAILED",
        -9,
        ("a", "50%", "b"),
        12,
    )
    assert (update.progress.state, update.progress.over) == ("running", False)


@pytest.mark.parametrize(
    "payload",
    [
        {"job": {"error": "timed out"}, "offset": 0},
        {"job": {"status": "RUNNING"}},
        {"error": "refused"},
        {"job": 7},
    ],
)
def test_an_empty_answer(payload: dict[str, Any]) -> None:
    """Silence is no end."""
    with pytest.raises(UnreadableAnswer):
        job_store.parse_follow(answer(payload))


@pytest.mark.parametrize(
    "expected",
    [
        None,
        [],
        "x",
        {
            "rows": "many",
            "done": -3,
            "eta": float("nan"),
            "warnings": 7,
            "error": "x",
            "replicas": [],
        },
    ],
)
def test_invalid_progress(expected: object) -> None:
    """An invalid number becomes zero, without an exception."""
    progress = parse_progress(expected)

    assert (progress.done, progress.warnings, progress.error) == (0, (), None)


def test_a_drivers_error_keeps_its_lines() -> None:
    """Evidence has several; a message has one."""
    error = {"message": "it\nbroke", "evidence": "one\ntwo", "hint": "do\nthis"}
    progress = parse_progress({"state": "failed", "error": error})

    assert progress.over
    assert progress.error == JobFailure(message="it broke", evidence="one\ntwo", hint="do\nthis")
    assert Progress().error is None


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1", "NaN", "Infinity", "1e300"])
def test_impossible_numbers(number: str) -> None:
    """They are dropped; other fields are parsed."""
    result = parse_progress(
        json.loads(f'{{"state": "running", "done": {number}, "eta": {number}}}')
    )

    assert (result.state, result.done, result.eta) == ("running", 0, 0.0)
