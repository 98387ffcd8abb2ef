"""GPUs: models, trouble, and who holds their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.tools.survey import GpuState, NvlinkFabric
from tests.checks.spoiled import GPU, Case, findings, inventory, named, stays_unknown, turns_red

A100 = replace(GPU, name="NVIDIA A100-SXM4-80GB", memory_total=81920)
CASES = (
    Case(
        id="gpu-model",
        red={"gpu02": "fail"},
        text="2 × NVIDIA A100-SXM4-80GB, while gpu[01,03] has NVIDIA H100 80GB HBM3",
        fix="leave gpu02 out",
        facts={"gpu02": {"gpus": (A100, A100)}},
    ),
    Case(
        id="gpu-model",
        red={"gpu02": "warn"},
        text="with 20 GB, 80 GB expected",
        fix="`nvidia-smi -L` on gpu02",
        facts={"gpu02": {"gpus": (replace(GPU, memory_total=19000),) * 2}},
    ),
    Case(
        id="fabric-manager",
        red={"gpu02": "fail"},
        text="the NVLink fabric between the GPUs is not ready: In Progress",
        fix="nvidia-fabricmanager` on gpu02",
        survey={
            "*": {"nvlink": NvlinkFabric(switches=4, states=("Completed",) * 2)},
            "gpu02": {"nvlink": NvlinkFabric(states=("Completed", "In Progress"))},
        },
    ),
    Case(
        id="fabric-manager",
        red={"gpu01": "fail"},
        text="Fabric Manager is inactive",
        fix="its version must be the driver's",
        survey={
            "*": {"nvlink": NvlinkFabric(switches=6, service="active")},
            "gpu01": {"nvlink": NvlinkFabric(switches=6, service="inactive")},
        },
    ),
    Case(
        id="gpu-errors",
        red={"gpu03": "fail"},
        text="uncorrected memory errors (GPU 1: 4)",
        fix="reboot gpu03",
        survey={
            "gpu03": {"gpus": (GpuState(index=0, ecc_errors=0), GpuState(index=1, ecc_errors=4))}
        },
    ),
    Case(
        id="gpu-errors",
        red={"gpu01": "fail"},
        text="reported Xid 79 since",
        fix="docs.nvidia.com/deploy/xid-errors",
        survey={"gpu01": {"xid": ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",)}},
    ),
    Case(
        id="gpu-errors",
        red={"gpu01": "warn"},
        text="reported Xid 31 since the node booted, which applications bring about",
        fix="grep Xid",
        survey={"gpu01": {"xid": ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1896, name=python3",)}},
    ),
)


UNKNOWN = (
    (
        Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu01": {"xid": None}}),
        "kernel's log may not be read",
    ),
    (
        Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu01": {"gpus": ()}}),
        "told nothing of memory errors",
    ),
    (
        Case(
            id="gpu-model",
            red={},
            text="",
            fix="",
            more="accelerator: amd",
            facts={"*": {"gpus": None, "amd_renders": (128, 129)}},
        ),
        "AMD GPUs",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_turns_its_check_red_and_no_other(case: Case) -> None:
    """On the right node, with its words and a fix."""
    turns_red(case)


def test_a_green_gpu_tells_its_model_and_count() -> None:
    """The value to fold by."""
    assert (
        findings(Case(id="gpu-model", red={}, text="", fix=""))[0].text
        == "2 × NVIDIA H100 80GB HBM3"
    )


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    stays_unknown(case, reason)


def test_a_gpu_that_the_node_does_not_use_is_not_judged() -> None:
    """Its trouble is none of this cluster's."""
    every = inventory()
    one, two, three = every.nodes
    first = replace(every, nodes=(one, replace(two, gpus=1, gpu_ids=("0",)), three))
    states = (GpuState(index=0, ecc_errors=0), GpuState(index=1, ecc_errors=4))
    case = Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu02": {"gpus": states}})

    assert findings(case)[1].status == "fail"
    assert findings(replace(case, evidence={"inventory": first}))[1].status == "pass"
