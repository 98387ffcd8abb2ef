"""Shared memory between ranks, and the patch of their experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.cpu_platform.conftest import run_json

pytestmark = pytest.mark.processes


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
mine = communicator.shared_memory_id()
def all_gather_object(places, own, group):
    places[:] = [own, {other}]
torch.distributed.all_gather_object = all_gather_object
group = communicator.RayCpuCommunicator()
group.world_size, group.names_agree = 2, {names_agree}
print(json.dumps(group._all_group_ranks_share_shm_group_name()))
"""
    assert run_json(site, program) is shared


def test_other_groups_leave_the_experts_alone(site: Path) -> None:
    """A dense model never imports them."""
    program = """
import json, sys
from vlaunch_cpu_ray import communicator
communicator.RayCpuCommunicator("tp:0")
print(json.dumps([name for name in sys.modules if name.endswith("cpu_moe")]))
"""
    assert run_json(site, program) == []
