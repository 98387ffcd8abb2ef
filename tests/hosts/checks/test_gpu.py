"""GPUs of one model, without faults, with a driver for the image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.hosts.checks.catalogue import run_checks
from launcher.hosts.checks.gpu import tag_cuda
from launcher.tools.docker import Image
from launcher.tools.host import survey_output
from launcher.tools.host.parts import Parts
from launcher.tools.host.survey import GpuState, NvlinkFabric
from tests.hosts.checks.spoiled import (
    GPU,
    IMAGE,
    NODES,
    ROCE,
    Case,
    findings,
    inventory,
    named,
    stays_unknown,
    turns_red,
)

H100 = Path(__file__).parents[2] / "fixtures" / "gpu-h100"
A100 = replace(GPU, name="NVIDIA A100-SXM4-80GB", memory_total=81920)
REQUIRE = "cuda>=12.9 brand=unknown,driver>=535,driver<536"
CUDA12 = Image(
    id="sha256:0",
    identity="i",
    digests=(),
    architecture="amd64",
    labels={},
    env={"NVIDIA_REQUIRE_CUDA": REQUIRE},
)
GB200 = (replace(GPU, name="NVIDIA GB200"), replace(GPU, name="NVIDIA GB200", index=1))
PRESENT: dict[str, dict[str, object]] = {"*": {"gpus": GB200}}
CHANNEL = {"*": {"imex": ("channel0",)}}
UNSEEN = {"*": {"error": "no such image"}}
PCIE = (GpuState(index=0, peers={"GPU1": "PHB"}), GpuState(index=1, peers={"GPU0": "PHB"}))
NVLINKED = (GpuState(index=0, peers={"GPU1": "NV18"}), GpuState(index=1, peers={"GPU0": "NV18"}))
DEVICE = "devices: [/dev/nvidia-caps-imex-channels/channel0]"

CASES = (
    Case(
        id="gpu-mig",
        red={"gpu02": "fail"},
        text="in MIG mode: GPU 1",
        fix="sudo nvidia-smi -i 1 -mig 0` on gpu02",
        survey={"gpu02": {"gpus": (GpuState(index=0), GpuState(index=1, mig=True))}},
    ),
    Case(
        id="gpu-model",
        red={"gpu02": "fail"},
        text="2 × NVIDIA A100-SXM4-80GB, while gpu[01,03] has NVIDIA H100 80GB HBM3",
        fix="remove gpu02 from",
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
        fix="its version must match the driver",
        survey={
            "*": {"nvlink": NvlinkFabric(switches=6, service="active")},
            "gpu01": {"nvlink": NvlinkFabric(switches=6, service="inactive")},
        },
    ),
    Case(
        id="peer-access",
        red={"gpu02": "warn"},
        text="an IOMMU translates the GPUs' memory access",
        fix="`iommu=pt` to the kernel's command line and reboot on gpu02",
        survey={
            "*": {"gpus": PCIE, "nvlink": NvlinkFabric(iommu=("identity",))},
            "gpu02": {"gpus": PCIE, "nvlink": NvlinkFabric(iommu=("DMA-FQ",), redirects=2)},
            "gpu03": {"gpus": NVLINKED, "nvlink": NvlinkFabric(iommu=("DMA",))},
        },
    ),
    Case(
        id="peer-access",
        red={"gpu03": "warn"},
        text="2 PCIe bridges with ACS send peer access upstream",
        fix="turn ACS off",
        survey={
            "*": {"gpus": NVLINKED, "nvlink": NvlinkFabric(redirects=4, iommu=("DMA",))},
            "gpu03": {"gpus": PCIE, "nvlink": NvlinkFabric(redirects=2)},
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
        text="reported Xid 31 since the node booted, usually caused by an application",
        fix="grep Xid",
        survey={"gpu01": {"xid": ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1896, name=python3",)}},
    ),
    Case(
        id="gpu-errors",
        red={"gpu01": "warn"},
        text="reported Xid 31, 43 since the node booted, usually caused by an application",
        fix="grep Xid",
        survey={"gpu01": {"xid": tuple((H100 / "xid.txt").read_text().splitlines())}},
    ),
    Case(
        id="driver",
        red={"gpu02": "warn"},
        text="driver 590.10, while gpu[01,03] has 580.95.05",
        fix="install 580.95.05 on gpu02",
        facts={"gpu02": {"gpus": (replace(GPU, driver="590.10"),) * 2}},
    ),
    Case(
        id="driver",
        red=dict.fromkeys(NODES, "fail"),
        text="driver 570.1 is too old for CUDA 13.0.3 of the image, which needs 580",
        fix="or set `image: vllm/vllm-openai:v0.32.0-cu129`",
        facts={"*": {"gpus": (replace(GPU, driver="570.1"),) * 2}},
    ),
    Case(
        id="driver",
        red={"gpu01": "fail"},
        text="too old for CUDA 12.9",
        fix="install driver 525 or newer on gpu01",
        facts={
            "gpu01": {"gpus": (replace(GPU, driver="520.61"),) * 2},
            "*": {"images": {IMAGE: CUDA12}},
        },
    ),
    Case(
        id="driver",
        red={"gpu01": "fail"},
        text="driver 515.1 is older than 520, the first that supports H100",
        fix="install driver 520 or newer on gpu01",
        facts={
            "gpu01": {"gpus": (replace(GPU, driver="515.1"),) * 2},
            "*": {"images": {IMAGE: replace(CUDA12, env={})}},
        },
    ),
    Case(
        id="imex",
        red={"gpu02": "warn"},
        text="no IMEX channel",
        fix="nvidia-imex",
        extra=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts=PRESENT,
        survey={"*": {"imex": ("channel0",)}, "gpu02": {"imex": ()}},
        inside={"*": {"imex": ("channel0",)}},
    ),
    Case(
        id="imex",
        red={"gpu03": "warn"},
        text="the container has no IMEX channel",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        extra=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts=PRESENT,
        survey=CHANNEL,
        inside={**CHANNEL, "gpu03": {"imex": ()}},
    ),
    Case(
        id="imex",
        red=dict.fromkeys(NODES, "warn"),
        text="the container has no IMEX channel",
        fix="run `vlaunch up`, which starts the container with the channel",
        extra=f"{ROCE}\n{DEVICE}",
        facts=PRESENT,
        survey=CHANNEL,
    ),
    Case(
        id="imex",
        red=dict.fromkeys(NODES, "warn"),
        text="the container does not have its IMEX channel",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        facts=PRESENT,
        survey=CHANNEL,
        inside=UNSEEN,
    ),
    Case(
        id="imex",
        red={"gpu02": "warn"},
        text="Docker 29.2 ignores NVIDIA_IMEX_CHANNELS",
        fix="add `devices: [/dev/nvidia-caps-imex-channels/channel0]`",
        extra=f"{ROCE}\nenv: {{NVIDIA_IMEX_CHANNELS: 0}}",
        facts={**PRESENT, "gpu02": {**PRESENT["*"], "docker_version": "29.2.0"}},
        survey=CHANNEL,
        inside=UNSEEN,
    ),
)

UNKNOWN = (
    (
        Case(id="gpu-mig", red={}, text="", fix="", survey={"gpu01": {"gpus": ()}}),
        "reported no MIG mode",
    ),
    (
        Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu01": {"xid": None}}),
        "no permission to read the kernel log",
    ),
    (
        Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu01": {"gpus": ()}}),
        "did not report memory errors",
    ),
    (
        Case(
            id="gpu-model",
            red={},
            text="",
            fix="",
            extra="accelerator: amd",
            facts={"*": {"gpus": None, "amd_renders": (128, 129)}},
        ),
        "AMD GPUs",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_a_passing_gpu_reports_its_model_and_count() -> None:
    """The text for folding."""
    assert (
        findings(Case(id="gpu-model", red={}, text="", fix=""))[0].text
        == "2 × NVIDIA H100 80GB HBM3"
    )


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)


def test_unused_gpus_are_not_judged() -> None:
    """Their faults do not matter."""
    every = inventory()
    first, two, three = every.nodes
    smaller = replace(every, nodes=(first, replace(two, gpus=1, gpu_ids=("0",)), three))
    states = (GpuState(index=0, ecc_errors=0), GpuState(index=1, ecc_errors=4))
    case = Case(id="gpu-errors", red={}, text="", fix="", survey={"gpu02": {"gpus": states}})

    assert findings(case)[1].status == "fail"
    assert findings(replace(case, evidence={"inventory": smaller}))[1].status == "pass"


def test_a_node_with_a_single_gpu_may_use_a_mig_instance() -> None:
    """A warning; unused GPUs do not count."""
    every = inventory()
    first, two, three = every.nodes
    states = (GpuState(index=0, mig=True), GpuState(index=1))
    case = Case(id="gpu-mig", red={}, text="", fix="", survey={"gpu02": {"gpus": states}})

    def status(gpu: str) -> str:
        nodes = (first, replace(two, gpus=1, gpu_ids=(gpu,)), three)
        return findings(replace(case, evidence={"inventory": replace(every, nodes=nodes)}))[
            1
        ].status

    assert (status("0"), status("1")) == ("warn", "pass")


def test_only_data_centre_gpus_get_the_hint_to_cuda_compat() -> None:
    """NVIDIA supports it on these only."""
    old = replace(GPU, driver="570.1")
    geforce = replace(old, name="NVIDIA GeForce RTX 4090")

    assert (
        "cuda-compat"
        in findings(Case(id="driver", red={}, text="", fix="", facts={"*": {"gpus": (old,) * 2}}))[
            0
        ].fix
    )
    assert (
        "cuda-compat"
        not in findings(
            Case(id="driver", red={}, text="", fix="", facts={"*": {"gpus": (geforce,) * 2}})
        )[0].fix
    )


def test_a_missing_image_is_judged_by_its_tag() -> None:
    """vLLM's own tags imply their CUDA version."""
    turns_red(
        Case(
            id="driver",
            red=dict.fromkeys(NODES, "fail"),
            text=(
                "driver 535.10 is too old for CUDA 13, which the image's tag names and which needs"
                " 580"
            ),
            fix="or set `image: vllm/vllm-openai:v0.32.0-cu129`",
            facts={"*": {"images": {}, "gpus": (replace(GPU, driver="535.10"),) * 2}},
        )
    )


