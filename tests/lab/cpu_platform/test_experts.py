"""Experts that are distributed over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.cpu_platform.conftest import run_json

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("expert_map", "weighted", "kernel_arguments", "output"),
    [
        (None, False, [[0.5, 0.3, 0.2], [1, 3, 2]], [7.0, 8.0, 9.0]),
        ([-1, -1, 0, 1], False, [[0.0, 0.3, 0.2], [0, 1, 0]], [7.0, 8.0, 9.0]),
        ([-1, -1, 0, 1], True, [[0.0, 0.3, 0.2], [0, 1, 0]], [0.0, 8.0, 9.0]),
    ],
    ids=["all experts here", "half of them here", "weighed before"],
)
def test_the_kernel_gets_local_experts_only(
    site: Path,
    expert_map: list[int] | None,
    weighted: bool,
    kernel_arguments: list[list[float]],
    output: list[float],
) -> None:
    """Experts of other ranks get no weight; if the kernel does not apply weights, their rows are
    cleared. The patch is idempotent.
    """
    program = f"""
import json, torch
from vlaunch_cpu_ray import communicator
for _ in range(2):
    communicator.RayCpuCommunicator("ep:0")
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
experts, T, expert_map = X86CPUUnquantizedExperts(), torch.Tensor, {expert_map}
out = T([7.0, 8.0, 9.0])
shares, ids, local = T([0.5, 0.3, 0.2]), T([1, 3, 2]), T(expert_map) if expert_map else None
experts.apply(out, 0, 0, 0, shares, ids, 0, 4, local, 0, 0, 0, 0, 0, {weighted})
print(json.dumps([experts.arguments, out]))
"""
    assert run_json(site, program) == [kernel_arguments, output]
