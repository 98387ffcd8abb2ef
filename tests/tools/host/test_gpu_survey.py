"""Details from nvidia-smi: topology, fabric."""

from __future__ import annotations

import pytest

from launcher.tools.host import gpu_survey
from launcher.tools.host.survey import NvlinkFabric

pytestmark = pytest.mark.processes


def test_older_drivers_name_the_cards_in_the_header() -> None:
    """Without a legend; without cards there is no affinity."""
    text = (
        "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV6\tPIX\t0-23\nGPU1\tNV6\t X"
        " \tSYS\t0-23\nmlx5_0\tPIX\tSYS\t X \n"
    )

    assert gpu_survey.parse_topology(text) == {
        "GPU0": {"GPU0": "X", "GPU1": "NV6", "mlx5_0": "PIX"},
        "GPU1": {"GPU0": "NV6", "GPU1": "X", "mlx5_0": "SYS"},
    }
    assert gpu_survey.parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0") == {
        "GPU0": {"GPU0": "X"}
    }
    assert gpu_survey.parse_topology("NVIDIA-SMI has failed") == {}


def test_the_fabric_between_gpus() -> None:
    """GPUs before Hopper have no state of it."""
    output = (
        "switch /dev/nvidia-nvswitch0\nswitch /dev/nvidia-nvswitch1\n"
        "state Completed\nstate [N/A]\nstate N/A\nservice active\n"
    )

    assert gpu_survey.parse_fabric(output) == NvlinkFabric(
        switches=2, states=("Completed",), service="active"
    )
    assert gpu_survey.parse_fabric("service \n") == NvlinkFabric()
