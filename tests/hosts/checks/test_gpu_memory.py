"""GPU memory in use by other programs, and the rest for a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.hosts.checks.gpu_memory import judge_server_memory, warn_gpu_memory
from launcher.tools.host.survey import GpuProcess, GpuState
from tests.containers import container
from tests.hosts.checks.spoiled import GPU, Case, findings, inventory, named, turns_red

OURS = GpuProcess(
    gpu="GPU-1", pid=9, name="ray::Worker", memory=70000, user="root", container="c0ffee"
)
ADA = GpuProcess(gpu="GPU-1", pid=77, name="python3", memory=70000, user="ada")
CONTAINER = container("vlaunch-c-gpu02", id="c0ffee0123", role="worker", node="gpu02")
BUSY = Case(
    id="gpu-memory",
    red={"gpu02": "fail"},
    text="70000 MiB of GPU memory used by ada (1 process)",
    fix="`sudo kill 77` on gpu02",
    facts={"gpu02": {"gpu_processes": (ADA,)}},
)
CONTAINED = replace(
    BUSY,
    text="used by root (1 process)",
    fix="`docker stop feedfeedfeed` on gpu02",
    facts={"gpu02": {"gpu_processes": (replace(OURS, container="feed" * 16),)}},
)
CASES = (
    BUSY,
    CONTAINED,
    Case(
        id="gpu-memory",
        red={"gpu02": "warn"},
        text="by unknown processes (GPU 0: 5000 MiB)",
        fix="`nvidia-smi` on gpu02",
        facts={"gpu02": {"gpus": (replace(GPU, memory_used=5000), GPU), "gpu_processes": None}},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_an_unknown_list_of_processes_is_skipped() -> None:
    """It never passes."""
    case = Case(id="gpu-memory", red={}, text="", fix="", facts={"gpu01": {"gpu_processes": None}})

    assert findings(case)[0].status == "skip"
    assert "did not report which" in findings(case)[0].text


def test_the_clusters_own_containers_do_not_count() -> None:
    """They run during a second check."""
    changed = {"containers": (CONTAINER,), "gpu_processes": (OURS,)}
    judged = findings(Case(id="gpu-memory", red={}, text="", fix="", facts={"gpu02": changed}))

    assert (judged[1].status, judged[1].text) == (
        "pass",
        "70000 MiB in use by this cluster's own containers",
    )


def test_the_evidence_has_the_processs_owner() -> None:
    """User, process, memory and container."""
    assert (
        findings(CONTAINED)[1].evidence
        == "root: pid 9 ray::Worker, 70000 MiB, container feedfeedfeed"
    )


def test_other_containers_count() -> None:
    """Containers are distinguished by ID."""
    other = replace(OURS, container="deadbeef")
    changed = {"containers": (CONTAINER,), "gpu_processes": (OURS, other)}
    judged = findings(Case(id="gpu-memory", red={}, text="", fix="", facts={"gpu02": changed}))

    assert (judged[1].status, judged[1].text) == (
        "fail",
        "70000 MiB of GPU memory used by root (1 process)",
    )


def test_unused_gpus_are_not_judged() -> None:
    """Their users do not matter."""
    every = inventory()
    first, two, three = every.nodes
    smaller = replace(every, nodes=(first, replace(two, gpus=1, gpu_ids=("0",)), three))

    assert findings(replace(BUSY, evidence={"inventory": smaller}))[1].status == "pass"


DRAWN = replace(
    BUSY,
    red={"gpu02": "warn"},
    text="a display uses GPU memory (GPU 1: 2000 MiB)",
    fix="stop the desktop",
    facts={
        "gpu02": {
            "gpus": (GPU, replace(GPU, index=1, uuid="GPU-1", memory_used=72000)),
            "gpu_processes": (OURS,),
            "containers": (CONTAINER,),
        }
    },
    survey={
        "gpu02": {
            "gpus": (
                GpuState(index=0, ecc_errors=0, display=True),
                GpuState(index=1, ecc_errors=0, display=True),
            )
        }
    },
)


def test_memory_of_a_display_is_reported() -> None:
    """Beside the cluster's own containers: the driver does not list graphics programs."""
    turns_red(DRAWN)


GB10 = replace(GPU, memory_total=0)
HELD = replace(
    BUSY,
    red={"gpu02": "warn"},
    text="76.0 GiB of memory belong to no process",
    fix="without any, reboot gpu02",
    facts={"gpu02": {"gpus": (GB10, GB10), "gpu_processes": ()}},
    survey={"gpu02": {"driver_memory": 76 * 2**30}},
)


def test_memory_of_dead_processes_is_reported_where_the_host_shares_it() -> None:
    """Not that of living ones, nor if the driver does not report theirs."""
    turns_red(HELD)
    for process in (OURS, replace(OURS, memory=0)):
        facts = {"gpus": (GB10, GB10), "gpu_processes": (process,), "containers": (CONTAINER,)}
        assert findings(replace(HELD, facts={"gpu02": facts}))[1].status == "pass"
    assert findings(replace(HELD, facts={"gpu02": {"gpu_processes": ()}}))[1].status == "pass"


def test_up_only_warns() -> None:
    """Containers start beside it; they need no GPU memory."""
    assert [finding.status for finding in warn_gpu_memory(BUSY.build_evidence())] == [
        "pass",
        "warn",
        "pass",
    ]


@pytest.mark.parametrize(
    ("count", "share", "status"),
    [(2, 0.9, "fail"), (1, 0.9, "pass"), (2, 0.1, "pass"), (2, 0.15, "fail")],
)
def test_a_server_uses_the_remaining_memory(count: int, share: float, status: str) -> None:
    """70,000 of 81,559 MiB of one of two GPUs are in use; fewer GPUs, or less memory of both, may
    suffice.
    """
    _, finding = judge_server_memory(BUSY.build_evidence(), {"gpu01": 2, "gpu02": count}, share)

    assert finding.status == status
    if status == "fail":
        assert finding.text == (
            f"GPU 1 (80 GiB) has memory used by ada (1 process), and the server needs {share:.0%}"
            " of it"
        )
        assert finding.evidence == "ada: pid 77 python3, 70000 MiB"
        assert finding.fix.startswith("stop it: `sudo kill 77` on gpu02, or reserve less")


def test_a_node_without_a_process_list_does_not_block() -> None:
    """The supervisor checks again before the start."""
    unknown = replace(BUSY, facts={"gpu02": {"gpu_processes": None}})

    assert [
        finding.status
        for finding in judge_server_memory(unknown.build_evidence(), {"gpu02": 2}, 0.9)
    ] == ["pass"]
