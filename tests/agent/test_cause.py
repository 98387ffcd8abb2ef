"""Root causes in logs of engines. The logs are recorded: `fixtures/vllm/README.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent import cause

LOGS = Path(__file__).parents[1] / "fixtures" / "vllm"


def lines(name: str) -> list[str]:
    return [line.strip()[:400] for line in (LOGS / f"{name}.log").read_text().splitlines()]


@pytest.mark.parametrize(
    ("log", "root"),
    [
        ("fail_cpu_platform_refuses_ray", "ValueError: current platform cpu does not support ray."),
        ("fail_cpu_shm_across_hosts", "RuntimeError: open shm in SHMManager failed. errno: 2"),
        (
            "fail_gloo_loopback",
            (
                "RuntimeError: Gloo connectFullMesh failed with"
                " [/__w/pytorch/pytorch/third_party/gloo/"
            ),
        ),
        ("fail_enforce_eager", "AssertionError"),
        (
            "fail_executor_v1",
            "ValueError: cuda_stream other than the current stream is not supported",
        ),
        (
            "fail_host_killed",
            (
                "RuntimeError:"
                " [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read"
                " error ["
            ),
        ),
        (
            "fail_mp_headless_killed",
            (
                "RuntimeError:"
                " [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connec"
            ),
        ),
        (
            "fail_validation",
            "Value error, Offline data parallel mode is not supported/useful for dense models.",
        ),
        (
            "fail_device_assertion",
            "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0],",
        ),
        ("fail_rank_killed", ""),
        ("fail_netcut", ""),
    ],
)
def test_the_root_of_recorded_failures(log: str, root: str) -> None:
    """The first independent error; none if a rank died silently. The agent, with relevant lines
    only, agrees with the launcher, which reads the whole log.
    """
    whole, messages = lines(log), [line for line in lines(log) if cause.is_relevant(line)]

    assert cause.root_cause(whole).startswith(root)
    assert bool(cause.root_cause(whole)) == bool(root)
    assert cause.root_cause(messages) == cause.root_cause(whole)


@pytest.mark.parametrize("log", sorted(path.stem for path in LOGS.glob("*_ok.log")))
def test_a_healthy_start_has_no_cause(log: str) -> None:
    """A warning is no cause."""
    assert cause.root_cause(lines(log)) == ""


def test_the_last_line_is_not_the_cause() -> None:
    """It reports a consequence, like `EngineDeadError`."""
    messages = [
        (
            "(Worker_TP0 pid=7) ERROR 11-20 17:45:22 [x.py:1] torch.OutOfMemoryError: CUDA out of"
            " memory. Tried 2 GiB"
        ),
        (
            "(EngineCore pid=5) ERROR 11-20 17:45:23 [x.py:1] RuntimeError: Engine core"
            " initialization failed. See root cause"
        ),
        (
            "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an"
            " issue."
        ),
    ]

    assert cause.root_cause(messages).startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert cause.root_cause(messages[1:]) == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            (
                "(EngineCore pid=5) ERROR 11-20 17:45:22 [x.py:1] RayWorkerProc rank=[1] died"
                " unexpectedly, shutting down"
            ),
            True,
        ),
        (
            (
                "(EngineCore pid=5) WARNING 11-20 17:45:22 [x.py:1] errors like `OSError: [Errno"
                " 24] Too many open files`"
            ),
            False,
        ),
        ("(APIServer pid=5) INFO 11-20 17:45:22 [x.py:1] request timed out", False),
        ("CUDA error: an illegal memory access was encountered", True),
        ("AssertionError", True),
        ("  Value error, no such model [type=value_error]", True),
        ("Loading weights took 3.2 s", False),
    ],
)
def test_relevant_lines(line: str, expected: bool) -> None:
    """vLLM continues after its own warnings."""
    assert cause.is_relevant(line) == expected


def test_a_report_is_the_last_resort() -> None:
    """Only on request, and without another exception."""
    messages = ["RuntimeError: Engine core initialization failed. See root cause above."]

    assert (cause.root_cause(messages), cause.root_cause(messages, or_consequence=True)) == (
        "",
        messages[0],
    )
    assert cause.root_cause([*messages, "ValueError: x"], or_consequence=True) == "ValueError: x"


def test_a_worker_is_nearer_to_the_cause() -> None:
    """Its lines reach the driver's log late."""
    messages = [
        "(EngineCore pid=5) RuntimeError: Worker failed",
        "(Worker_TP1 pid=9) ValueError: bad head size",
        "KeyError: 'x'",
    ]

    assert cause.root_cause(messages) == "ValueError: bad head size"
    assert cause.root_cause(messages[:1] + messages[2:]) == "RuntimeError: Worker failed"


