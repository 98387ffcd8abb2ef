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
    devices = host.inventory.devices
    given = _VARIABLE in host.node.env or any(name.startswith(_FOLDER) for name in devices)
    if given or host.inventory.privileged:
        return passed(host, f"{', '.join(host.survey.imex[:3])}, given to the container")
    return warned(
        host,
        "its IMEX channel is not given to the container",
        fix=f"add `env: {{{_VARIABLE}: 0}}` to the inventory",
    )


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
