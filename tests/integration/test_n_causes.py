"""Five kinds of wrong engine arguments in every mode: the command names the cause, once and first,
and so does `doctor`, unless nothing was started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.lab.host_configs import MODEL
from tests.integration.batches import Batch
from tests.integration.conftest import CommandResult, LabCluster

pytestmark = [pytest.mark.lab, pytest.mark.long]

MISSING = "nobody/no-such-model"
SMALL = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
EAGER = {"compilation_config": {"mode": 2, "backend": "eager"}}
CACHE = {"kv_cache_memory_bytes": 67108864}
# Engine arguments of the inventory: without a size of the KV cache the share of memory counts, and
# without `eager` the compiler, which the lab's image lacks.
INVENTORY = {"memory": {**SMALL, **EAGER}, "compiler": {**SMALL, **CACHE}}
WRONG: dict[str, dict[str, Any]] = {
    "memory": {"gpu_memory_utilization": 0.99},
    "compiler": {},
    "argument": {"no_such_argument": 5},
    "context": {"max_model_len": 999999},
    "model": {},
}
# Parts of the message and of its first line of evidence, and the symptom of `doctor`.
EXPECTED = {
    "memory": (
        "free host memory is less",
        "ValueError: Available memory on node",
        "cpu-memory-held",
    ),
    "compiler": ("no compiler", "No working C.. compiler found", "no-compiler"),
    "argument": ("rejects the arguments; nothing was changed", "no.such.argument", ""),
    "context": ("the context is longer", "User-specified max_model_len", "context-too-long"),
    "model": ("model", MISSING, "request-refused"),
}


@pytest.fixture(scope="module", autouse=True)
def clean_up(lab_cluster: LabCluster) -> Iterator[None]:
    """Remove the cluster after the tests."""
    yield
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def start_cluster(lab_cluster: LabCluster, kind: str) -> None:
    """Start the cluster with the engine arguments of a case in its inventory."""
    args = INVENTORY.get(kind, {**SMALL, **EAGER, **CACHE})
    lab_cluster.write(lambda document: document.update(engine_args=args))
    result = lab_cluster.vlaunch("up")
    assert result.code == 0, result.output


def assert_cause(lab_cluster: LabCluster, result: CommandResult, kind: str) -> None:
    """Assert that a command, and then `doctor`, name the cause."""
    message, line, symptom = EXPECTED[kind]
    error = result.err[result.err.index("\nerror: ") + 1 :]

    assert result.code == (1 if symptom else 2), result.output
    assert message in error.splitlines()[0]
    assert re.search(line, error)
    for noise in ("See root cause", "errors.pydantic.dev", "cannot be read", "killed", "/metrics"):
        assert noise not in error, error
    if not symptom:
        return
    doctor = lab_cluster.vlaunch("doctor", "--since", "3m")
    assert doctor.code == 1
    assert f"#{symptom}" in doctor.out, doctor.out
    assert re.search(line, doctor.out) or kind != "model"


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_server(lab_cluster: LabCluster, backend: str, kind: str) -> None:
    """The command itself names the cause."""
    start_cluster(lab_cluster, kind)
    model = MISSING if kind == "model" else MODEL
    arguments = [
        argument
        for name, value in WRONG[kind].items()
        for argument in (f"--{name.replace('_', '-')}", str(value))
    ]
    begin = ("serve", "--backend", backend, "--model", model, "--timeout", "400", "--")
    try:
        assert_cause(lab_cluster, lab_cluster.vlaunch(*begin, *arguments, timeout=500), kind)
    finally:
        lab_cluster.vlaunch("stop")


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("mode", ["replicas", "ranks"])
def test_a_batch_job(lab_cluster: LabCluster, mode: str, kind: str) -> None:
    """The same for engines in replicas or ranks; `logs` has their output."""
    start_cluster(lab_cluster, kind)
    name = f"cause-{mode}-{kind}"
    ranks = mode == "ranks"
    job = Batch(lab_cluster, name).write(
        [{"text": f"row {number}"} for number in range(20)],
        model=MISSING if kind == "model" else MODEL,
        prompt="{{ text }}",
        engine={"args": WRONG[kind], **({} if ranks else {"replicas": 2})},
        **({"data_parallel": 2} if ranks else {}),
    )
    assert_cause(lab_cluster, job.run(timeout=600), kind)
    if kind not in ("model", "argument"):
        logs = lab_cluster.vlaunch("logs").out
        assert re.search(rf"^node1/batch:{name}: ", logs, re.MULTILINE)  # the driver
        assert re.search(rf"^node\d/batch:{name}:\d+: ", logs, re.MULTILINE)
