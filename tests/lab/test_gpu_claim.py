"""Memory claims of ranks on simulated GPUs, with fakes of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.lab import gpu_claim


def config(assigned: list[int] | None = None, dp: int | None = None) -> Any:
    """Return a server's configuration: a rank per stage of two, or a replica of it."""
    parallel = SimpleNamespace(
        assigned_physical_gpu_ids=assigned, data_parallel_rank_local=dp, world_size=2
    )
    return SimpleNamespace(
        parallel_config=parallel, cache_config=SimpleNamespace(gpu_memory_utilization=0.5)
    )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install a fake vLLM; return the requested memory by GPU. It fails if too little is free."""
    requested: list[Any] = []

    def request_memory(snapshot: Any, cache: Any) -> int:
        size = int(snapshot.total_memory * cache.gpu_memory_utilization)
        if snapshot.free_memory < size:
            raise ValueError(f"Free memory on device {snapshot.device_}")
        requested.append((snapshot.device_, size >> 20))
        return size

    class WorkerWrapperBase:
        def init_device(self) -> None:
            requested.append("device")

    for name, attributes in (
        ("vllm.v1.worker.utils", {"request_memory": request_memory}),
        ("vllm.v1.worker.worker_base", {"WorkerWrapperBase": WorkerWrapperBase}),
    ):
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return requested


def fake_smi(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[str]:
    """Install a fake `nvidia-smi` with this output; return the queried GPUs."""
    queries: list[str] = []

    def check_output(argv: tuple[str, ...], **_: Any) -> str:
        queries.append(argv[2])
        return answer

    monkeypatch.setattr(subprocess, "check_output", check_output)
    return queries


def release_claims() -> list[str]:
    """Return this process's claims, and release them."""
    names = []
    for file in list(Path("/proc/self/fd").iterdir()):
        try:
            link = str(file.readlink())
        except OSError:
            continue
        if "gpu-memory" in link:
            names.append(link)
            os.close(int(file.name))
    return names


@pytest.mark.parametrize(
    ("assigned", "dp", "visible", "gpu"),
    [
        ([4, 6], None, None, "6"),  # Ray
        (None, None, None, "1"),
        (None, 1, None, "3"),
        (None, None, "2,5", "5"),
    ],
)
def test_a_rank_claims_memory_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    vllm: list[Any],
    assigned: list[int] | None,
    dp: int | None,
    visible: str | None,
    gpu: str,
) -> None:
    """By vLLM's own assignment, before the device is prepared."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    queries = fake_smi(monkeypatch, "GPU-aa, 81559, 4\n")
    gpu_claim.register()
    rank: Any = sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase()
    rank.vllm_config, rank.worker = config(assigned, dp), SimpleNamespace(local_rank=1)
    rank.init_device()

    assert (queries, vllm) == ([gpu], [(f"cuda:{gpu}", 40779), "device"])
    assert release_claims() == ["/memfd:gpu-memory:GPU-aa:40779 (deleted)"]


def test_a_gpu_in_use_stops_the_start(monkeypatch: pytest.MonkeyPatch, vllm: list[Any]) -> None:
    """With vLLM's own message, as on a real GPU."""
    fake_smi(monkeypatch, "GPU-aa, 81559, 60000\n")

    with pytest.raises(ValueError, match="Free memory on device cuda:0"):
        gpu_claim.claim(config(), 0)
    assert release_claims() == []


def test_unified_memory_is_not_claimed(monkeypatch: pytest.MonkeyPatch, vllm: list[Any]) -> None:
    """The GPU reports no sizes."""
    fake_smi(monkeypatch, "GPU-aa, [N/A], [N/A]\n")
    gpu_claim.claim(config(), 0)

    assert (vllm, release_claims()) == ([], [])