@pytest.mark.parametrize(
    ("image", "cuda"),
    [
        ("vllm/vllm-openai:v0.20.0", "13"),
        ("docker.io/vllm/vllm-openai:v1.0", "13"),
        ("vllm/vllm-openai:v0.19.1", ""),
        ("vllm/vllm-openai:v0.32.0-cu129", "12.9"),
        ("vllm/vllm-openai:nightly-cu130", "13.0"),
        ("vllm/vllm-openai:latest", ""),
        ("vllm/vllm-openai", ""),
        ("vllm/vllm-openai:v0.32.0-arm64", ""),
        ("vllm/vllm-openai-cpu:v0.32.0", ""),
        ("registry.example/vllm:v0.32.0", ""),
        ("vllm/vllm-openai@sha256:" + "0" * 64, ""),
    ],
)
def test_cuda_versions_of_tags(image: str, cuda: str) -> None:
    """Other images' tags are not interpreted."""
    assert tag_cuda(image) == cuda


@pytest.mark.parametrize(
    ("image", "images", "reason"),
    [
        (
            "vllm/vllm-openai:latest",
            {},
            ("the image is not on this node yet, so its CUDA version is unknown"),
        ),
        (IMAGE, {IMAGE: replace(CUDA12, env={})}, "the image does not state its CUDA version"),
    ],
)
def test_a_driver_without_a_requirement_does_not_pass(
    image: str, images: dict[str, Image], reason: str
) -> None:
    """It may be too old for the future image."""
    case = Case(id="driver", red={}, text="", fix="", facts={"*": {"images": images}})
    evidence = case.build_evidence()
    (result,) = run_checks(
        replace(evidence, inventory=replace(evidence.inventory, image=image)), ids=["driver"]
    )

    assert {(finding.status, finding.text) for finding in result.findings} == {
        ("skip", f"driver 580.95.05; {reason}")
    }


