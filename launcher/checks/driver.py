"""The NVIDIA driver: one version everywhere, new enough for the image's CUDA and for the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.checks.consistency import having, usual
from launcher.checks.host import not_nvidia
from launcher.checks.shape import Check, Evidence, Finding, failed, passed, skipped, warned
from launcher.model import Inventory
from launcher.tools.expectations import Gpu
from launcher.tools.host import HostFacts

# Oldest driver branch for each major version of CUDA
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
NEEDS = {11: 450, 12: 525, 13: 580}


def image_cuda(inventory: Inventory, facts: HostFacts) -> str:
    """Return the CUDA version of the inventory's image as its environment says it, or nothing when
    it is not known.
    """
    image = facts.images.get(inventory.image)
    if image is None:
        return ""
    required = re.search(r"cuda>=(\d+\.\d+)", image.env.get("NVIDIA_REQUIRE_CUDA", ""))
    return image.env.get("CUDA_VERSION", "") or (required[1] if required else "")


def tag_cuda(image: str) -> str:
    """Return the CUDA version that an image's name tells, or nothing: vLLM's own tags without a
    suffix, and `-cu129`.

    vLLM's image is built with CUDA 13 since 0.20
    (https://github.com/NVIDIA/Model-Optimizer/pull/2042); its other builds name their version in a
    suffix.
    """
    tag = image.partition("@")[0]
    suffix = re.search(r"-cu(\d\d)(\d)(?![\d.])", tag)
    if suffix:
        return f"{suffix[1]}.{suffix[2]}"
    own = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:v(\d+)\.(\d+)(?:\.\d+)*", tag)
    return "13" if own and (int(own[1]), int(own[2])) >= (0, 20) else ""


def _driver(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    seen = {node.name: evidence.facts[node.name].gpus for node in evidence.reached(inventory)}
    versions = {name: gpus[0].driver for name, gpus in seen.items() if gpus}
    findings = [
        skipped(name, "`nvidia-smi` gave no driver version")
        for name in seen
        if name not in versions
    ]
    cuda, there = _cuda(inventory, evidence)
    common = usual(versions)
    for name, version in versions.items():
        old = _too_old(name, version, cuda, there, inventory, evidence)
        if old is not None:
            findings.append(old)
        elif version != common and common is not None:
            findings.append(
                warned(
                    name,
                    f"driver {version}, while {having(versions, common)} has {common}",
                    fix=f"install {common} on {name}",
                )
            )
        else:
            findings.append(_new_enough(name, version, cuda, there))
    return findings


def _cuda(inventory: Inventory, evidence: Evidence) -> tuple[str, bool]:
    """Return the image's CUDA, empty where it is not known, and whether the image is on any node;
    where it is not, only its tag can tell.
    """
    reached = [evidence.facts[node.name] for node in evidence.reached(inventory)]
    if not any(facts.images.get(inventory.image) for facts in reached):
        return tag_cuda(inventory.image), False
    return next(filter(None, (image_cuda(inventory, facts) for facts in reached)), ""), True


def _new_enough(name: str, version: str, cuda: str, there: bool) -> Finding:
    if cuda:
        told = "of the image" if there else "by the image's tag"
        return passed(name, f"driver {version}, for CUDA {cuda} {told}")
    unknown = (
        "the image does not say its CUDA"
        if there
        else "the image is not here yet, so its CUDA is not known"
    )
    return skipped(name, f"driver {version}; {unknown}")


def _too_old(
    name: str, version: str, cuda: str, there: bool, inventory: Inventory, evidence: Evidence
) -> Finding | None:
    branch = re.match(r"\d+", version)
    if branch is None:
        return skipped(name, f"the driver's version cannot be read: {version}")
    gpus = evidence.facts[name].gpus or ()
    expected = evidence.expectations.gpu(gpus[0].name) if gpus else None
    need = NEEDS.get(_major(cuda))
    if need is not None and int(branch[0]) < need:
        told = " of the image, which" if there else ", which the image's tag tells and which"
        return failed(
            name,
            f"driver {version} is too old for CUDA {cuda}{told} needs {need} or newer",
            fix=(
                f"install driver {need} or newer on {name}{_older_image(inventory, cuda)}"
                f"{_bridge(expected)}"
            ),
        )
    if expected is not None and expected.driver is not None and int(branch[0]) < expected.driver:
        return failed(
            name,
            f"driver {version} is older than {expected.driver}, the first that knows"
            f" {expected.model}",
            fix=f"install driver {expected.driver} or newer on {name}",
        )
    return None


def _major(cuda: str) -> int:
    """Return the major version of CUDA, 0 where it is not known."""
    found = re.match(r"\d+", cuda)
    return int(found[0]) if found else 0


def _older_image(inventory: Inventory, cuda: str) -> str:
    """Name the CUDA 12 variant of vLLM's own image where that is what is used."""
    tag = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:(v[\d.]+)", inventory.image)
    return f", or set `image: {inventory.image}-cu129`" if tag and _major(cuda) == 13 else ""


def _bridge(expected: Gpu | None) -> str:
    """Say what may bridge an older driver, unless the GPU is known to be none of a data centre."""
    if expected is not None and not expected.datacenter:
        return ""
    return "; on data-centre GPUs the image's `cuda-compat` may bridge it"


CHECKS = (
    Check(
        id="driver",
        what="the driver is one version, and new enough for the image's CUDA",
        why=(
            "an older driver ends every process that touches a GPU: unsupported display driver /"
            " cuda driver combination"
        ),
        judge=_driver,
        group="accelerator",
        skip_reason=not_nvidia,
        needs=("accelerator",),
    ),
)
