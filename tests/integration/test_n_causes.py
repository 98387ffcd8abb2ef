"""A wrong engine argument of five kinds in every mode: the command names the cause, once and first,
and `doctor` names it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.lab.render import MODEL
from tests.integration.batches import ARGS, Batch
from tests.integration.conftest import Practice, Ran

pytestmark = [pytest.mark.lab, pytest.mark.long]

MISSING = "nobody/no-such-model"
# What a server is given: without a size of the KV cache, or with the compiler that the lab's image
# does not have.
COMMON = ["--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512"]
EAGER = ["-cc.mode=2", "-cc.backend=eager"]
CACHE = ["--kv-cache-memory-bytes", "67108864"]
SERVE: dict[str, tuple[list[str], list[str]]] = {
    "memory": ([*COMMON, *EAGER], ["--gpu-memory-utilization", "0.99"]),
    "compiler": ([*COMMON, *CACHE], []),
    "argument": ([*COMMON, *CACHE, *EAGER], ["--no-such-argument", "5"]),
    "context": ([*COMMON, *CACHE, *EAGER], ["--max-model-len", "999999"]),
    "model": ([*COMMON, *CACHE, *EAGER], []),
}
SMALL = {key: value for key, value in ARGS.items() if key != "kv_cache_memory_bytes"}
BATCH: dict[str, dict[str, Any]] = {
    "memory": {**SMALL, "gpu_memory_utilization": 0.99},
    "compiler": {**ARGS, "enforce_eager": False},
    "argument": {**ARGS, "no_such_argument": 5},
    "context": {**ARGS, "max_model_len": 999999},
    "model": ARGS,
}
# What the message says, what its first line of evidence has, and which entry `doctor` finds.
SAID = {
    "memory": (
        "less host memory is free",
        "ValueError: Available memory on node",
        "cpu-memory-held",
    ),
    "compiler": ("no compiler", "No working C++ compiler found", "no-compiler"),
    "argument": ("engine argument", "no.such.argument", "unknown-argument"),
    "context": ("the context is longer", "User-specified max_model_len", "context-too-long"),
    "model": ("model", MISSING, ""),
}


@pytest.fixture(scope="module")
def up(practice: Practice) -> Iterator[Practice]:
    """A cluster whose nodes may look for models elsewhere, where they find none."""
    yield practice
    practice.write()
    assert practice.vlaunch("down").code == 0


def check(practice: Practice, ran: Ran, kind: str) -> None:
    """Look for the cause in what a command said, and in what `doctor` says then."""
    message, line, symptom = SAID[kind]
    error = ran.err[ran.err.index("error: ") :]

    assert ran.code == 1, ran.said
    assert message in error.splitlines()[0]
    assert re.search(line.replace("+", r"\+"), error)
    for noise in ("See root cause", "errors.pydantic.dev", "cannot be read", "killed", "/metrics"):
        assert noise not in error, error
    # "once": no other line repeats it
    assert len(re.findall(line.replace("+", r"\+"), error)) <= 2, error
    if symptom:
        doctor = practice.vlaunch("doctor", "--since", "3m")
        assert doctor.code == 1
        assert f"#{symptom}" in doctor.out, doctor.out


@pytest.mark.parametrize("kind", SERVE)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_server(up: Practice, backend: str, kind: str) -> None:
    """The cause is known when the command ends."""
    inventory, words = SERVE[kind]
    up.write(lambda document: document["serve"].update(args=inventory))
    assert up.vlaunch("up").code == 0
    model = MISSING if kind == "model" else MODEL
    try:
        ran = up.vlaunch(
            "serve",
            "--backend",
            backend,
            "--model",
            model,
            "--timeout",
            "400",
            "--",
            *words,
            timeout=500,
        )
        check(up, ran, kind)
    finally:
        up.vlaunch("stop")


@pytest.mark.parametrize("kind", BATCH)
@pytest.mark.parametrize("mode", ["replicas", "ranks"])
def test_a_batch_job(up: Practice, mode: str, kind: str) -> None:
    """The same where replicas or ranks run the engines; `logs` has what they printed."""
    up.write()
    assert up.vlaunch("up").code == 0
    name = f"cause-{mode}-{kind}"
    more: dict[str, Any] = {"data_parallel": 2} if mode == "ranks" else {}
    job = Batch(up, name).write(
        [{"text": f"row {number}"} for number in range(20)],
        model=MISSING if kind == "model" else MODEL,
        prompt="{{ text }}",
        engine={"args": BATCH[kind], **({} if more else {"replicas": 2})},
        **more,
    )
    check(up, job.run(timeout=600), kind)
    if kind != "model":
        assert f"/batch:{name}: " in up.vlaunch("logs").out
