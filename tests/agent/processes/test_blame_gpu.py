"""The rank to blame on GPUs, from samples of processes on an H100 (`fixtures/gpu-h100`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import records
from launcher.agent.processes import blame
from launcher.agent.processes.blame import NodeSample, StallFinding

H100 = Path(__file__).parents[2] / "fixtures" / "gpu-h100"
LOADS: dict[str, dict[str, dict[str, float]]] = json.loads((H100 / "load.json").read_text())
LIMIT = 700.0  # watts, of the H100 and of the H200
SPINS = [name for name in LOADS["H100"] if name.startswith(("spin", "cycles"))]
IDLE = [name for name in LOADS["H100"] if "context" in name or "idle" in name]
# A step consists of none of these alone.
SLIGHT = [name for name in LOADS["H100"] if name.startswith(("small kernels", "copy host"))]
Samples = list[dict[str, Any]]


def read_samples(name: str) -> Samples:
    """Return two samples of one node, 10 s apart."""
    samples: Samples = json.loads((H100 / "samples.json").read_text())[name]
    return samples


def judge(samples: Samples, replica: int | None = None) -> StallFinding:
    """Compare two samples of one node."""
    before, after = (records.parse_record(NodeSample, sample, "inspection") for sample in samples)
    return blame.compare_samples(
        {"gpu01": before}, {"gpu01": after}, {"gpu01": {}}, replica=replica
    )


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_gpu_computes(name: str) -> None:
    """A rank whose GPU computes may be in one long step: nothing else shows it."""
    samples = read_samples(name)

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (None, "")
    assert finding.observations[0] == "gpu01's GPU 0 computes, as in one long step"
    for sample in samples:
        sample["ranks"][0]["gpus"] = []
    assert judge(samples).progress is False


def test_gpus_of_a_node() -> None:
    """The GPUs of Ray's ranks are unknown; if the server has them all, any may compute."""
    samples = read_samples("prefill")
    spinning = {**read_samples("spin")[0]["ranks"][0]["gpus"][0], "index": 1}
    for sample in samples:
        sample["gpus"] = [*sample["ranks"][0].pop("gpus"), spinning]

    finding = judge(samples)

    assert finding.progress is None
    assert finding.observations[0] == "gpu01's GPU 0 computes, as in one long step"
    assert "gpu01: GPU 0 at 100 %, memory 27 %, " in " ".join(finding.observations)
    assert judge(samples, replica=0).progress is False
    for sample in samples:
        del sample["gpus"][0]
    assert judge(samples).progress is False


def test_gpu_computes_in_one_sample() -> None:
    """A GPU that has stopped since computes no more."""
    samples = read_samples("prefill")
    samples[1]["ranks"][0]["gpus"] = read_samples("spin")[1]["ranks"][0]["gpus"]

    assert judge(samples).progress is False


def test_gpu_spins() -> None:
    """The rank waits for its GPU, whose utilization is 100 %, and moves no more."""
    finding = judge(read_samples("spin"))

    assert (finding.progress, finding.rank) == (False, "")
    assert finding.observations[0].startswith(
        "TP0 on gpu01 (101% of a core, GPU 0 at 100 %, memory 0 %, 128.86 W): waiting for its GPU"
    )


def test_launch_blocks() -> None:
    """A launch that waits for room in the queue uses a core, in any line; it is not to blame."""
    samples = read_samples("spin-launch")
    assert blame.classify_stack(samples[0]["ranks"][0]["frames"]) == blame.OWN

    finding = judge(samples)

    assert (finding.progress, finding.rank) == (False, "")
    assert "waiting for its GPU" in finding.observations[0]


def test_missing_rank() -> None:
    """One of two ranks of NCCL spins in Python, the other's GPU waits for it in an all-reduce."""
    finding = judge(read_samples("nccl-missing"))

    assert (finding.progress, finding.rank, finding.gpu) == (False, "TP1", "0")
    assert "NCCL RAS: Rank 1 has launched up to operation 4" in " ".join(finding.observations)


def test_gpu_memory_held_by_a_rank_that_sleeps() -> None:
    """A GPU with a context and no kernel does not hide the rank."""
    assert judge(read_samples("sleep")).rank == "TP0"


@pytest.mark.parametrize(("model", "name"), [(gpu, name) for gpu in LOADS for name in LOADS[gpu]])
def test_loads(model: str, name: str) -> None:
    """Utilization does not tell a kernel that spins from one that computes; memory and power do."""
    gpu = {**LOADS[model][name], "limit_w": LIMIT}

    assert blame._computes(gpu) is (name not in (*SPINS, *IDLE, *SLIGHT))
    assert not blame._spins(gpu) or name in (*SPINS, *SLIGHT)
    assert blame._spins(gpu) or name not in SPINS


@pytest.mark.parametrize("text", ["memory", "power_w", "limit_w", "utilization"])
def test_unknown_load(text: str) -> None:
    """A GPU that does not report a figure is not taken for one that spins."""
    spinning: dict[str, float | None] = {**LOADS["H100"]["cycles"], "limit_w": LIMIT, text: None}

    assert not blame._spins(spinning)
    assert not blame._computes(spinning)
