"""GPUs: models, trouble, and who holds their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.tools.docker import Container
from launcher.tools.survey import GpuProcess, GpuState
from tests.checks.spoiled import GPU, Case, findings, inventory, named, survey, turns_red

A100 = replace(GPU, name="NVIDIA A100-SXM4-80GB", memory_total=81920)
OURS = GpuProcess(
    gpu="GPU-1", pid=9, name="ray::Worker", memory=70000, user="root", container="c0ffee"
)
CONTAINER = Container(
    name="vlaunch-c-gpu02",
    id="c0ffee0123",
    role="worker",
    node="gpu02",
    image="i",
    status="running",
    spec="",
    exit_code=0,
    restarts=0,
    env={},
    labels={},
)

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
    Case(
        id="gpu-memory",
        red={"gpu02": "fail"},
        text="70000 MiB of GPU memory held by ada (1 process)",
        fix="`sudo kill 77` on gpu02",
        survey={
            "gpu02": {
                "gpu_processes": (
                    GpuProcess(gpu="GPU-1", pid=77, name="python3", memory=70000, user="ada"),
                )
            }
        },
    ),
    Case(
        id="gpu-memory",
        red={"gpu02": "fail"},
        text="held by root (1 process)",
        fix="`docker stop feedfeedfeed` on gpu02",
        survey={"gpu02": {"gpu_processes": (replace(OURS, container="feed" * 16),)}},
    ),
    Case(
        id="gpu-memory",
        red={"gpu02": "warn"},
        text="by whom is not known (GPU 0: 5000 MiB)",
        fix="`nvidia-smi` on gpu02",
        survey={"gpu02": {"gpu_processes": None}},
        facts={
            "gpu02": {
                "gpus": (replace(GPU, memory_used=5000), GPU),
                "survey": survey(gpu_processes=None),
            }
        },
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
        Case(id="gpu-memory", red={}, text="", fix="", survey={"gpu01": {"gpu_processes": None}}),
        "did not tell which",
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


def test_gpus_that_the_node_does_not_use_are_not_judged() -> None:
    """Another one's trouble, and who holds it, are none of this cluster's."""
    every = inventory()
    one, two, three = every.nodes
    first = replace(every, nodes=(one, replace(two, gpus=1, gpu_ids=("0",)), three))
    others = {
        "gpu02": {
            "gpu_processes": (replace(OURS, container=""),),
            "gpus": (GpuState(index=0, ecc_errors=0), GpuState(index=1, ecc_errors=4)),
        }
    }
    for id_ in ("gpu-memory", "gpu-errors"):
        whole = Case(id=id_, red={}, text="", fix="", survey=others)
        assert findings(whole)[1].status == "fail"
        assert findings(replace(whole, evidence={"inventory": first}))[1].status == "pass"


def test_the_clusters_own_containers_are_no_strangers() -> None:
    """A second look finds them, as it should."""
    changed = {"containers": (CONTAINER,), "survey": survey(gpu_processes=(OURS,))}
    found = findings(Case(id="gpu-memory", red={}, text="", fix="", facts={"gpu02": changed}))

    assert (found[1].status, found[1].text) == (
        "pass",
        "70000 MiB held, by this cluster's own containers",
    )


def test_the_evidence_says_whose_process_it_is() -> None:
    """User, process, memory and container."""
    (case,) = [each for each in CASES if each.text == "held by root (1 process)"]

    assert (
        findings(case)[1].evidence == "root: pid 9 ray::Worker, 70000 MiB, container feedfeedfeed"
    )


def test_a_green_gpu_tells_its_model_and_count() -> None:
    """The value to fold by."""
    assert (
        findings(Case(id="gpu-model", red={}, text="", fix=""))[0].text
        == "2 × NVIDIA H100 80GB HBM3"
    )


@pytest.mark.parametrize(
    ("case", "reason"), UNKNOWN, ids=lambda each: named(each) if isinstance(each, Case) else ""
)
def test_what_was_not_seen_is_skipped_with_its_reason(case: Case, reason: str) -> None:
    """Never green."""
    found = {each.status: each.text for each in findings(case)}

    assert "fail" not in found
    assert reason in found["skip"]


def test_another_container_is_a_stranger_though_the_cluster_has_its_own() -> None:
    """Containers are told apart by their id."""
    other = replace(OURS, container="deadbeef")
    changed = {"containers": (CONTAINER,), "survey": survey(gpu_processes=(OURS, other))}
    found = findings(Case(id="gpu-memory", red={}, text="", fix="", facts={"gpu02": changed}))

    assert (found[1].status, found[1].text) == (
        "fail",
        "70000 MiB of GPU memory held by root (1 process)",
    )
