"""What nvidia-smi says of each GPU besides its name and memory: identity, errors, nearness to
network cards, who uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.core import untrusted
from launcher.tools.survey import GpuProcess, GpuState, NvlinkFabric

_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # the header of `topo -m` is underlined even into a pipe
# Of a GPU that has fallen off the bus. Drivers from 545 on name its index and list the others
# besides (`GPU3: 0000:04:00.0: Unknown Error`), older ones say this alone.
_LOST = re.compile(r"Unable to determine the device handle for .*")


def read(states: str, topo: str) -> tuple[GpuState, ...]:
    """Read `--query-gpu=index,ecc.errors.uncorrected.volatile.total,display_active,
    mig.mode.current` and `topo -m`.

    A line that is no GPU is an error message, which is kept with the probe's words.
    """
    cells = topology(topo)
    found = []
    for line in untrusted.cut(states).splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not re.fullmatch("[0-9]{1,4}", fields[0]):
            continue
        index, near = int(fields[0]), cells.get(f"GPU{int(fields[0])}", {})
        found.append(
            GpuState(
                index=index,
                # `[N/A]`: has no ECC
                ecc_errors=int(fields[1]) if re.fullmatch("[0-9]{1,15}", fields[1]) else None,
                display=fields[2] == "Enabled",
                mig=fields[3] == "Enabled",
                affinity={name: word for name, word in near.items() if name[:3] != "GPU"},
                peers={name: word for name, word in near.items() if name[:3] == "GPU"},
            )
        )
    return tuple(found)


def lost(text: str) -> tuple[str, ...]:
    """Return what `nvidia-smi` says of GPUs that the driver has lost, a line for each."""
    found = (_LOST.search(line) for line in untrusted.cut(text).splitlines())
    return tuple(match[0][:200] for match in found if match)


def topology(text: str) -> dict[str, Mapping[str, str]]:
    """Return for each GPU how near it is to each RDMA device and to each GPU, from `nvidia-smi topo
    -m`.

    Columns are `NIC0` with a legend below the table, in older drivers the devices' own names.
    """
    lines = [_UNDERLINE.sub("", line) for line in untrusted.cut(text).splitlines()]
    named = (re.fullmatch(r"\s*(NIC\d+): (\S+)\s*", line) for line in lines)
    legend = {match[1]: match[2] for match in named if match}
    header = next((line for line in lines if re.match(r"\s*GPU0\s", line)), "")
    columns = header.partition("CPU Affinity")[0].split()
    rows: dict[str, Mapping[str, str]] = {}
    for line in lines:
        words = line.split()
        whole = line is not header and len(words) > len(columns)
        if not whole or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        cells = zip(columns, words[1:], strict=False)
        rows[words[0]] = {legend.get(name, name): word for name, word in cells}
    return rows


def read_processes(text: str) -> tuple[GpuProcess, ...]:
    """Read `--query-compute-apps=gpu_uuid,pid,process_name,used_memory`, and for each process its
    user and control groups.
    """
    owners: dict[int, tuple[str, str]] = {}
    text = untrusted.cut(text)
    for line in text.splitlines():
        if match := re.match(r"@(\d{1,9}) (\S*) (.*)", line, re.ASCII):
            # Docker: /docker/ID (cgroup v1) or …/docker-ID.scope (systemd); Podman libpod-ID,
            # containerd cri-containerd-ID.
            ids = re.findall(r"[0-9a-f]{64}", match[3])
            owners[int(match[1])] = (match[2], ids[-1] if ids else "")
    found = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(GPU-[^,]+), *(\d{1,9}), *(.*), *([^,]+)", line, re.ASCII):
            user, container = owners.get(int(match[2]), ("", ""))
            memory = int(match[4]) if re.fullmatch("[0-9]{1,12}", match[4].strip()) else 0
            found.append(
                GpuProcess(
                    gpu=match[1],
                    pid=int(match[2]),
                    name=match[3],
                    memory=memory,
                    user=user,
                    container=container,
                )
            )
    return tuple(found)


def read_fabric(text: str) -> NvlinkFabric:
    """Read `switch`, `state` and `service` lines.

    GPUs without such a state say `[N/A]`, or `N/A` (driver 580, an H100 without NVSwitches).
    """
    lines = [line.partition(" ") for line in untrusted.cut(text).splitlines()]
    states = [rest.strip() for word, _, rest in lines if word == "state"]
    return NvlinkFabric(
        switches=sum(word == "switch" for word, _, _ in lines),
        states=tuple(each for each in states if each not in ("", "N/A") and each[0] != "["),
        service=next((rest.strip() for word, _, rest in lines if word == "service"), ""),
    )
