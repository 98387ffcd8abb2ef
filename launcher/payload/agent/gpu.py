"""What `nvidia-smi` says of this container's GPUs: whether enough memory is free to start, who
holds it, and whether they work.

Standard library only. Query fields: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import children

_GPUS = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
)
_APPS = (
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
)
_TIMEOUT = 30.0
# The container has lost its devices (NVIDIA/nvidia-container-toolkit#48): only a start of the
# container brings them back.
_LOST = (
    "Failed to initialize NVML",
    "Unable to determine the device handle",
    "No devices were found",
)


class Lost(Exception):
    """The driver cannot be asked from this container any more."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory is in MiB, None where the driver gives none (unified memory), `busy` in
    percent.
    """

    index: int
    uuid: str
    total: float | None
    used: float | None
    busy: float | None


def look() -> list[Gpu] | None:
    """Return this container's GPUs; None where nobody can say (no `nvidia-smi`). Raises Lost."""
    code, out = children.run(_GPUS, _TIMEOUT)
    if any(words in out for words in _LOST):
        raise Lost(out.strip().splitlines()[0][:200])
    if code != 0:
        return None
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    return [
        Gpu(int(row[0]), row[1], _number(row[2]), _number(row[3]), _number(row[4]))
        for row in rows
        if len(row) == 5 and row[0].isdigit()
    ]


def held(share: float, chosen: Sequence[int] | None) -> str:
    """Say which GPU has less free memory than vLLM will claim, and who holds it; empty when all
    have enough. Raises Lost.

    vLLM claims `share` of a GPU's whole memory (`--gpu-memory-utilization`) and ends when that much
    is not free.
    """
    for gpu in look() or ():
        if (chosen is not None and gpu.index not in chosen) or not gpu.total or gpu.used is None:
            continue
        if gpu.total - gpu.used < share * gpu.total:
            who = _holder(gpu.uuid)
            by = f", by {who}" if who else ""
            return (
                f"GPU {gpu.index} has {gpu.used / 1024:.1f} of {gpu.total / 1024:.1f} GiB in"
                f" use{by}"
            )
    return ""


def busy(chosen: Sequence[int] | None) -> float | None:
    """Return the highest utilisation of the GPUs in percent; None where nobody can say."""
    try:
        found = [
            gpu.busy
            for gpu in look() or ()
            if gpu.busy is not None and (chosen is None or gpu.index in chosen)
        ]
    except Lost:
        return None
    return max(found, default=None)


def _holder(uuid: str) -> str:
    """Name the process that holds most of a GPU's memory; processes of other containers have no
    name here.
    """
    code, out = children.run(_APPS, _TIMEOUT)
    rows = (
        [[word.strip() for word in line.split(",")] for line in out.splitlines()]
        if code == 0
        else []
    )
    mine = [
        (row[1], row[2], _number(row[3]) or 0.0) for row in rows if len(row) == 4 and row[0] == uuid
    ]
    if not mine:
        return ""
    pid, name, used = max(mine, key=lambda each: each[2])
    return f"{name or 'a process'} (pid {pid}, {used / 1024:.1f} GiB)"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # `[N/A]`, `[Not Supported]`
