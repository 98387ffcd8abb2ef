"""Checks of GPUs: number, model, hardware errors and drivers."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.core.check import Finding, failed, passed, skipped, warned
from launcher.core.domain import Inventory, Node
from launcher.core.sizes import format_count
from launcher.hosts.check import (
    NOT_SURVEYED,
    Check,
    Evidence,
    Host,
    per_host,
    skip_on_cpu,
    skip_unless_nvidia,
    uniform_value,
)

_MIB_PER_GB = 1e9 / 1024**2
# Xids caused by applications (NVIDIA Xid catalog); others are faults of the driver, the GPU or the
# slot.
_APPLICATION_XIDS = {13, 31, 43, 45}
# Oldest driver branch for each major version of CUDA
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
_IMEX = "/dev/nvidia-caps-imex-channels"
_IMEX_VARIABLE = "NVIDIA_IMEX_CHANNELS"  # NVIDIA's hook: libnvidia-container pull request 242
_CDI_DOCKER_VERSION = (
    29,
    2,
)  # first version with CDI for `--gpus`: moby pull 50228


def _judge_accelerator(host: Host) -> Finding | None:
    node, facts = host.node, host.facts
    declared = f"{', '.join(node.gpu_ids) or node.gpus} declared"
    if host.inventory.accelerator == "amd":
        visible = len(facts.amd_renders or ())
        needed = max((int(index) + 1 for index in node.gpu_ids), default=node.gpus)
        if visible < needed:
            return failed(
                node,
                f"{visible} AMD GPUs visible, {declared}",
                evidence=facts.part_errors.get("gpus", ""),
                fix="correct `gpus:` in the inventory, or load the driver: `sudo modprobe amdgpu`",
            )
        return _judge_privileged(host, visible)
    if facts.lost_gpus:
        lost = len(facts.lost_gpus)
        return failed(
            node,
            f"the driver has lost {'a GPU' if lost == 1 else f'{lost} GPUs'}",
            evidence="\n".join(facts.lost_gpus),
            fix=(
                f"reboot {node.name}: until then no container with GPUs starts there. `sudo dmesg |"
                " grep Xid` shows the reason; replace the GPU if it fails again"
            ),
        )
    if facts.gpus is None:
        return failed(
            node,
            "no NVIDIA GPU visible",
            evidence=facts.part_errors.get("gpus", "`nvidia-smi` reported no GPU"),
            fix=(
                "install the driver (`nvidia-smi` must list the GPUs), or set `accelerator:` in the"
                " inventory"
            ),
        )
    if len(facts.used_gpus(node)) < node.gpus:
        fewer = f"`gpus: {len(facts.gpus)}`" if not node.gpu_ids else "other GPUs under `gpus:`"
        return failed(
            node,
            f"{format_count(len(facts.gpus), 'GPU')} visible, {declared}",
            evidence=", ".join(gpu.name for gpu in facts.gpus),
            fix=f"set {fewer} for {node.name}, or find the missing GPU: `nvidia-smi -L`",
        )
    return _judge_privileged(host, len(facts.gpus))


def _judge_privileged(host: Host, visible: int) -> Finding | None:
    """Reject a privileged container for some GPUs: it sees all, and Ray counts from the first."""
    node = host.node
    if not host.inventory.privileged or node.gpus == visible:
        return None
    return failed(
        node,
        f"a container with `privileged: true` sees all {visible} GPUs, {node.gpus} declared",
        fix=(
            f"set `gpus: {visible}` for {node.name}, or replace `privileged: true` by `devices:`"
            " and `cap_add:` (docs/reference/containers.md#more-permissions)"
        ),
    )


def _gpu_models(host: Host) -> tuple[str, ...] | Finding:
    if host.facts.gpus is None:
        nvidia = host.inventory.accelerator == "nvidia"
        unnamed = "models of AMD GPUs are not checked"
        return skipped(host, "`nvidia-smi` reported no GPU" if nvidia else unnamed)
    return tuple(sorted({gpu.name for gpu in host.facts.used_gpus(host.node)}))


def _other_models(host: Host, _: object, common: Sequence[str], others: str) -> Finding:
    text = f"{_describe_gpus(host)}, while {others} has {' and '.join(common)}"
    fix = f"use nodes with one GPU model, or remove {host.name} from the inventory"
    return failed(host, text, fix=fix)


def _describe_gpus(host: Host) -> str:
    counts = Counter(gpu.name for gpu in host.facts.used_gpus(host.node))
    text = "; ".join(f"{count} × {model}" for model, count in counts.items())
    return text or "no GPU is declared"


def _usual_models(host: Host, models: Sequence[str]) -> Finding:
    """Judge that GPUs are of one model with its full memory."""
    text, expected = _describe_gpus(host), host.expected_gpu
    if len(models) > 1:
        fix = f"limit `gpus:` of {host.name} to GPUs of one model"
        return warned(host, f"{text}: GPUs of several models", fix=fix)
    gpu = next(iter(host.facts.used_gpus(host.node)), None)
    if gpu is None or expected is None or expected.memory is None or not gpu.memory_total:
        return passed(host, text)
    if gpu.memory_total >= 0.9 * expected.memory * _MIB_PER_GB:
        return passed(host, text)
    return warned(
        host,
        f"{text} with {gpu.memory_total / _MIB_PER_GB:.0f} GB, {expected.memory:g} GB expected",
        fix=f"check whether it is split: `nvidia-smi -L` on {host.name} lists MIG instances",
    )


def _judge_errors(host: Host) -> Finding:
    node, survey = host.node, host.survey
    if survey is None:
        return skipped(host, NOT_SURVEYED)
    used_indexes = {gpu.index for gpu in host.facts.used_gpus(node)}
    unused_indexes = {gpu.index for gpu in host.facts.gpus or ()} - used_indexes
    counts = ", ".join(
        f"GPU {gpu.index}: {gpu.ecc_errors}"
        for gpu in survey.gpus
        if gpu.ecc_errors and gpu.index not in unused_indexes
    )
    if counts:
        text, lines = f"uncorrected memory errors ({counts})", "\n".join(survey.xid or ())
        return failed(node, text, evidence=lines, fix=_replace_fix(node))
    if survey.xid is None:
        return skipped(
            node,
            "no permission to read the kernel log, so Xid errors are unknown",
            fix=(
                "allow it: `sudo sysctl kernel.dmesg_restrict=0`, or use an SSH user in the group"
                " adm"
            ),
        )
    if survey.xid:
        return _judge_xids(node, survey.xid)
    if not survey.gpus:
        return skipped(node, "no Xid; `nvidia-smi` did not report memory errors")
    if all(gpu.ecc_errors is None for gpu in survey.gpus):
        return passed(node, "no Xid; these GPUs do not count memory errors")
    return passed(node, "no uncorrected memory error and no Xid")


def _judge_xids(node: Node, lines: Sequence[str]) -> Finding:
    """Judge the Xids in a kernel log: a failure, unless applications caused them all."""
    serious = [line for line in lines if _xid_code(line) not in _APPLICATION_XIDS]
    shown = serious or lines
    codes = ", ".join(sorted({str(_xid_code(line) or "?") for line in shown}))
    text, evidence = f"the driver reported Xid {codes} since the node booted", "\n".join(shown[-5:])
    if serious:
        return failed(node, text, evidence=evidence, fix=_replace_fix(node))
    return warned(
        node,
        f"{text}, usually caused by an application",
        evidence=evidence,
        fix=f"find what crashed: `sudo journalctl -k -b | grep Xid` on {node.name}",
    )


def _replace_fix(node: Node) -> str:
    return (
        f"reset the GPU (`sudo nvidia-smi --gpu-reset`) or reboot {node.name}; if the error"
        " returns, replace the GPU (https://docs.nvidia.com/deploy/xid-errors/)"
    )


def _xid_code(line: str) -> int | None:
    match = re.search(r"Xid \([^)]*\): (\d+)", line)
    return int(match[1]) if match else None


def _judge_mig(host: Host) -> Finding:
    """Judge MIG mode of the declared GPUs: a single instance still works."""
    if host.survey is None:
        return skipped(host, NOT_SURVEYED)
    if not host.survey.gpus:
        return skipped(host, "`nvidia-smi` reported no MIG mode")
    declared = {gpu.index for gpu in host.facts.used_gpus(host.node)}
    mig_gpus = [str(gpu.index) for gpu in host.survey.gpus if gpu.mig and gpu.index in declared]
    if not mig_gpus:
        return passed(host, "no GPU is in MIG mode")
    numbers = ",".join(mig_gpus)
    judge = failed if host.node.gpus > 1 else warned
    return judge(
        host,
        f"in MIG mode: GPU {numbers}",
        fix=(
            f"run `sudo nvidia-smi -i {numbers} -mig 0` on {host.name} while nothing uses the GPU,"
            f" or declare other GPUs under `gpus:` for {host.name}"
        ),
    )


def _judge_fabric(host: Host) -> Finding:
    nvlink = host.survey.nvlink if host.survey else None
    if nvlink is None:
        return skipped(host, NOT_SURVEYED)
    unready = sorted({state for state in nvlink.states if state != "Completed"})
    if not nvlink.states and not nvlink.switches:
        return passed(host, "no NVSwitch")
    # GPUs before Hopper have no fabric state, only the service has.
    stopped = not nvlink.states and nvlink.service not in ("active", "")
    if not unready and not stopped:
        return passed(host, "Fabric Manager has configured the NVLink fabric")
    text = f"the NVLink fabric between the GPUs is not ready: {', '.join(unready)}"
    return failed(
        host,
        f"Fabric Manager is {nvlink.service}" if stopped else text,
        fix=(
            f"`sudo systemctl enable --now nvidia-fabricmanager` on {host.name}; its version must"
            " match the driver"
        ),
    )


def _judge_peer_access(host: Host) -> Finding:
    """Judge peer access over PCIe; NVLink needs none, and a single GPU has no peer."""
    survey = host.survey
    fabric = survey.nvlink if survey else None
    if survey is None or fabric is None:
        return skipped(host, NOT_SURVEYED)
    paths = [path for gpu in survey.gpus for path in gpu.peers.values()]
    if not paths or all(path.startswith("NV") for path in paths):
        return passed(host, "the GPUs need no peer access over PCIe")
    translated = [kind for kind in fabric.iommu if kind.startswith("DMA")]
    if not translated and not fabric.redirects:
        return passed(host, "the GPUs reach each other over PCIe")
    text = "an IOMMU translates the GPUs' memory access"
    fix = "add `iommu=pt` to the kernel's command line and reboot"
    if not translated:
        text = f"{format_count(fabric.redirects, 'PCIe bridge')} with ACS send peer access upstream"
        fix = "turn ACS off in the BIOS, or on each bridge with `setpci`"
    return warned(
        host,
        f"{text}: NCCL can hang or be slow between GPUs without NVLink",
        fix=f'{fix} on {host.name}; or set NCCL_P2P_DISABLE: "1" under `env:`',
    )


def image_cuda(host: Host) -> str:
    """Return the CUDA version in the image's environment; empty if unknown."""
    image = host.facts.images.get(host.inventory.image)
    if image is None:
        return ""
    required = re.search(r"cuda>=(\d+\.\d+)", image.env.get("NVIDIA_REQUIRE_CUDA", ""))
    return image.env.get("CUDA_VERSION", "") or (required[1] if required else "")