def test_colours_and_length() -> None:
    """Ray colours forwarded lines; a cause fits on one line of a table."""
    text = "\x1b[36m(RayWorkerWrapper pid=1)\x1b[0m ValueError: " + "x" * 9000

    assert cause.root_cause([text]) == f"ValueError: {'x' * 9000}"[: cause.MAX_CAUSE_CHARS]


def test_an_empty_log_has_no_cause() -> None:
    """And raises no error."""
    assert (cause.root_cause([]), cause.root_cause(["", "all is well"])) == ("", "")


INVALID = (
    "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for X",
    "(APIServer pid=1) gpu_memory_utilization",
    (
        "(APIServer pid=1)   Input should be less than or equal to 1 [type=less_than_equal,"
        " input_value=1.5, input_type=float]"
    ),
    (
        "(APIServer pid=1)     For further information visit"
        " https://errors.pydantic.dev/2.12/v/less_than_equal"
    ),
)
REMOTE = (
    "(EngineCore pid=5) ERROR 11-24 11:15:42 [core.py:1510] Traceback (most recent call last):",
    (
        "(EngineCore pid=5) ERROR 11-24 11:15:42 [core.py:1510]"
        " ray.exceptions.RayTaskError(ValueError): ray::RayWorkerProc.initialize_worker() (pid=711,"
        " ip=10.61.0.12, actor_id=52b2, repr=<x>)"
    ),
    '(EngineCore pid=5) ERROR 11-24 11:15:42 [core.py:1510]   File "cpu_worker.py", line 83',
    "(EngineCore pid=5) ERROR 11-24 11:15:42 [core.py:1510] ValueError: Available memory on node 0",
    "(EngineCore pid=5) ERROR 11-24 [x.py:1] RuntimeError: Engine core initialization failed.",
)


def test_pydantic_names_the_field() -> None:
    """Its last line is only a link; the line with the field's name is included."""
    events = [
        line
        for before, line in zip(("", *INVALID), INVALID, strict=False)
        if cause.is_relevant(line, before)
    ]

    assert events == list(INVALID[:3])
    assert (
        cause.root_cause(events)
        == "gpu_memory_utilization: Input should be less than or equal to 1"
    )


@pytest.mark.parametrize(
    ("messages", "process", "address"),
    [
        (REMOTE, "RayWorkerProc pid=711", "10.61.0.12"),
        (REMOTE[3:], "EngineCore pid=5", ""),
        (
            ["\x1b[36m(RayWorkerProc pid=2, ip=10.0.0.2)\x1b[0m (Worker_PP1 pid=3) KeyError: 1"],
            "Worker_PP1 pid=3",
            "10.0.0.2",
        ),
        (["KeyError: 1"], "", ""),
    ],
)
def test_the_process_that_raised_it(messages: list[str], process: str, address: str) -> None:
    """From vLLM's prefix, or from the head of a traceback that Ray forwards."""
    raised = cause.find_exception(messages)

    assert raised is not None
    assert (raised.process, raised.address) == (process, address)


@pytest.mark.parametrize(
    "between",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_the_innermost_of_a_chain(between: str) -> None:
    """Python prints it first; vLLM's pointer to the log above is ignored."""
    messages = [
        "ValueError: the root",
        "",
        between,
        "",
        "RuntimeError: Worker failed with error 'x'",
    ]

    assert cause.root_cause(messages) == "ValueError: the root"
    assert (
        cause.root_cause(["WARNING 11-24 11:15:42 [x.py:1] KeyError: 1", *messages]) == messages[0]
    )
