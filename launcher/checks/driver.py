"""The NVIDIA driver: one version everywhere, new enough for the image's CUDA and for the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.checks.consistency import having, usual
from launcher.checks.host import not_nvidia
from launcher.checks.shape import Check, Evidence, Finding, Host, failed, passed, skipped, warned
from launcher.tools.expectations import Gpu

# Oldest driver branch for each major version of CUDA
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
NEEDS = {11: 450, 12: 525, 13: 580}


def image_cuda(host: Host) -> str:
    """Return the CUDA version of the inventory's image as its environment says it, or nothing when
    it is not known.
    """
    image = host.facts.images.get(host.inventory.image)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuda:
    """The image's CUDA, empty where it is not known; where the image is on no node (`there`), only
    its tag can tell.
    """

    version: str
    there: bool


def _driver(evidence: Evidence) -> Sequence[Finding]:
    hosts = {host.name: host for host in evidence.reached}
    versions = {name: host.facts.gpus[0].driver for name, host in hosts.items() if host.facts.gpus}
    findings = [
        skipped(name, "`nvidia-smi` gave no driver version")
        for name in hosts
        if name not in versions
    ]
    cuda = _cuda(evidence)
    common = usual(versions)
    for name, version in versions.items():
        old = _too_old(hosts[name], version, cuda)
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
            findings.append(_new_enough(name, version, cuda))
    return findings


def _cuda(evidence: Evidence) -> _Cuda:
    """Return the image's CUDA, from its environment on the first node that tells it."""
    image = evidence.inventory.image
    if not any(host.facts.images.get(image) for host in evidence.reached):
        return _Cuda(version=tag_cuda(image), there=False)
    return _Cuda(version=next(filter(None, map(image_cuda, evidence.reached)), ""), there=True)


def _new_enough(name: str, version: str, cuda: _Cuda) -> Finding:
    if cuda.version:
        told = "of the image" if cuda.there else "by the image's tag"
        return passed(name, f"driver {version}, for CUDA {cuda.version} {told}")
    unknown = (
        "the image does not say its CUDA"
        if cuda.there
        else "the image is not here yet, so its CUDA is not known"
    )
    return skipped(name, f"driver {version}; {unknown}")


def _too_old(host: Host, version: str, cuda: _Cuda) -> Finding | None:
    branch = re.match(r"\d+", version)
    if branch is None:
        return skipped(host, f"the driver's version cannot be read: {version}")
    expected, need = host.expected_gpu, NEEDS.get(_major(cuda.version))
    if need is not None and int(branch[0]) < need:
        told = " of the image, which" if cuda.there else ", which the image's tag tells and which"
        other = _older_image(host.inventory.image, cuda.version)
        return failed(
            host,
            f"driver {version} is too old for CUDA {cuda.version}{told} needs {need} or newer",
            fix=f"install driver {need} or newer on {host.name}{other}{_bridge(expected)}",
        )
    if expected is not None and expected.driver is not None and int(branch[0]) < expected.driver:
        return failed(
            host,
            f"driver {version} is older than {expected.driver}, the first that knows"
            f" {expected.model}",
            fix=f"install driver {expected.driver} or newer on {host.name}",
        )
    return None


def _major(cuda: str) -> int:
    """Return the major version of CUDA, 0 where it is not known."""
    found = re.match(r"\d+", cuda)
    return int(found[0]) if found else 0


def _older_image(image: str, cuda: str) -> str:
    """Name the CUDA 12 variant of vLLM's own image where that is what is used."""
    tag = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:(v[\d.]+)", image)
    return f", or set `image: {image}-cu129`" if tag and _major(cuda) == 13 else ""


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
