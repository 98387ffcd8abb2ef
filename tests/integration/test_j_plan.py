"""A plan on the lab cluster against the figures of vLLM's CPU build: within the range before the
first start, and exact after it.
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
from tests.integration.batches import wait_until
from tests.integration.conftest import LabCluster
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

LARGE = "large-llama"
COMPILED = ("-cc.mode=2", "-cc.backend=eager", "--max-num-seqs", "8")
GENERATES = ("--max-model-len", "512", *COMPILED)
POOLS = ("--runner", "pooling", *COMPILED)
SHARE = ("--gpu-memory-utilization", "0.12")
FIXED_CACHE = ("--kv-cache-memory-bytes", "67108864")


@dataclass(frozen=True)
class Case:
    """A model, its parallelism, and vLLM's arguments."""

    model: str
    split: tuple[str, ...]
    args: tuple[str, ...]


CASES = [
    Case(models.LLAMA, ("--tp", "1", "--pp", "2"), (*GENERATES, *FIXED_CACHE)),
    Case(models.LLAMA, ("--tp", "2", "--pp", "1"), (*GENERATES, *SHARE)),
    Case(models.MOE, ("--tp", "1", "--pp", "2"), (*GENERATES, *FIXED_CACHE)),
    Case(models.EMBED, ("--tp", "1", "--pp", "2"), (*POOLS, *SHARE)),
    Case(LARGE, ("--tp", "1", "--pp", "2"), (*GENERATES, *SHARE)),
]


@pytest.fixture(scope="module")
def cluster(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two nodes with an additional model of 2 GB, and no arguments in the inventory."""
    lab_cluster.recreate(lambda document: document.pop("engine_args"))
    program = Path(__file__).with_name("large_llama.py").read_text()
    command = shlex.join(["python3", "-c", program, MODEL, f"{HF_HOME}/{LARGE}"])
    script = f"[ -e {HF_HOME}/{LARGE} ] || {command}"
    result = lab_cluster.vlaunch("exec", "--timeout", "280", "--", "sh", "-c", script)
    assert result.code == 0, result.output
    yield lab_cluster
    lab_cluster.vlaunch("exec", "--", "rm", "-rf", f"{HF_HOME}/{LARGE}")
    lab_cluster.vlaunch("down", "--yes")


def make_plan(cluster: LabCluster, case: Case) -> dict[str, Any]:
    """Return the plan."""
    arguments = (
        "plan",
        "--json",
        "--model",
        f"{HF_HOME}/{case.model}",
        *case.split,
        "--",
        *case.args,
    )
    result = cluster.vlaunch(*arguments)
    assert result.code in (0, 3), result.output
    plan: dict[str, Any] = json.loads(result.out)
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.args[-2]}")
def test_a_plan_against_the_server(cluster: LabCluster, case: Case) -> None:
    """The first plan knows only the model; the next one is within 0.5 % of the measurement."""
    before = make_plan(cluster, case)
    model = f"{HF_HOME}/{case.model}"
    result = serve(cluster, "--json", "--model", model, "--replace", *case.split, "--", *case.args)
    tokens = next(
        event["data"]["kv_cache_tokens"]
        for event in result.events
        if event["kind"] == "done" and "kv_cache_tokens" in event["data"]
    )

    assert before["basis"] == "estimate"
    assert before["kv_tokens"]["low"] <= tokens <= before["kv_tokens"]["high"]
    wait_until(
        lambda: make_plan(cluster, case)["basis"] == "measured", "the record of the cache", 60
    )
    after = make_plan(cluster, case)["kv_tokens"]
    assert after["low"] == after["high"]
    assert abs(after["likely"] - tokens) <= 0.005 * tokens


def test_serve_uses_the_plan(cluster: LabCluster) -> None:
    """The tiny model fits a rank, so that both nodes get a replica; the expectation is printed
    before the start, and compared after it.
    """
    arguments = ("--model", MODEL, "--plan", "auto", "--", *GENERATES, *FIXED_CACHE)
    result = serve(cluster, "--replace", *arguments)

    assert "DP 2 × TP 1" in result.output
    assert "estimate: the KV cache holds" in result.err
    assert "tokens (as planned)" in result.out
    assert "already running as server" in serve(cluster, *arguments).err
