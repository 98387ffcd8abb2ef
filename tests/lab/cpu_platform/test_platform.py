"""The platform that vLLM finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.cpu_platform.conftest import run_json

pytestmark = pytest.mark.processes


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
    assert run_json(site, program) == ["GPU", "vlaunch_cpu_ray.communicator.RayCpuCommunicator", 3]