def tag_cuda(image: str) -> str:
    """Return the CUDA version implied by an image's name; empty if unknown.

    vLLM's images use CUDA 13 since 0.20 (https://github.com/NVIDIA/Model-Optimizer/pull/2042);
    other builds name theirs in a suffix such as `-cu129`.
    """
    tag = image.partition("@")[0]
    suffix = re.search(r"-cu(\d\d)(\d)(?![\d.])", tag)
    if suffix:
        return f"{suffix[1]}.{suffix[2]}"
    match = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:v(\d+)\.(\d+)(?:\.\d+)*", tag)
    return "13" if match and (int(match[1]), int(match[2])) >= (0, 20) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageCuda:
    """The image's CUDA version, empty if unknown; without the image, from its tag."""

    version: str
    image_present: bool

    @property
    def major(self) -> int:
        """The major version, 0 if unknown."""
        match = re.match(r"\d+", self.version)
        return int(match[0]) if match else 0


def _driver_version(host: Host) -> str | Finding:
    if not host.facts.gpus:
        return skipped(host, "`nvidia-smi` gave no driver version")
    version, cuda, expected = (
        host.facts.gpus[0].driver,
        _image_cuda(host.evidence),
        host.expected_gpu,
    )
    branch = re.match(r"\d+", version)
    if branch is None:
        return skipped(host, f"the driver's version cannot be read: {version}")
    required = MIN_DRIVERS.get(cuda.major)
    if required is not None and int(branch[0]) < required:
        source = (
            " of the image, which"
            if cuda.image_present
            else ", which the image's tag names and which"
        )
        fix, image = f"install driver {required} or newer on {host.name}", host.inventory.image
        if re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai:v[\d.]+", image) and cuda.major == 13:
            fix += f", or set `image: {image}-cu129`"
        if expected is None or expected.datacenter:
            fix += "; on data-centre GPUs the image's `cuda-compat` may suffice"
        text = (
            f"driver {version} is too old for CUDA {cuda.version}{source} needs {required} or newer"
        )
        return failed(host, text, fix=fix)
    if expected is not None and expected.driver is not None and int(branch[0]) < expected.driver:
        return failed(
            host,
            f"driver {version} is older than {expected.driver}, the first that supports"
            f" {expected.model}",
            fix=f"install driver {expected.driver} or newer on {host.name}",
        )
    return version


