"""A wrong engine argument of five kinds in every mode: the command names the cause, once and first,
and `doctor` names it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.lab.host_configs import MODEL
from tests.integration.batches import Batch
from tests.integration.conftest import Practice, Ran

pytestmark = [pytest.mark.lab, pytest.mark.long]

MISSING = "nobody/no-such-model"
SMALL = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
EAGER = {"compilation_config": {"mode": 2, "backend": "eager"}}
CACHE = {"kv_cache_memory_bytes": 67108864}
# What the inventory gives every engine: without a size of the KV cache the share of memory counts,
# and without `eager` the compiler that the lab's image does not have.
INVENTORY = {"memory": {**SMALL, **EAGER}, "compiler": {**SMALL, **CACHE}}
WRONG: dict[str, dict[str, Any]] = {
    "memory": {"gpu_memory_utilization": 0.99},
    "compiler": {},
    "argument": {"no_such_argument": 5},
    "context": {"max_model_len": 999999},
    "model": {},
}
# What the message says, what its first line of evidence has, and which entry `doctor` finds.
SAID = {
    "memory": (
        "less host memory is free",
        "ValueError: Available memory on node",
        "cpu-memory-held",
    ),
    "compiler": ("no compiler", "No working C.. compiler found", "no-compiler"),
    "argument": ("engine argument", "no.such.argument", "unknown-argument"),
    "context": ("the context is longer", "User-specified max_model_len", "context-too-long"),
    "model": ("model", MISSING, "request-refused"),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_left(practice: Practice) -> Iterator[None]:
    """The next module begins with nothing."""
    yield
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


def up(practice: Practice, kind: str) -> None:
    """Bring the cluster up whose inventory has the engine arguments of a case."""
    args = INVENTORY.get(kind, {**SMALL, **EAGER, **CACHE})
    practice.write(lambda document: document.update(engine_args=args))
    ran = practice.vlaunch("up")
    assert ran.code == 0, ran.said


def check(practice: Practice, ran: Ran, kind: str) -> None:
    """Look for the cause in what a command said, and in what `doctor` says then."""
    message, line, symptom = SAID[kind]
    error = ran.err[ran.err.index("\nerror: ") + 1 :]

    assert ran.code == 1, ran.said
    assert message in error.splitlines()[0]
    assert re.search(line, error)
    for noise in ("See root cause", "errors.pydantic.dev", "cannot be read", "killed", "/metrics"):
        assert noise not in error, error
    doctor = practice.vlaunch("doctor", "--since", "3m")
    assert doctor.code == 1
    assert f"#{symptom}" in doctor.out, doctor.out
    assert re.search(line, doctor.out) or kind != "model"


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_server(practice: Practice, backend: str, kind: str) -> None:
    """The cause is known when the command ends."""
    up(practice, kind)
    model = MISSING if kind == "model" else MODEL
    words = [
        word
        for name, value in WRONG[kind].items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    begin = ("serve", "--backend", backend, "--model", model, "--timeout", "400", "--")
    try:
        check(practice, practice.vlaunch(*begin, *words, timeout=500), kind)
    finally:
        practice.vlaunch("stop")


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("mode", ["replicas", "ranks"])
def test_a_batch_job(practice: Practice, mode: str, kind: str) -> None:
    """The same where replicas or ranks run the engines; `logs` has what they printed."""
    up(practice, kind)
    name = f"cause-{mode}-{kind}"
    ranks = mode == "ranks"
    job = Batch(practice, name).write(
        [{"text": f"row {number}"} for number in range(20)],
        model=MISSING if kind == "model" else MODEL,
        prompt="{{ text }}",
        engine={"args": WRONG[kind], **({} if ranks else {"replicas": 2})},
        **({"data_parallel": 2} if ranks else {}),
    )
    check(practice, job.run(timeout=600), kind)
    if kind != "model":
        logs = practice.vlaunch("logs").out
        assert re.search(rf"^node1/batch:{name}: ", logs, re.MULTILINE)  # the driver
        assert re.search(rf"^node\d/batch:{name}:\d+: ", logs, re.MULTILINE)
