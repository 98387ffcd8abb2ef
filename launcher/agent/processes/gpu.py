"""GPUs of this container, from `nvidia-smi` or AMD's kernel files: free memory, and the processes
that use it.

Query fields: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`; AMD's files: the kernel's
Documentation/gpu/amdgpu/driver-misc.rst.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ... import upstream
from . import children

_GPUS = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
_APPS = (
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
)
_TIMEOUT = 30.0
# No container can mend these: the driver was upgraded, and the kernel still runs the old one; or a
# GPU has fallen off the bus.
DRIVER_MISMATCH = "version mismatch"
HANDLE_LOST = "Unable to determine the device handle"
# Otherwise the container has lost its devices (NVIDIA/nvidia-container-toolkit#48): only a start of
# the container brings them back.
_LOST = (
    upstream.text("nvidia-container-toolkit.nvml-failed"),
    "No devices were found",
    DRIVER_MISMATCH,
    HANDLE_LOST,
)
_ROOT = "/"  # of the kernel's files


class GpuLost(Exception):
    """The driver cannot be queried from this container any more."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory is in MiB, None if unknown; with `unified` memory it is the host's."""

    index: int
    uuid: str
    total: float | None
    used: float | None
    unified: bool = False


def query_gpus(indices: Sequence[int] | None = None, count: int = 1) -> list[Gpu]:
    """Return this container's GPUs, or those with the indices; empty if unknown.

    Raises GpuLost if the driver has lost GPUs, and fewer than `count` of these are left.
    """
    code, out = children.run(_GPUS, _TIMEOUT)
    if HANDLE_LOST in out and indices:  # without an index, the first lost one may hide all others
        code, out = children.run((*_GPUS, f"--id={','.join(map(str, indices))}"), _TIMEOUT)
    lost = [line for line in out.splitlines() if any(error in line for error in _LOST)]
    rows = [row for row in map(_csv_fields, out.splitlines()) if len(row) == 4 and row[0].isdigit()]
    valid = code == 0 or lost
    gpus = list(_amd_gpus()) if code == 127 else [_parse_gpu(row) for row in rows if valid]
    gpus = [gpu for gpu in gpus if indices is None or gpu.index in indices]
    if lost and len(gpus) < max(count, 1):
        raise GpuLost(lost[0].strip()[:200])
    return gpus


def _parse_gpu(row: Sequence[str]) -> Gpu:
    total, used = map(_parse_number, row[2:])
    if unified := row[2] in ("[N/A]", "[Not Supported]"):  # not `[Insufficient Permissions]`
        sizes = dict(re.findall(r"(\w+): +(\d+) kB", _read_text("proc/meminfo")))
        total, free = (float(sizes[name]) / 1024 for name in ("MemTotal", "MemAvailable"))
        used = total - free
    return Gpu(int(row[0]), row[1], total, used, unified)


def _amd_gpus() -> Iterator[Gpu]:
    """Yield AMD's GPUs with a render node in the container, in the order of the KFD's topology."""
    nodes, index = glob.glob(f"{_ROOT}sys/class/kfd/kfd/topology/nodes/*/properties"), 0
    for node in sorted(nodes, key=lambda path: int(path.split("/")[-2])):
        props = dict(re.findall(r"(\w+) (\d+)", _read_text(node)))
        name = f"renderD{props.get('drm_render_minor', '0')}"
        if os.path.exists(f"{_ROOT}dev/dri/{name}"):
            device = f"sys/class/drm/{name}/device"
            # An APU's own memory is a small part of the memory that programs get.
            memory = "mem_info_vram" if props.get("cpu_cores_count", "0") == "0" else "-"
            total, used = (
                _parse_number(_read_text(f"{device}/{memory}_{kind}")) for kind in ("total", "used")
            )
            total, used = (size and size / (1 << 20) for size in (total, used))
            yield Gpu(index, "", total, used)
            index += 1


def free_gpus(share: float, indices: Sequence[int] | None, count: int) -> tuple[int | None, str]:
    """Return how many GPUs have enough free memory for vLLM (None: unknown), and, if these are
    fewer than `count`, which one has not and its user. Raises GpuLost.

    vLLM claims `share` of a GPU's whole memory (`--gpu-memory-utilization`) and exits if that much
    is not free. A GPU with unknown memory counts as free.
    """
    gpus = query_gpus(indices, count)
    full = [gpu for gpu in gpus if _is_full(gpu, share)]
    free = len(gpus) - len(full)
    if not full or free >= count:
        return free if gpus else None, ""
    others = f" (and {len(full) - 1} more)" if len(full) > 1 else ""
    return free, (
        f"{free} of {len(gpus)} GPUs have {share:.0%} of their memory free, {count} needed:"
        f" {_describe_usage(full[0])}{others}"
    )


def _is_full(gpu: Gpu, share: float) -> bool:
    total, used = gpu.total, gpu.used
    return total is not None and used is not None and total - used < share * total


def _describe_usage(gpu: Gpu) -> str:
    """Describe a GPU with used memory."""
    used = f"{(gpu.used or 0) / 1024:.1f} of {(gpu.total or 0) / 1024:.1f} GiB in use"
    has = "shares the host's memory," if gpu.unified else "has"
    apps = sorted((app for app in _gpu_processes() if app[0] == gpu.uuid), key=lambda app: app[3])
    users = [
        f", by {app[2] or 'a process'} (pid {app[1]}, {app[3] / 1024:.1f} GiB)" for app in apps
    ]
    return f"GPU {gpu.index} {has} {used}{''.join(users[-1:])}"


def _gpu_processes() -> list[tuple[str, str, str, float]]:
    """Return processes with GPU memory: GPU UUID, PID, name (own container only), MiB."""
    code, out = children.run(_APPS, _TIMEOUT)
    rows = [row for row in map(_csv_fields, out.splitlines()) if len(row) == 4] if code == 0 else []
    processes = [
        (row[0], row[1], row[2].replace("[Not Found]", "a process"), row[3]) for row in rows
    ]
    return [(uuid, pid, name, _parse_number(size) or 0.0) for uuid, pid, name, size in processes]


def _csv_fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def _read_text(path: str) -> str:
    """Return the text of a small file; empty if unreadable."""
    try:
        with open(os.path.join(_ROOT, path), encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # `[N/A]`, `[Not Supported]`
