"""The cause of a rank's exit from Ray and its log, and the rank to blame among several."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from launcher.batch.driver import postmortem

LOST = (
    "(Worker_DP0 pid=7) ERROR 11-21 01:53:14 [executor.py:1063] RuntimeError: pair.cc:553"
    " Connection closed by peer [10.0.0.2]"
)
KILLED = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes"
    " include: (1) the OOM killer"
)


class Died(Exception):
    """Ray's exception for an exited actor."""


class EngineDeadError(Exception):
    """vLLM's exception for an exited engine."""


class Task(Exception):
    """Ray's wrapper of an exception in a rank."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"\x1b[36mray::Rank.answer()\x1b[39m (pid=1)\n  File somewhere\n{cause}")
        self.cause = cause


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's relevant exceptions."""
    module = ModuleType("ray")
    module.exceptions = SimpleNamespace(  # type: ignore[attr-defined]
        RayActorError=Died,
        NodeDiedError=type("NodeDied", (Died,), {}),
        OutOfMemoryError=type("OutOfMemory", (Died,), {}),
    )
    monkeypatch.setitem(sys.modules, "ray", module)


def gone(detail: str = KILLED) -> Died:
    """Return Ray's long message."""
    return Died(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Rank\n\tpid:"
        " 9\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
        f" Worker exit detail: {detail}"
    )


@pytest.mark.parametrize(
    ("problem", "lines", "expected"),
    [
        (
            gone(),
            ["all is well"],
            "its process was killed (SIGKILL: out of memory, or by an operator)",
        ),
        (
            gone(),
            ["Fatal Python error: Segmentation fault", "more"],
            "Fatal Python error: Segmentation fault",
        ),
        (gone("Worker exits with an exit code 3."), [], "exit status 3"),
        (
            Died("The actor died because its node has died."),
            ["Fatal Python error: Aborted"],
            "its node is gone",
        ),
        (
            Task(ValueError("no such model")),
            ["Fatal Python error: old"],
            "ValueError: no such model",
        ),
        (
            Task(EngineDeadError("see above")),
            [LOST],
            "RuntimeError: pair.cc:553 Connection closed by peer [10.0.0.2]",
        ),
        (
            Task(EngineDeadError("see above")),
            [
                "x ERROR 11-21 [m.py:3] Worker proc VllmWorker-0 died unexpectedly (exit code:"
                " -11), shutting down"
            ],
            "Worker proc VllmWorker-0 died unexpectedly (exit code: -11)",
        ),
        (Task(EngineDeadError("see above")), ["nothing"], "EngineDeadError: see above"),
        (
            Task(RuntimeError("Engine core initialization failed. See root cause above.")),
            [LOST],
            LOST.split("] ", 1)[1],
        ),
    ],
    ids=["killed", "crashed", "exited", "node", "error", "lost", "worker", "silent", "start"],
)
def test_a_ranks_failure_is_a_single_line(
    problem: Exception, lines: list[str], expected: str
) -> None:
    """The rank knows only that its engine's processes have exited; its log has the reason."""
    assert postmortem.describe_failure(problem, lines) == expected


def test_ray_errors_become_a_single_line() -> None:
    """Without the colours, names and identifiers around it."""
    assert postmortem.describe_exception(gone()) == KILLED
    assert postmortem.describe_exception(Task(ValueError("one\ntwo"))) == "ValueError: one"
    assert postmortem.describe_exception(ValueError("")) == "ValueError:"


INVALID = """1 validation error for ModelConfig
  Value error, User-specified max_model_len (999999) is greater than the derived max_model_len
 [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
CHAINED = f"""Exception pydantic_core.ValidationError isn't serializable: cannot pickle 'X'.
\x1b[36mray::Rank.load()\x1b[39m (pid=2427, ip=10.61.0.11, actor_id=1, repr=<x>)
  File "rank.py", line 5, in load
pydantic_core._pydantic_core.ValidationError: {INVALID}"""


@pytest.mark.parametrize(
    "problem",
    [
        Task(type("ValidationError", (ValueError,), {})(INVALID)),
        type("RayError", (OSError,), {})(CHAINED),
    ],
    ids=["passed on", "as text"],
)
def test_pydantics_message_has_no_link(problem: Exception) -> None:
    """Ray forwards the exception, or only its text."""
    message = postmortem.describe_exception(problem)

    assert message.startswith("Value error, User-specified max_model_len (999999) is greater than")


@pytest.mark.parametrize(
    ("lost", "logs", "blamed"),
    [
        ({0: Task(EngineDeadError("x")), 1: gone()}, {0: [], 1: []}, 1),
        (
            {0: Task(EngineDeadError("x")), 1: Task(EngineDeadError("x"))},
            {0: [LOST], 1: ["Fatal"]},
            1,
        ),
        (
            {0: Task(EngineDeadError("x")), 1: Task(EngineDeadError("x"))},
            {0: ["Fatal"], 1: [LOST]},
            0,
        ),
        ({2: Task(ValueError("x")), 1: Task(ValueError("x"))}, {1: [], 2: []}, 1),
    ],
)
def test_the_first_failed_rank_is_blamed(
    lost: dict[int, BaseException], logs: dict[int, list[str]], blamed: int
) -> None:
    """An exited or failed rank explains those that lost it."""
    assert postmortem.first_failed(lost, logs) == blamed


def test_rays_marks_are_removed_from_logs(tmp_path: Path) -> None:
    """In spite of binary data and lines of any length."""
    path = tmp_path / "worker.out"
    path.write_bytes(b":job_id:01\n:actor_name:Rank\nfirst\n\n" + b"x" * 1000 + b"\nlast \xff\n")

    assert postmortem.read_tail(str(path), 2) == ["x" * 400, "last \\xff"]
    assert postmortem.read_tail(str(path), 9)[0] == "first"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """It may have days of output."""
    path = tmp_path / "worker.out"
    path.write_text("line\n" * 100_000)

    assert len(postmortem.read_tail(str(path), 10**6)) < 20_000


def test_evidence_is_the_end_of_the_log_with_notes() -> None:
    """Without lines of source locations."""
    log = [f"line {number}" for number in range(30)] + [
        '  File "/opt/vllm/x.py", line 1, in f',
        "    ^^^^",
    ]

    lines = postmortem.log_evidence(log, ["rank 0 then failed too"]).splitlines()

    assert lines == [*(f"line {number}" for number in range(10, 30)), "rank 0 then failed too"]
