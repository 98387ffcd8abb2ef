"""The plugin that lets vLLM's CPU build run under Ray: its wheel, and its decisions against
stand-ins for vLLM and torch.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.tools import cpu_plugin

pytestmark = pytest.mark.processes

EXPERTS = ("model_executor", "layers", "fused_moe", "experts")
TENSOR = """
class Tensor(list):
    "One row, with what the plugin asks of it."
    dtype = "int32"
    def long(self): return self
    def to(self, dtype): return self
    def __lt__(self, limit): return [each < limit for each in self]
    def __getitem__(self, at):
        if isinstance(at, list):
            return Tensor(self[each] for each in at)
        return list.__getitem__(self, at)
    def clamp(self, min): return Tensor(max(min, each) for each in self)
    def masked_fill(self, mask, value):
        return Tensor(value if hit else each for each, hit in zip(self, mask))
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
        self.asked = topk_weights, topk_ids

class X86CPUUnquantizedExperts(CPUUnquantizedExperts):
    pass
"""
    ),
    "torch/__init__.py": TENSOR,
    "torch/distributed.py": "class ProcessGroup: ...\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the unpacked wheel and the stand-ins, as an image would have them."""
    platforms = (
        "class Stock:\n    ray_device_key = ''\n\ndef cpu_platform_plugin():\n    return CHOICE\n"
    )
    for path, text in {
        **STAND_INS,
        "vllm/platforms/__init__.py": f"CHOICE = 'Stock'\n{platforms}",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    with zipfile.ZipFile(io.BytesIO(cpu_plugin.wheel()[1])) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def said(site: Path, program: str) -> object:
    """Run a program with the folder on its path; return what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_vllm_finds_the_platform_through_its_entry_point(site: Path) -> None:
    """By the group name that vLLM reads; the class has a Ray device, and its own communicator."""
    program = """
import json
from importlib.metadata import entry_points
from vllm.utils import import_utils
(point,) = entry_points(group="vllm.platform_plugins")
module, _, name = point.load()().rpartition(".")
platform = getattr(__import__(module, fromlist=[name]), name)
print(json.dumps([platform.ray_device_key, platform.get_device_communicator_cls(),
                  platform.device_control_id_to_physical_device_id("3")]))
"""
    assert said(site, program) == ["GPU", "vlaunch_cpu_ray.communicator.RayCpuCommunicator", 3]


def test_a_build_for_gpus_keeps_its_own_platform(site: Path) -> None:
    """The plugin steps back where vLLM is no CPU build."""
    program = """
import json, vllm.platforms, vlaunch_cpu_ray
vllm.platforms.CHOICE = None
print(json.dumps(vlaunch_cpu_ray.register()))
"""
    assert said(site, program) is None


def test_the_entry_point_is_read_without_importing_vllm(site: Path) -> None:
    """vLLM reads it while `vllm.platforms` is still being imported."""
    program = (
        "import json, sys, vlaunch_cpu_ray\nprint(json.dumps('vllm' in sys.modules or 'torch' in"
        " sys.modules))"
    )

    assert said(site, program) is False


@pytest.mark.parametrize(
    ("other", "names_agree", "shared"),
    [
        ("mine", True, True),
        ("mine", False, False),
        ("('elsewhere', mine[1], mine[2])", True, False),
        ("(mine[0], '10.0.0.2', mine[2])", True, False),
        ("(mine[0], mine[1], mine[2] + 1)", True, False),
    ],
    ids=[
        "one host",
        "one host, different groups",
        "another host name",
        "another address",
        "another container",
    ],
)
def test_shared_memory_is_used_only_where_it_is_shared(
    site: Path, other: str, names_agree: bool, shared: bool
) -> None:
    """Every rank's host name, address and /dev/shm must be the same one."""
    program = f"""
import json, torch.distributed
from vlaunch_cpu_ray import communicator
mine = communicator.place()
def all_gather_object(places, own, group):
    places[:] = [own, {other}]
torch.distributed.all_gather_object = all_gather_object
group = communicator.RayCpuCommunicator()
group.world_size, group.names_agree = 2, {names_agree}
print(json.dumps(group._all_group_ranks_share_shm_group_name()))
"""
    assert said(site, program) is shared


@pytest.mark.parametrize(
    ("expert_map", "weighed", "asked", "output"),
    [
        (None, False, [[0.5, 0.3, 0.2], [1, 3, 2]], [7.0, 8.0, 9.0]),
        ([-1, -1, 0, 1], False, [[0.0, 0.3, 0.2], [0, 1, 0]], [7.0, 8.0, 9.0]),
        ([-1, -1, 0, 1], True, [[0.0, 0.3, 0.2], [0, 1, 0]], [0.0, 8.0, 9.0]),
    ],
    ids=["all experts here", "half of them here", "weighed before"],
)
def test_the_kernel_is_asked_for_local_experts_only(
    site: Path,
    expert_map: list[int] | None,
    weighed: bool,
    asked: list[list[float]],
    output: list[float],
) -> None:
    """An expert of another rank weighs nothing; where the kernel does not weigh, its row is
    cleared. Twice mended is once.
    """
    program = f"""
import json, torch
from vlaunch_cpu_ray import communicator
for _ in range(2):
    communicator.RayCpuCommunicator("ep:0")
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
experts, T, given = X86CPUUnquantizedExperts(), torch.Tensor, {expert_map}
out = T([7.0, 8.0, 9.0])
shares, ids, local = T([0.5, 0.3, 0.2]), T([1, 3, 2]), T(given) if given else None
experts.apply(out, 0, 0, 0, shares, ids, 0, 4, local, 0, 0, 0, 0, 0, {weighed})
print(json.dumps([experts.asked, out]))
"""
    assert said(site, program) == [asked, output]


def test_other_groups_leave_the_experts_alone(site: Path) -> None:
    """A dense model never imports them."""
    program = """
import json, sys
from vlaunch_cpu_ray import communicator
communicator.RayCpuCommunicator("tp:0")
print(json.dumps([name for name in sys.modules if name.endswith("cpu_moe")]))
"""
    assert said(site, program) == []


def test_the_source_needs_nothing_but_vllm_torch_and_the_standard_library() -> None:
    """It runs inside the image, where there is no launcher."""
    for file in cpu_plugin.SOURCE.glob("*.py"):
        tree = ast.parse(file.read_text())
        names = {
            node.module or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
        }
        names |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert {name.split(".")[0] for name in names} <= {"vllm", "torch", *sys.stdlib_module_names}


def test_the_wheel_is_whole_and_the_same_every_time() -> None:
    """Its RECORD lists every file with its hash, and nothing in it depends on the day or the
    machine.
    """
    name, data = cpu_plugin.wheel()
    cpu_plugin.wheel.cache_clear()

    assert name == "vlaunch_cpu_ray-1.0-py3-none-any.whl"
    assert cpu_plugin.wheel()[1] == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}
        record = archive.read("vlaunch_cpu_ray-1.0.dist-info/RECORD").decode()
        rows = [line.split(",") for line in record.splitlines()]
        assert sorted(path for path, *_ in rows) == sorted(archive.namelist())
        for path, digest, size in rows[:-1]:
            content = archive.read(path)
            hashed = (
                base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            )
            assert (digest, size) == (f"sha256={hashed}", str(len(content)))


def test_pip_installs_the_wheel(tmp_path: Path) -> None:
    """As the image's build does: no index, no dependencies."""
    name, data = cpu_plugin.wheel()
    (tmp_path / name).write_bytes(data)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
    ]

    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(tmp_path / name)], check=True)

    assert (tmp_path / "site" / "vlaunch_cpu_ray" / "platform.py").is_file()
