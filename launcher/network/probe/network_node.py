"""The probe's view of its node without torch: the container's rights and devices, the port, and
NCCL's logs.

Standard library only; imported by `network.py`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib.util
import os
import re
import resource
import socket
from collections.abc import Mapping

from launcher import upstream

NETWORK_ENV = ("NCCL_", "GLOO_", "TP_", "UCX_", "VLLM_HOST_IP")
# PCI codes (pci.ids): NVIDIA and AMD; displays, and accelerators without one.
GPU_VENDORS, GPU_CLASSES = ("0x10de", "0x1002"), ("0x03", "0x12")
LOG_LIMIT = 2_000_000
_RELEVANT = re.compile(
    upstream.text("nccl.channel-line")
    + r"|Using |NET/|WARN|Bootstrap|set by environment|NCCL version|RCCL version|commId|GPU ?Direct"
    r"|GDR|MNNVL|DMA-BUF|nvidia.peermem|[Ee]rror|[Ff]ail|[Uu]nable|No route|refused|timed"
    r" out|[Pp]lugin|OOB "
)
_LINK = re.compile(upstream.text("nccl.channel-line"))
_ONCE = re.compile(
    upstream.any_of("nccl.bootstrap", "nccl.using-network")
    + r"|NET/.* : Using|set by environment|GPU Direct RDMA|NCCL version|WARN"
)


_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *'([\d.]+)'", re.MULTILINE)


class PortUnusable(Exception):
    """The rendezvous port cannot be opened; the text has the reason."""


def network_environment() -> dict[str, str]:
    """Return the variables that configure the network."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(NETWORK_ENV)}


def memlock_limit() -> int | None:
    """Return the lockable memory in bytes; None without a limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def infiniband_devices() -> list[str]:
    """Return the files in /dev/infiniband."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir("/dev/infiniband"))
    return []


def cuda_compatibility(env: Mapping[str, str]) -> dict[str, str]:
    """Return the LD_LIBRARY_PATH that vLLM uses with VLLM_ENABLE_CUDA_COMPATIBILITY, so that an
    older driver works.

    The rules, and the order of the folders, are those of vllm/env_override.py.
    """
    if env.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "").strip().lower() not in ("1", "true"):
        return {}
    conda = env.get("CONDA_PREFIX", "")
    folders = (
        env.get("VLLM_CUDA_COMPATIBILITY_PATH", ""),
        conda and os.path.join(conda, "cuda-compat"),
        f"/usr/local/cuda-{_torch_cuda()}/compat",
    )
    folder = next((folder for folder in folders if folder and os.path.isdir(folder)), "")
    others = [path for path in env.get("LD_LIBRARY_PATH", "").split(":") if path and path != folder]
    return {"LD_LIBRARY_PATH": ":".join((folder, *others))} if folder else {}


def _torch_cuda() -> str:
    """Return torch's CUDA version, without importing it."""
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec is not None else None
    version = _read_file(os.path.join(os.path.dirname(origin), "version.py")) if origin else ""
    match = _TORCH_CUDA.search(version)
    return match[1] if match else ""


def reserve_port(master: str, port: int) -> socket.socket:
    """Bind the rendezvous port without listening yet, so that no other program takes it.

    Raises PortUnusable.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((master, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortUnusable(f"port {port} is taken on the head") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise PortUnusable(
                f"{master} is not an address of this node; its probe must run in the host's network"
            ) from None
        raise PortUnusable(f"cannot bind {master}:{port}: {error.strerror}") from None
    return sock


def relevant_lines(text: str) -> str:
    """Return the lines of an NCCL log that show the network in use, or reject another."""
    return "".join(f"{line}\n" for line in text.splitlines() if _RELEVANT.search(line))


def read_logs(folder: str, limit: int = LOG_LIMIT) -> str:
    """Return the relevant lines of all logs in a folder, at most `limit` characters."""
    paths = sorted(glob.glob(os.path.join(folder, "*")))
    share = limit // max(1, len(paths))
    return "".join(cap_log(_read_file(path), share) for path in paths)


def read_pair_log(folder: str, pid: int, start: int, end: int, limit: int) -> str:
    """Return the lines of a process between two sizes of its log, and its earlier lines about
    devices, which it writes once.
    """
    for path in glob.glob(os.path.join(folder, f"nccl.*.{pid}.log")):
        data = _read_file(path).encode()
        once: dict[str, str] = {}
        for line in data[:start].decode(errors="replace").splitlines():
            if _ONCE.search(line):
                # each communicator repeats it
                once.setdefault(line.partition(" NCCL ")[2] or line, line)
        own = data[start:end].decode(errors="replace").splitlines()
        links = [line for line in own if _LINK.search(line)]
        # The links first: they must not be cut off.
        return cap_log(
            "".join(
                f"{line}\n"
                for line in (*links, *once.values(), *(line for line in own if line not in links))
            ),
            limit,
        )
    return ""


def active_rdma_ports() -> list[str]:
    """Return the active RDMA ports of this container, such as `mlx5_0:1` (sysfs-class-infiniband:
    state `4: ACTIVE`).
    """
    ports = []
    for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*/state")):
        if _read_file(path).startswith("4"):
            parts = path.split("/")
            ports.append(f"{parts[4]}:{parts[6]}")
    return ports


def has_shared_switch(sys: str = "/sys") -> bool | None:
    """Return whether a GPU and an RDMA device are below the same PCIe root port; None without GPUs
    or RDMA devices.

    Only a PCIe switch puts two devices below one root port (`PIX` and `PXB` in `nvidia-smi topo
    -m`), and by default NCCL uses GPUDirect RDMA no farther (NCCL_NET_GDR_LEVEL in its manual).
    """
    gpus = {
        _root_port(path)
        for path in glob.glob(f"{sys}/bus/pci/devices/*")
        if _read_file(f"{path}/vendor").strip() in GPU_VENDORS
        and _read_file(f"{path}/class").startswith(GPU_CLASSES)
    }
    cards = {_root_port(path) for path in glob.glob(f"{sys}/class/infiniband/*/device")}
    return bool(gpus & cards) if gpus and cards else None


def _root_port(path: str) -> str:
    """Return the PCIe root port of a device: `pci0000:15/0000:15:01.0`."""
    return "/".join(os.path.realpath(path).partition("/devices/")[2].split("/")[:2])


def cap_log(text: str, limit: int) -> str:
    """Cut a log's relevant lines to `limit` characters, whole lines, with a note."""
    lines = relevant_lines(text)
    if len(lines) <= limit:
        return lines
    cut = lines[: max(0, limit - 60)]
    return (
        f"{cut[: cut.rfind(chr(10)) + 1]}(vlaunch left out {len(lines) - len(cut)} more"
        " characters)\n"
    )


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(50_000_000)
    except OSError:
        return ""
