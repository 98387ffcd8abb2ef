"""Stand-in devices of practice hosts, as far as files go: RDMA cards below /sys/class/infiniband,
AMD's GPUs below /sys/class/kfd, and their nodes in /dev.

No driver stands behind them: who opens one is told that there is no such device. The files' forms
are the kernel's (Documentation/ABI/stable/sysfs-class-infiniband, drivers/gpu/drm/amd/amdkfd).
"""

from __future__ import annotations

import ipaddress
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.lab.gpu_models import BUSES
from launcher.lab.layout import Host, Lab

# Below a host's directory: what lies over /sys/class, and the nodes of its own /dev (host.sh).
CLASSES, NODES = "class", "devices"
_MADE = "devices.json"
# Of uverbs and of render nodes (drivers/infiniband/core/uverbs_main.c,
# Documentation/admin-guide/devices.txt); that of kfd is dynamic, this one is for experiments.
_UVERBS, _DRM, _KFD = (231, 192), (226, 128), (240, 0)
_LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet"}
_PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}


def prepare(lab: Lab, host: Host) -> bool:
    """Write the files of a host's devices; True when it must boot before they are seen, for they
    lie under mounts that are made then.
    """
    files, links, nodes = dict(_files(lab, host)), dict(_links(lab)), list(_nodes(lab))
    wanted = json.dumps([files, links, nodes])
    made = host.dir / _MADE
    if (made.read_text() if made.exists() else json.dumps([{}, {}, []])) == wanted:
        return False
    shutil.rmtree(host.dir / CLASSES, ignore_errors=True)
    for name, text in files.items():
        _parent(host.dir / CLASSES / name).write_text(text)
    for name, target in links.items():
        _parent(host.dir / CLASSES / name).symlink_to(target)
    (host.dir / NODES).write_text("".join(f"{line}\n" for line in nodes))
    made.write_text(wanted)
    return True


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def cards(lab: Lab) -> list[str]:
    """Return the names of a host's RDMA devices: one beside each GPU, and, where `nvidia-smi` tells
    how near they are, one for storage, which is as fast.
    """
    beside = max(1, min(lab.gpus, len(BUSES) - 1))
    count = beside + (lab.accelerator == "nvidia") if lab.rdma else 0
    return [f"mlx5_{number}" for number in range(count)]


def near(lab: Lab, gpu: int) -> dict[str, str]:
    """Return how near a GPU is to each RDMA device, in the words of `nvidia-smi topo -m`."""
    return {name: "PIX" if at == gpu else "SYS" for at, name in enumerate(cards(lab))}


def _files(lab: Lab, host: Host) -> Iterator[tuple[str, str]]:
    for at, name in enumerate(cards(lab)):
        card = f"infiniband/{name}"
        yield f"{card}/hca_type", "MT4129\n"
        yield f"{card}/fw_ver", "28.45.4028\n"
        yield f"infiniband/{_place(at)}/numa_node", f"{at * 2 // len(cards(lab))}\n"
        for field, text in {**_PORT, "link_layer": _LAYERS[lab.rdma]}.items():
            yield f"{card}/ports/1/{field}", f"{text}\n"
        yield f"{card}/ports/1/gids/0", f"fe80:0000:0000:0000:0000:00ff:fe00:{at:04x}\n"
        if lab.rdma == "roce":
            yield from _roce(card, host)
            yield f"infiniband/{_place(at)}/net/eth0", ""
    if lab.accelerator == "amd":
        topology = "kfd/kfd/topology/nodes"
        yield f"{topology}/0/properties", "cpu_cores_count 2\nsimd_count 0\n"
        for at in range(lab.gpus):
            minor = _DRM[1] + at
            text = f"cpu_cores_count 0\nsimd_count 1216\ndrm_render_minor {minor}\n"
            yield f"{topology}/{at + 1}/properties", text


def _roce(card: str, host: Host) -> Iterator[tuple[str, str]]:
    """Yield the part of a GID table that the host's IPv4 address fills: RoCE v1 and v2."""
    number = f"{int(ipaddress.IPv4Address(host.ip)):08x}"
    value = f"0000:0000:0000:0000:0000:ffff:{number[:4]}:{number[4:]}\n"
    for index, kind in ((2, "IB/RoCE v1"), (3, "RoCE v2")):
        yield f"{card}/ports/1/gids/{index}", value
        yield f"{card}/ports/1/gid_attrs/types/{index}", f"{kind}\n"
        yield f"{card}/ports/1/gid_attrs/ndevs/{index}", "eth0\n"


def _links(lab: Lab) -> Iterator[tuple[str, str]]:
    for at, name in enumerate(cards(lab)):
        yield f"infiniband/{name}/device", f"../{_place(at)}"


def _place(at: int) -> str:
    """Return where a card is plugged in; the name begins with a dot, so that it is no device."""
    return f".pci/0000:{BUSES[at]:02x}:01.0"


def _nodes(lab: Lab) -> Iterator[str]:
    """Yield `NAME MAJOR MINOR` for each node below /dev."""
    for at in range(len(cards(lab))):
        yield f"infiniband/uverbs{at} {_UVERBS[0]} {_UVERBS[1] + at}"
    if lab.accelerator == "amd":
        yield f"kfd {_KFD[0]} {_KFD[1]}"
        for at in range(lab.gpus):
            yield f"dri/renderD{_DRM[1] + at} {_DRM[0]} {_DRM[1] + at}"
