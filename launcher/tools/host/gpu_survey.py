"""Parsers for details from nvidia-smi: errors, topology, processes, NVLink fabric."""

import re
from collections.abc import Mapping

from launcher.core import untrusted
from launcher.tools.host.survey import GpuProcess, GpuState, NvlinkFabric

_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # in the header of `topo -m`, even in a pipe
# Printed for a GPU that has fallen off the bus. Drivers from 545 on include its index and list the
# other GPUs as well (`GPU3: 0000:04:00.0: Unknown Error`); older ones print only this.
_LOST = re.compile(r"Unable to determine the device handle for .*")


def parse_gpu_states(states: str, topo: str) -> tuple[GpuState, ...]:
    """Parse `--query-gpu=index,ecc.errors.uncorrected.volatile.total,display_active,
    mig.mode.current` and `topo -m`; skips error messages.
    """
    cells = parse_topology(topo)
    gpus = []
    for line in untrusted.truncate(states).splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not re.fullmatch("[0-9]{1,4}", fields[0]):
            continue
        index, links = int(fields[0]), cells.get(f"GPU{int(fields[0])}", {})
        gpus.append(
            GpuState(
                index=index,
                # `[N/A]` without ECC
                ecc_errors=int(fields[1]) if re.fullmatch("[0-9]{1,15}", fields[1]) else None,
                display=fields[2] == "Enabled",
                mig=fields[3] == "Enabled",
                affinity={name: link for name, link in links.items() if name[:3] != "GPU"},
                peers={name: link for name, link in links.items() if name[:3] == "GPU"},
            )
        )
    return tuple(gpus)


def parse_lost_gpus(text: str) -> tuple[str, ...]:
    """Return the lines of `nvidia-smi` about GPUs that the driver has lost."""
    matches = (_LOST.search(line) for line in untrusted.truncate(text).splitlines())
    return tuple(match[0][:200] for match in matches if match)


def parse_topology(text: str) -> dict[str, Mapping[str, str]]:
    """Parse `nvidia-smi topo -m`: the connection of each GPU to each RDMA device and GPU.

    Columns are `NIC0` with a legend below the table; older drivers use the names of devices.
    """
    lines = [_UNDERLINE.sub("", line) for line in untrusted.truncate(text).splitlines()]
    legend_matches = (re.fullmatch(r"\s*(NIC\d+): (\S+)\s*", line) for line in lines)
    legend = {match[1]: match[2] for match in legend_matches if match}
    header = next((line for line in lines if re.match(r"\s*GPU0\s", line)), "")
    columns = header.partition("CPU Affinity")[0].split()
    rows: dict[str, Mapping[str, str]] = {}
    for line in lines:
        fields = line.split()
        is_row = line is not header and len(fields) > len(columns)
        if not is_row or not re.fullmatch(r"GPU\d+", fields[0]):
            continue
        cells = zip(columns, fields[1:], strict=False)
        rows[fields[0]] = {legend.get(name, name): link for name, link in cells}
    return rows


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Parse `--query-compute-apps=gpu_uuid,pid,process_name,used_memory`, and the user and control
    groups of each process.
    """
    owners: dict[int, tuple[str, str]] = {}
    text = untrusted.truncate(text)
    for line in text.splitlines():
        if match := re.match(r"@(\d{1,9}) (\S*) (.*)", line, re.ASCII):
            # Docker: /docker/ID (cgroup v1) or …/docker-ID.scope (systemd); Podman libpod-ID,
            # containerd cri-containerd-ID.
            ids = re.findall(r"[0-9a-f]{64}", match[3])
            owners[int(match[1])] = (match[2], ids[-1] if ids else "")
    processes = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(GPU-[^,]+), *(\d{1,9}), *(.*), *([^,]+)", line, re.ASCII):
            user, container = owners.get(int(match[2]), ("", ""))
            memory = int(match[4]) if re.fullmatch("[0-9]{1,12}", match[4].strip()) else 0
            processes.append(
                GpuProcess(
                    gpu=match[1],
                    pid=int(match[2]),
                    name=match[3],
                    memory=memory,
                    user=user,
                    container=container,
                )
            )
    return tuple(processes)


def parse_fabric(text: str) -> NvlinkFabric:
    """Parse `switch`, `state`, `service`, `iommu` and `acs` lines.

    GPUs without a state report `[N/A]`, or `N/A` (driver 580, an H100 without NVSwitches).
    """
    lines = [line.partition(" ") for line in untrusted.truncate(text).splitlines()]
    states = [value.strip() for key, _, value in lines if key == "state"]
    return NvlinkFabric(
        switches=sum(key == "switch" for key, _, _ in lines),
        states=tuple(state for state in states if state not in ("", "N/A") and state[0] != "["),
        service=next((value.strip() for key, _, value in lines if key == "service"), ""),
        iommu=tuple(sorted({value.strip() for key, _, value in lines if key == "iommu"} - {""})),
        redirects=sum(int(n) for key, _, n in lines if key == "acs" and n.strip().isdecimal()),
    )
