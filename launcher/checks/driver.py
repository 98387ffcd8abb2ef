"""The NVIDIA driver: one version everywhere, new enough for the image's CUDA and for the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.checks.alike import having, usual
from launcher.checks.host import not_nvidia
from launcher.checks.shape import Check, Evidence, Finding, failed, passed, skipped, warned
from launcher.model import Inventory
from launcher.tools.host import HostFacts

# Oldest driver branch for each major version of CUDA
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
NEEDS = {11: 450, 12: 525, 13: 580}


def image_cuda(inventory: Inventory, facts: HostFacts) -> str:
    """Return the CUDA version of the inventory's image as its environment says it, or nothing when it is not known."""
    image = facts.images.get(inventory.image)
    if image is None:
        return ""
    required = re.search(r"cuda>=(\d+\.\d+)", image.env.get("NVIDIA_REQUIRE_CUDA", ""))
    return image.env.get("CUDA_VERSION", "") or (required[1] if required else "")


def _driver(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    reached = evidence.reached(inventory)
    seen = {node.name: evidence.facts[node.name].gpus for node in reached}
    versions = {name: gpus[0].driver for name, gpus in seen.items() if gpus}
    findings = [skipped(name, "`nvidia-smi` gave no driver version") for name in seen if name not in versions]
    cuda = next(filter(None, (image_cuda(inventory, evidence.facts[node.name]) for node in reached)), "")
    common = usual(versions)
    for name, version in versions.items():
        old = _too_old(name, version, cuda, inventory, evidence)
        if old is not None:
            findings.append(old)
        elif version != common and common is not None:
            findings.append(
                warned(
                    name, f"driver {version}, while {having(versions, common)} has {common}", fix=f"install {common} on {name}"
                )
            )
        else:
            known = f"for CUDA {cuda} of the image" if cuda else "the image's CUDA is not known yet"
            findings.append(passed(name, f"driver {version}, {known}"))
    return findings


def _too_old(name: str, version: str, cuda: str, inventory: Inventory, evidence: Evidence) -> Finding | None:
    branch = re.match(r"\d+", version)
    if branch is None:
        return skipped(name, f"the driver's version cannot be read: {version}")
    gpus = evidence.facts[name].gpus or ()
    expected = evidence.expectations.gpu(gpus[0].name) if gpus else None
    major = re.match(r"\d+", cuda)
    need = NEEDS.get(int(major[0])) if major else None
    if need is not None and int(branch[0]) < need:
        compat = "" if expected and not expected.datacenter else "; on data-centre GPUs the image's `cuda-compat` may bridge it"
        return failed(
            name, f"driver {version} is too old for CUDA {cuda} of the image, which needs {need} or newer",
            fix=f"install driver {need} or newer on {name}{_older_image(inventory, major)}{compat}",
        )  # fmt: skip
    if expected is not None and expected.driver is not None and int(branch[0]) < expected.driver:
        return failed(
            name, f"driver {version} is older than {expected.driver}, the first that knows {expected.model}",
            fix=f"install driver {expected.driver} or newer on {name}",
        )  # fmt: skip
    return None


def _older_image(inventory: Inventory, major: re.Match[str] | None) -> str:
    """Name the CUDA 12 variant of vLLM's own image where that is what is used."""
    tag = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:(v[\d.]+)", inventory.image)
    return f", or set `image: {inventory.image}-cu129`" if tag and major and major[0] == "13" else ""


CHECKS = (
    Check(
        id="driver",
        what="the driver is one version, and new enough for the image's CUDA",
        why="an older driver ends every process that touches a GPU: unsupported display driver / cuda driver combination",
        judge=_driver,
        group="accelerator",
        spared=not_nvidia,
        needs=("accelerator",),
    ),
)
