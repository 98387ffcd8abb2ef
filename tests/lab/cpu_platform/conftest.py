"""Unpacked plugin with fakes of vLLM and torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.lab.plugin import files as plugin_files

EXPERTS = ("model_executor", "layers", "fused_moe", "experts")
TENSOR = """
class Tensor(list):
    "One row, with the methods that the plugin uses."
    dtype = "int32"
    def long(self): return self
    def to(self, dtype): return self
    def __lt__(self, limit): return [item < limit for item in self]
    def __getitem__(self, index):
        if isinstance(index, list):
            return Tensor(self[i] for i in index)
        return list.__getitem__(self, index)
    def clamp(self, min): return Tensor(max(min, item) for item in self)
    def masked_fill(self, mask, value):
        return Tensor(value if masked else item for item, masked in zip(self, mask))
    def masked_fill_(self, mask, value): self[:] = self.masked_fill(mask, value)
"""
STAND_INS = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/import_utils.py": (
        "from vllm.platforms import Stock\nresolve_obj_by_qualname = lambda name: Stock\n"
    ),
    "vllm/utils/network_utils.py": "get_ip = lambda: '10.0.0.1'\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/cpu_communicator.py": (
        """
class CpuCommunicator:
    device_group = None
    names_agree = True
    def __init__(self, unique_name="tp:0"):
        self.unique_name = unique_name
    def _all_group_ranks_share_shm_group_name(self):
        return self.names_agree
"""
    ),
    **{f"vllm/{'/'.join(EXPERTS[:depth])}/__init__.py": "" for depth in range(1, len(EXPERTS) + 1)},
    f"vllm/{'/'.join(EXPERTS)}/cpu_moe.py": (
        """
class CPUUnquantizedExperts:
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
              global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
              expert_tokens_meta, apply_router_weight_on_input):
        self.arguments = topk_weights, topk_ids

class X86CPUUnquantizedExperts(CPUUnquantizedExperts):
    pass
"""
    ),
    "torch/__init__.py": TENSOR,
    "torch/distributed.py": "class ProcessGroup: ...\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the plugin and the fakes, as in an image."""
    platforms = (
        "class Stock:\n    ray_device_key = ''\n\ndef cpu_platform_plugin():\n    return CHOICE\n"
    )
    plugin = {path: data.decode() for path, data in plugin_files().items()}
    for path, text in {
        **STAND_INS,
        **plugin,
        "vllm/platforms/__init__.py": f"CHOICE = 'Stock'\n{platforms}",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def run_json(site: Path, program: str) -> object:
    """Run a program with the folder on its path; return its output, as JSON."""
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)
