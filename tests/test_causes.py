"""Causes of recorded failures, by the agent, the batch driver and the launcher.

`fixtures/causes/README.md` describes the logs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent import cause
from launcher.batch.driver import failures
from launcher.failures.explain import explain

LOGS = Path(__file__).parent / "fixtures" / "causes"
ROOT = {
    "memory": ("ValueError: Available memory on node 0 (", "cpu-memory-held"),
    "compiler": ("torch._inductor.exc.InductorError: InvalidCxxCompiler: ", "no-compiler"),
    "context": (
        "Value error, User-specified max_model_len (999999) is greater than",
        "context-too-long",
    ),
    "argument": (
        "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'no_such_argument'",
        "unknown-argument",
    ),
}
# The process and the address that a log names; argparse errors name none.
PROCESS = {
    "serve_ray_memory": ("RayWorkerProc", "10.61.0.11"),
    "serve_ray_compiler": ("Worker_PP1", "10.61.0.12"),
    "serve_mp_memory": ("VllmWorker-0", ""),
    "serve_mp_compiler": ("Worker_PP0", ""),
    "serve_ray_context": ("", ""),
    "serve_mp_context": ("", ""),
    "batch_replicas_memory": ("VllmWorker-0", ""),
    "batch_replicas_compiler": ("Worker", ""),
    "batch_ranks_memory": ("VllmWorker-0", ""),
    "batch_ranks_compiler": ("Worker", ""),
    "batch_replicas_context_driver": ("MapWorker", "10.61.0.12"),
}


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", PROCESS)
def test_the_root_of_a_recorded_failure(name: str) -> None:
    """Message, process and address; the agent, with relevant lines only, finds the same cause."""
    text, _ = ROOT[name.removesuffix("_driver").rpartition("_")[2]]
    log = lines(name)
    raised = cause.find_exception(log)

    assert raised is not None
    assert raised.text.startswith(text)
    assert (raised.process.partition(" ")[0], raised.address) == PROCESS[name]
    relevant = [
        line.strip()[:400]
        for before, line in zip(["", *log], log, strict=False)
        if cause.is_relevant(line.strip()[:400], before)
    ]
    assert cause.root_cause(relevant).startswith(text[:100])


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_a_recorded_failure_is_identified(path: Path) -> None:
    """By the table of known failures, and by the batch driver."""
    kind = path.stem.removesuffix("_driver").rpartition("_")[2]
    symptom = explain(path.read_text(encoding="utf-8"))

    assert symptom is not None
    assert symptom.id == ROOT[kind][1]
    if path.stem.startswith("batch"):
        text = "\n".join(failures.root_cause_lines(lines(path.stem), "10.0.0.1"))
        failure = failures.match_failure(text, "engine")

        assert failure is not None
        assert ROOT[kind][0] in failure.evidence.splitlines()[0]
        assert "ip=10.0.0.1) " in failure.evidence or "driver" in path.stem
