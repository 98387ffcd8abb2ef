"""A plan on the practice cluster against what vLLM's CPU build then prints: within the range before
the first start, and the very figure after it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.lab import models
from launcher.lab.host_configs import MODEL
from launcher.lab.layout import HF_HOME
from tests.integration.batches import until
from tests.integration.conftest import Practice
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

LARGE = "large-llama"
COMPILED = ("-cc.mode=2", "-cc.backend=eager", "--max-num-seqs", "8")
GENERATES = ("--max-model-len", "512", *COMPILED)
POOLS = ("--runner", "pooling", *COMPILED)
SHARE = ("--gpu-memory-utilization", "0.12")
GIVEN = ("--kv-cache-memory-bytes", "67108864")


@dataclass(frozen=True)
class Case:
    """A model, its split, and vLLM's arguments."""

    model: str
    split: tuple[str, ...]
    args: tuple[str, ...]


CASES = [
    Case(models.LLAMA, ("--tp", "1", "--pp", "2"), (*GENERATES, *GIVEN)),
    Case(models.LLAMA, ("--tp", "2", "--pp", "1"), (*GENERATES, *SHARE)),
    Case(models.MOE, ("--tp", "1", "--pp", "2"), (*GENERATES, *GIVEN)),
    Case(models.EMBED, ("--tp", "1", "--pp", "2"), (*POOLS, *SHARE)),
    Case(LARGE, ("--tp", "1", "--pp", "2"), (*GENERATES, *SHARE)),
]


@pytest.fixture(scope="module")
def cluster(practice: Practice) -> Iterator[Practice]:
    """Two nodes with a model of 2 GB besides, and no arguments in the inventory."""
    practice.bring_up_anew(lambda document: document.pop("engine_args"))
    program = Path(__file__).with_name("large_llama.py").read_text()
    made = shlex.join(["python3", "-c", program, MODEL, f"{HF_HOME}/{LARGE}"])
    script = f"[ -e {HF_HOME}/{LARGE} ] || {made}"
    ran = practice.vlaunch("exec", "--timeout", "280", "--", "sh", "-c", script)
    assert ran.code == 0, ran.said
    yield practice
    practice.vlaunch("exec", "--", "rm", "-rf", f"{HF_HOME}/{LARGE}")
    practice.vlaunch("down", "--yes")


def planned(cluster: Practice, case: Case) -> dict[str, Any]:
    """Ask for the plan."""
    words = ("plan", "--json", "--model", f"{HF_HOME}/{case.model}", *case.split, "--", *case.args)
    ran = cluster.vlaunch(*words)
    assert ran.code in (0, 3), ran.said
    said: dict[str, Any] = json.loads(ran.out)
    return said


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.args[-2]}")
def test_a_plan_and_what_came(cluster: Practice, case: Case) -> None:
    """Nothing is known but the model at first; the next plan says what was held to 0.5 %."""
    before = planned(cluster, case)
    model = f"{HF_HOME}/{case.model}"
    ran = serve(cluster, "--json", "--model", model, "--replace", *case.split, "--", *case.args)
    held = next(
        each["data"]["kv_cache_tokens"]
        for each in ran.events
        if each["kind"] == "done" and "kv_cache_tokens" in each["data"]
    )

    assert before["basis"] == "estimate"
    assert before["kv_tokens"]["low"] <= held <= before["kv_tokens"]["high"]
    until(lambda: planned(cluster, case)["basis"] == "measured", "the keeper noted it", 60)
    after = planned(cluster, case)["kv_tokens"]
    assert after["low"] == after["high"]
    assert abs(after["likely"] - held) <= 0.005 * held


def test_the_plan_chooses_for_serve(cluster: Practice) -> None:
    """The tiny model fits a rank, so that both nodes are replicas of it; what is expected is said
    before, and compared after.
    """
    words = ("--model", MODEL, "--plan", "auto", "--", *GENERATES, *GIVEN)
    ran = serve(cluster, "--replace", *words)

    assert "DP 2 × TP 1" in ran.said
    assert "estimate: the KV cache holds" in ran.err
    assert "tokens (as planned)" in ran.out
    assert "already running as server" in serve(cluster, *words).err
