"""The plugin that lets vLLM's CPU build run under Ray: its conditions, and its imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from launcher.lab import cpu_platform
from tests.lab.cpu_platform.conftest import run_json

pytestmark = pytest.mark.processes


def test_a_build_for_gpus_keeps_its_own_platform(site: Path) -> None:
    """The plugin does nothing unless vLLM is a CPU build."""
    program = """
import json, vllm.platforms, vlaunch_cpu_ray
vllm.platforms.CHOICE = None
print(json.dumps(vlaunch_cpu_ray.register()))
"""
    assert run_json(site, program) is None


def test_the_entry_point_is_read_without_importing_vllm(site: Path) -> None:
    """vLLM reads it while `vllm.platforms` is still being imported."""
    program = (
        "import json, sys, vlaunch_cpu_ray\nprint(json.dumps('vllm' in sys.modules or 'torch' in"
        " sys.modules))"
    )

    assert run_json(site, program) is False


def test_the_source_needs_nothing_but_vllm_torch_and_the_standard_library() -> None:
    """It runs inside the image, without the launcher."""
    for file in Path(cpu_platform.__file__).parent.glob("*.py"):
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
