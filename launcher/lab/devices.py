"""Files of simulated devices: RDMA cards below /sys/class/infiniband, AMD GPUs below
/sys/class/kfd, and their nodes in /dev.

They have no driver, so opening one fails with ENXIO. The formats are the kernel's
(Documentation/ABI/stable/sysfs-class-infiniband, drivers/gpu/drm/amd/amdkfd).
"""

import ipaddress
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.lab.gpu_models import BUSES
from launcher.lab.layout import Host, Lab

# Below a host's directory: the overlay of /sys/class, and the nodes of its own /dev (host.sh).
CLASSES, NODES = "class", "devices"
_MANIFEST = "devices.json"
# Device numbers of uverbs and render nodes (drivers/infiniband/core/uverbs_main.c,
# Documentation/admin-guide/devices.txt). That of kfd is dynamic: this one is for experimental use.
_UVERBS, _DRM, _KFD = (231, 192), (226, 128), (240, 0)
_LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet"}
_PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}


def prepare(lab: Lab, host: Host) -> bool:
    """Write a host's device files; True when the host must reboot, which mounts them."""
    files, links, nodes = dict(_files(lab, host)), dict(_links(lab)), list(_nodes(lab))
    manifest = json.dumps([files, links, nodes])
    manifest_file = host.dir / _MANIFEST
    if (
        manifest_file.read_text() if manifest_file.exists() else json.dumps([{}, {}, []])
    ) == manifest:
        return False
    shutil.rmtree(host.dir / CLASSES, ignore_errors=True)
    for name, text in files.items():
        _parent(host.dir / CLASSES / name).write_text(text)
    for name, target in links.items():
        _parent(host.dir / CLASSES / name).symlink_to(target)
    (host.dir / NODES).write_text("".join(f"{line}\n" for line in nodes))
    manifest_file.write_text(manifest)
    return True


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rdma_devices(lab: Lab) -> list[str]:
    """Return the names of a host's RDMA devices: one per GPU, and with `nvidia-smi`, which reports
    the topology, an equally fast one for storage.
    """
    per_gpu = max(1, min(lab.gpus, len(BUSES) - 1))
    count = per_gpu + (lab.accelerator == "nvidia") if lab.rdma else 0
    return [f"mlx5_{number}" for number in range(count)]


def gpu_affinity(lab: Lab, gpu: int) -> dict[str, str]:
    """Return a GPU's connection to each RDMA device, as in `nvidia-smi topo -m`."""
    return {
        name: "PIX" if number == gpu else "SYS" for number, name in enumerate(rdma_devices(lab))
    }


def _files(lab: Lab, host: Host) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(rdma_devices(lab)):
        card = f"infiniband/{name}"
        yield f"{card}/hca_type", "MT4129\n"
        yield f"{card}/fw_ver", "28.45.4028\n"
        yield (
            f"infiniband/{_slot_dir(number)}/numa_node",
            f"{number * 2 // len(rdma_devices(lab))}\n",
        )
        for field, text in {**_PORT, "link_layer": _LAYERS[lab.rdma]}.items():
            yield f"{card}/ports/1/{field}", f"{text}\n"
        yield f"{card}/ports/1/gids/0", f"fe80:0000:0000:0000:0000:00ff:fe00:{number:04x}\n"
        if lab.rdma == "roce":
            yield from _roce(card, host)
            yield f"infiniband/{_slot_dir(number)}/net/eth0", ""
    if lab.accelerator == "amd":
        topology = "kfd/kfd/topology/nodes"
        yield f"{topology}/0/properties", "cpu_cores_count 2\nsimd_count 0\n"
        for number in range(lab.gpus):
            minor = _DRM[1] + number
            text = f"cpu_cores_count 0\nsimd_count 1216\ndrm_render_minor {minor}\n"
            yield f"{topology}/{number + 1}/properties", text


def _roce(card: str, host: Host) -> Iterator[tuple[str, str]]:
    """Yield the GID table entries of the host's IPv4 address: RoCE v1 and v2."""
    number = f"{int(ipaddress.IPv4Address(host.ip)):08x}"
    value = f"0000:0000:0000:0000:0000:ffff:{number[:4]}:{number[4:]}\n"
    for index, kind in ((2, "IB/RoCE v1"), (3, "RoCE v2")):
        yield f"{card}/ports/1/gids/{index}", value
        yield f"{card}/ports/1/gid_attrs/types/{index}", f"{kind}\n"
        yield f"{card}/ports/1/gid_attrs/ndevs/{index}", "eth0\n"


def _links(lab: Lab) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(rdma_devices(lab)):
        yield f"infiniband/{name}/device", f"../{_slot_dir(number)}"


def _slot_dir(number: int) -> str:
    """Return a card's PCI directory; with the leading dot, it is not taken for a device."""
    return f".pci/0000:{BUSES[number]:02x}:01.0"


def _nodes(lab: Lab) -> Iterator[str]:
    """Yield `NAME MAJOR MINOR` for each node below /dev."""
    for number in range(len(rdma_devices(lab))):
        yield f"infiniband/uverbs{number} {_UVERBS[0]} {_UVERBS[1] + number}"
    if lab.accelerator == "amd":
        yield f"kfd {_KFD[0]} {_KFD[1]}"
        for number in range(lab.gpus):
            yield f"dri/renderD{_DRM[1] + number} {_DRM[0]} {_DRM[1] + number}"
