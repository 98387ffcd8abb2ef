"""NVLink between nodes (GB200 NVL72): the channel by which GPUs of several nodes share memory."""

from __future__ import annotations

import re

from launcher.checks.host import not_nvidia
from launcher.checks.shape import (
    UNSURVEYED,
    Check,
    Finding,
    Host,
    each,
    passed,
    skipped,
    warned,
)
from launcher.model import Inventory

_FOLDER = "/dev/nvidia-caps-imex-channels"
_VARIABLE = "NVIDIA_IMEX_CHANNELS"  # of NVIDIA's hook: libnvidia-container pull request 242
_CDI = (29, 2)  # the first Docker whose `--gpus` uses CDI instead of the hook: moby pull 50228


def _not_asked(inventory: Inventory) -> str:
    """Say why there is nothing to share."""
    if len(inventory.nodes) == 1:
        return "one node shares memory with nobody"
    return not_nvidia(inventory)


def _channel(host: Host) -> Finding:
    gpu = next(iter(host.facts.gpus or ()), None)
    if gpu is None or not re.search(r"\bGB[23]00\b", gpu.name):
        return skipped(host, "no GPU here has NVLink to other nodes")
    if host.survey is None or host.survey.imex is None:
        return skipped(host, UNSURVEYED)
    if not host.survey.imex:
        return warned(
            host,
            "there is no IMEX channel, without which NVLink ends at the node",
            evidence=f"{_FOLDER} has none",
            fix=(
                f"on {host.name}: `sudo systemctl start nvidia-imex`, and a channel of the driver's"
                " (https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/)"
            ),
        )
    inside = host.evidence.inside.get(host.name)
    if inside is not None and not inside.error:
        if inside.imex:
            return passed(host, f"{', '.join(inside.imex[:3])}, in the container")
        return warned(host, "the container has no IMEX channel", fix=_fix(host))
    return _by_inventory(host, ", ".join(host.survey.imex[:3]))


def _by_inventory(host: Host, channels: str) -> Finding:
    """Judge what the inventory gives to a container that was not looked into."""
    if _device_given(host.inventory):
        return passed(host, f"{channels}, given to the container")
    if _VARIABLE not in host.node.env:
        return warned(host, "its IMEX channel is not given to the container", fix=_fix(host))
    version = re.match(r"(\d+)\.(\d+)", host.facts.docker_version or "")
    if version is None or (int(version[1]), int(version[2])) < _CDI:
        return passed(host, f"{channels}, which {_VARIABLE} asks for")
    return warned(
        host,
        f"Docker {version[0]} does not read {_VARIABLE} where it hands out GPUs through CDI",
        fix=_fix(host),
    )


def _device_given(inventory: Inventory) -> bool:
    return inventory.privileged or any(name.startswith(_FOLDER) for name in inventory.devices)


def _fix(host: Host) -> str:
    if _device_given(host.inventory):
        return "run `vlaunch up`, which starts the container with the channel"
    return f"add `devices: [{_FOLDER}/channel0]` to the inventory and run `vlaunch up`"


CHECKS = (
    Check(
        id="imex",
        what="GPUs whose NVLink reaches other nodes may use it",
        why="without an IMEX channel in the container NCCL takes the slower network between nodes",
        judge=each(_channel),
        group="accelerator",
        skip_reason=_not_asked,
        needs=("accelerator",),
    ),
)
