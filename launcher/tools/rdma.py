"""RDMA devices as the kernel shows them below /sys/class/infiniband
(Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.tools.survey import Gid, RdmaDevice, RdmaPort

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and value of every `path:value` line."""
    for line in text.splitlines():
        path, found, value = line.partition(":")
        if found and "/" in path:
            yield path, value.strip()


def pci(path: str) -> str:
    """Return the address of the device at the end of a sysfs path: the last one, behind bridges and
    before `virtio0`.
    """
    found = _PCI.findall(path)
    return str(found[-1]) if found else ""


def read(text: str) -> tuple[RdmaDevice, ...]:
    """Read the devices, in the order of their names."""
    values = dict(entries(text))
    return tuple(
        _device(name, values)
        for name in sorted({path.partition("/")[0] for path in values}, key=_natural)
    )


def _device(name: str, values: dict[str, str]) -> RdmaDevice:
    numbers = {
        int(match[1])
        for path in values
        if (match := re.match(rf"{re.escape(name)}/ports/(\d{{1,3}})/", path))
    }
    numa = values.get(f"{name}/device/numa_node", "")
    return RdmaDevice(
        name=name,
        ports=tuple(_port(number, f"{name}/ports/{number}", values) for number in sorted(numbers)),
        model=values.get(f"{name}/hca_type") or values.get(f"{name}/board_id", ""),
        firmware=values.get(f"{name}/fw_ver", ""),
        pci=pci(values.get(f"{name}/device/pci", "")),
        # -1: the machine has no NUMA
        numa=int(numa) if numa.isdecimal() and numa.isascii() else None,
        netdevs=tuple(
            path.rpartition("/")[2] for path in values if path.startswith(f"{name}/device/net/")
        ),
    )


def _port(number: int, path: str, values: dict[str, str]) -> RdmaPort:
    # `state` is "4: ACTIVE", `phys_state` "5: LinkUp", `rate` "400 Gb/sec (4X NDR)".
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", values.get(f"{path}/rate", ""), re.ASCII)
    gids = [
        Gid(
            index=int(match[1]),
            value=value,
            kind=values.get(f"{path}/gid_attrs/types/{match[1]}", ""),
            netdev=values.get(f"{path}/gid_attrs/ndevs/{match[1]}", ""),
        )
        for each, value in values.items()
        if (match := re.fullmatch(rf"{re.escape(path)}/gids/(\d{{1,4}})", each, re.ASCII))
    ]
    return RdmaPort(
        number=number,
        state=values.get(f"{path}/state", "").rpartition(": ")[2],
        physical=values.get(f"{path}/phys_state", "").rpartition(": ")[2],
        rate=float(rate[1]) if rate else 0.0,
        link_layer=values.get(f"{path}/link_layer", ""),
        gids=tuple(sorted(gids, key=lambda gid: gid.index)),
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [
        (0, int(part)) if part.isdecimal() else (1, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]