def _image_cuda(evidence: Evidence) -> _ImageCuda:
    """Return the image's CUDA version from the first node that reports it."""
    image = evidence.inventory.image
    if not any(host.facts.images.get(image) for host in evidence.reached):
        return _ImageCuda(version=tag_cuda(image), image_present=False)
    return _ImageCuda(
        version=next(filter(None, map(image_cuda, evidence.reached)), ""), image_present=True
    )


def _other_driver(host: Host, version: str, common: str, others: str) -> Finding:
    text = f"driver {version}, while {others} has {common}"
    return warned(host, text, fix=f"install {common} on {host.name}")


def _usual_driver(host: Host, version: str) -> Finding:
    cuda = _image_cuda(host.evidence)
    if cuda.version:
        source = "of the image" if cuda.image_present else "by the image's tag"
        return passed(host, f"driver {version}, for CUDA {cuda.version} {source}")
    unknown = "the image is not on this node yet, so its CUDA version is unknown"
    if cuda.image_present:
        unknown = "the image does not state its CUDA version"
    return skipped(host, f"driver {version}; {unknown}")


def _skip_imex(inventory: Inventory) -> str:
    if len(inventory.nodes) == 1:
        return "a single node does not use it"
    return skip_unless_nvidia(inventory)


def _judge_imex(host: Host) -> Finding:
    """Judge the IMEX channel of containers, for memory sharing between nodes (GB200 NVL72)."""
    gpu = next(iter(host.facts.gpus or ()), None)
    if gpu is None or not re.search(r"\bGB[23]00\b", gpu.name):
        return skipped(host, "no GPU here has NVLink to other nodes")
    if host.survey is None or host.survey.imex is None:
        return skipped(host, NOT_SURVEYED)
    if not host.survey.imex:
        return warned(
            host,
            "no IMEX channel: NVLink works only within the node",
            evidence=f"{_IMEX} has none",
            fix=(
                f"on {host.name}: `sudo systemctl start nvidia-imex`, and create a channel with the"
                " driver (https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/)"
            ),
        )
    inventory, channels = host.inventory, ", ".join(host.survey.imex[:3])
    configured = inventory.privileged or any(name.startswith(_IMEX) for name in inventory.devices)
    fix = f"add `devices: [{_IMEX}/channel0]` to the inventory and run `vlaunch up`"
    if configured:
        fix = "run `vlaunch up`, which starts the container with the channel"
    inside = host.evidence.inside.get(host.name)
    if inside is not None and not inside.error:
        if inside.imex:
            return passed(host, f"{', '.join(inside.imex[:3])}, in the container")
        return warned(host, "the container has no IMEX channel", fix=fix)
    if configured:
        return passed(host, f"{channels}, in the container")
    if _IMEX_VARIABLE not in host.node.env:
        return warned(host, "the container does not have its IMEX channel", fix=fix)
    version = re.match(r"(\d+)\.(\d+)", host.facts.docker_version or "")
    if version is None or (int(version[1]), int(version[2])) < _CDI_DOCKER_VERSION:
        return passed(host, f"{channels}, requested by {_IMEX_VARIABLE}")
    text = f"Docker {version[0]} ignores {_IMEX_VARIABLE} when it exposes GPUs through CDI"
    return warned(host, text, fix=fix)