@pytest.mark.parametrize(
    ("images", "text"),
    [({}, "for CUDA 13 by the image's tag"), ({IMAGE: CUDA12}, "for CUDA 12.9 of the image")],
)
def test_a_passing_driver_reports_the_requirement(images: dict[str, Image], text: str) -> None:
    """The image's, or the tag's without an image."""
    judged = findings(Case(id="driver", red={}, text="", fix="", facts={"*": {"images": images}}))

    assert {(finding.status, finding.text) for finding in judged} == {
        ("pass", f"driver 580.95.05, {text}")
    }


@pytest.mark.parametrize(
    "extra",
    ["env: {NVIDIA_IMEX_CHANNELS: 0}", DEVICE, "privileged: true"],
)
def test_every_setting_for_a_channel_counts(extra: str) -> None:
    """NVIDIA's hook, Docker's devices, or all devices, as far as the inventory has them."""
    case = Case(
        id="imex",
        red={},
        text="",
        fix="",
        extra=f"{ROCE}\n{extra}",
        facts=PRESENT,
        survey=CHANNEL,
        inside=UNSEEN,
    )

    assert {finding.status for finding in findings(case)} == {"pass"}


def test_a_channel_in_the_container_is_enough() -> None:
    """From any source."""
    case = Case(id="imex", red={}, text="", fix="", facts=PRESENT, survey=CHANNEL, inside=CHANNEL)

    assert {finding.text for finding in findings(case)} == {"channel0, in the container"}


@pytest.mark.parametrize(
    ("facts", "text"), [({}, "no GPU here has NVLink"), (PRESENT, "the node was not surveyed")]
)
def test_other_gpus_are_skipped(facts: dict[str, dict[str, object]], text: str) -> None:
    """They have no IMEX channels."""
    judged = findings(Case(id="imex", red={}, text="", fix="", facts=facts))

    assert {finding.status for finding in judged} == {"skip"}
    assert all(finding.text.startswith(text) for finding in judged)


def test_channels_are_parsed() -> None:
    """Their names, none without any, and None without a query."""

    def read(text: str | None) -> tuple[str, ...] | None:
        parts = {} if text is None else {"imex": (text, 0)}
        survey = survey_output.parse_survey(Parts({"clock": ("1 1", 0), **parts}), {})
        assert survey is not None
        return survey.imex

    assert read("channel0\nchannel1") == ("channel0", "channel1")
    assert read("") == ()
    assert read(None) is None
