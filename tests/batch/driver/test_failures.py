"""Explanations of pipeline failures, with the evidence line and the setting to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.batch.driver import failures
from launcher.batch.driver.job_file import Failed


@pytest.mark.parametrize(
    ("mode", "text", "message", "hint"),
    [
        (
            "engine",
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "a GPU ran out of memory",
            "`engine: {args: …}`",
        ),
        (
            "predict",
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "a GPU ran out of memory",
            "predict.batch_size",
        ),
        (
            "predict",
            "OutOfMemoryError: Task was killed due to the node running low",
            "host memory",
            "num_cpus",
        ),
        (
            "data-parallel",
            "OutOfMemoryError: Task was killed due to the node running low",
            "host memory",
            "data_parallel.size",
        ),
        (
            "engine",
            "OSError: [Errno 28] No space left on device",
            "a disk is full, or /dev/shm",
            "write.path",
        ),
        ("engine", "huggingface_hub.errors.GatedRepoError: 403", "gated", "HF_TOKEN"),
        (
            "engine",
            "HFValidationError: Repo id must be in the form 'repo_name'",
            "the model was not found",
            "set `model`",
        ),
        (
            "engine",
            "EngineArgs.__init__() got an unexpected keyword argument 'foo'",
            "argument: `foo`",
            "vllm serve",
        ),
        (
            "engine",
            "RuntimeError: Engine core initialization failed. See root cause above."
            " Failed core proc(s): {'EngineCore': -9}",
            "the engine was killed",
            "dmesg",
        ),
        (
            "engine",
            "ValueError: Available memory on node 0 (11.53/16.21 GiB) on startup is less than"
            " desired CPU memory utilization (0.92, 14.92 GiB).",
            "free host memory is less",
            "gpu_memory_utilization",
        ),
        (
            "data-parallel",
            "ValueError: Free memory on device cuda:0 (70.2/79.1 GiB) on startup is less than"
            " desired GPU memory utilization (0.99, 78.3 GiB).",
            "less GPU memory is free",
            "gpu_memory_utilization",
        ),
        (
            "engine",
            "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found",
            "no compiler",
            "enforce_eager",
        ),
        (
            "engine",
            "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
            "ninja, with which",
            "PATH",
        ),
        (
            "data-parallel",
            "  Value error, User-specified max_model_len (999999) is greater than the derived"
            " max_model_len (2048)",
            "the context is longer",
            "max_model_len",
        ),
        (
            "engine",
            "ValidationError: 2 validation errors for ModelConfig",
            "`ModelConfig`",
            "engine.args",
        ),
        (
            "predict",
            "ModuleNotFoundError: No module named 'numpyx'",
            "imports `numpyx`",
            "ship the module",
        ),
        (
            "predict",
            "ImportError: my_model has no `Nope`",
            "my_model has no `Nope`",
            "predict.class",
        ),
        (
            "predict",
            "TypeError: C() takes no arguments",
            "cannot be created: C() takes no arguments",
            "predict.args",
        ),
        (
            "engine",
            "ValueError: No available memory for the cache blocks.",
            "KV cache",
            "max_num_batched_tokens",
        ),
    ],
)
def test_common_causes_are_recognised(mode: str, text: str, message: str, hint: str) -> None:
    """Anywhere in the traceback."""
    problem = RuntimeError(f"Traceback (most recent call last):\n  File x\n{text}\nfurther advice")
    failed = failures.explain(problem, mode)
    assert message in failed.message
    assert hint in failed.hint
    assert text in failed.evidence


def test_an_unknown_failure_ends_with_its_last_line() -> None:
    """Ray's wrapping is omitted."""
    mine = "Traceback (most recent call last):\n  File a\nValueError: the seventh seal\n\n"
    ray = (
        "The above exception was the direct cause\n\nray.exceptions.UserCodeException: UDF failed"
        " to process a data block."
    )
    text = mine + ray
    failed = failures.explain(RuntimeError(text), "predict")
    assert failed.message == "ValueError: the seventh seal"
    assert "UDF failed" not in failed.evidence


def test_the_innermost_exception_is_the_message() -> None:
    """With its process and node, if Ray has them; of local exceptions the cause comes last."""
    remote = (
        "ray::MapWorker(MapBatches(Mine)).__init__() (pid=7, ip=10.0.0.2, actor_id=1)\n  File"
        " a\nKeyError: 'x'\n\nDuring handling of the above exception, another exception"
        " occurred:\n\nray::MapWorker(MapBatches(Mine)).__init__() (pid=7, ip=10.0.0.2)\n"
        "RuntimeError: no model"
    )
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("inner")

    assert (
        failures.explain(RuntimeError(remote), "predict").message
        == "KeyError: 'x' (MapWorker pid=7 on 10.0.0.2)"
    )
    assert failures.explain(outer, "predict").message == "ValueError: inner"


def test_an_explained_failure_stays_unchanged() -> None:
    """Also inside Ray's wrapper of a task's exception."""
    inner = Failed("rows.jsonl changed while it was read", "12 bytes", "run it again")
    outer = RuntimeError("a task failed")
    outer.cause = inner  # type: ignore[attr-defined]  # as Ray keeps it
    assert failures.explain(outer, "engine") is inner


LOGS = Path(__file__).parents[2] / "fixtures" / "vllm"


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("fail_cpu_platform_refuses_ray", "ValueError: current platform cpu does not support ray."),
        ("fail_cpu_shm_across_hosts", "RuntimeError: open shm in SHMManager failed. errno: 2"),
        ("fail_gloo_loopback", "RuntimeError: Gloo connectFullMesh failed with"),
    ],
)
def test_the_first_exception_of_a_failed_start_is_its_cause(name: str, last: str) -> None:
    """Not the actors that Ray could not stop, and not vLLM's last line, which only points to it."""
    lines = failures.root_cause_lines((LOGS / f"{name}.log").read_text().splitlines())

    assert last in lines[-1]
    assert len(lines) > 5
    assert not any("EngineCore pid" in line or "Traceback" in line for line in lines)


def test_an_exception_raised_from_the_first_adds_detail() -> None:
    """Others are consequences. Without any exception the cause is unknown."""
    log = [
        "(Worker pid=7) ERROR 11-22 03:10:11 [x.py:1] requests.HTTPError: 500 Server Error",
        "(Worker pid=7) ERROR 11-22 03:10:11 [x.py:1] ",
        (
            "(Worker pid=7) ERROR 11-22 03:10:11 [x.py:1] The above exception was the direct cause"
            " of the following exception:"
        ),
        (
            "(Worker pid=7) ERROR 11-22 03:10:11 [x.py:1] OSError: We could not connect to"
            " huggingface.co"
        ),
        "(EngineCore pid=5) ERROR 11-22 03:10:12 [y.py:2] ConnectionResetError: a worker is gone",
    ]

    assert failures.root_cause_lines(["(Worker pid=7) [rank0]: KeyError: 1"], "10.0.0.1") == [
        "(Worker pid=7, ip=10.0.0.1) [rank0]: KeyError: 1"
    ]
    assert failures.root_cause_lines(log) == [
        "requests.HTTPError: 500 Server Error",
        "OSError: We could not connect to huggingface.co",
    ]
    assert (
        failures.root_cause_lines(
            [
                "(Worker pid=7) WARNING 11-22 03:10:11 [x.py:1] ImportError: no libnuma",
                "all is well",
            ]
        )
        == []
    )