ACCELERATOR = Check(
    id="accelerator",
    what="the declared accelerators are visible",
    why=(
        "Ray and vLLM place one rank per accelerator; if one is missing, they wait half an hour,"
        " then fail"
    ),
    judge=per_host(_judge_accelerator),
    skip_reason=skip_on_cpu,
    group="accelerator",
)
CHECKS = (
    ACCELERATOR,
    Check(
        id="gpu-model",
        what="all nodes have the same GPUs",
        why=(
            "the slowest and smallest GPU limits speed and memory of all, and kernels differ"
            " between models"
        ),
        judge=uniform_value(_gpu_models, _other_models, _usual_models),
        group="accelerator",
        skip_reason=skip_on_cpu,
        needs=("accelerator",),
    ),
    Check(
        id="gpu-mig",
        what="no declared GPU is split into MIG instances",
        why=(
            "a process uses one MIG instance at most, and instances have no NVLink or peer access:"
            " ranks see fewer GPUs than Ray counts"
        ),
        judge=per_host(_judge_mig),
        group="accelerator",
        skip_reason=skip_unless_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="fabric-manager",
        what="Fabric Manager runs on NVSwitch nodes",
        why=(
            "without it, CUDA does not start on NVSwitch nodes (error 802), although `nvidia-smi`"
            " lists the GPUs"
        ),
        judge=per_host(_judge_fabric),
        group="accelerator",
        skip_reason=skip_unless_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="peer-access",
        what="GPUs without NVLink reach each other over PCIe",
        why="with an IOMMU or ACS between them, NCCL hangs or computes wrong sums over PCIe",
        judge=per_host(_judge_peer_access),
        group="accelerator",
        skip_reason=skip_unless_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="gpu-errors",
        what="no GPU reported errors since boot",
        why=(
            "a GPU with memory errors or in a bad slot computes wrong numbers or crashes a rank"
            " hours later"
        ),
        judge=per_host(_judge_errors),
        group="accelerator",
        skip_reason=skip_unless_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="driver",
        what="the GPU driver is uniform and supports the image's CUDA",
        why=(
            "with an older driver, every process that uses a GPU fails: unsupported display driver"
            " / cuda driver combination"
        ),
        judge=uniform_value(_driver_version, _other_driver, _usual_driver),
        group="accelerator",
        skip_reason=skip_unless_nvidia,
        needs=("accelerator",),
    ),
    Check(
        id="imex",
        what="containers can use multi-node NVLink (IMEX)",
        why="without an IMEX channel in the container, NCCL uses the slower network between nodes",
        judge=per_host(_judge_imex),
        group="accelerator",
        skip_reason=_skip_imex,
        needs=("accelerator",),
    ),
)
