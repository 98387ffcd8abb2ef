"""Live status of a lab cluster, from the kernel and the daemons."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from launcher.lab import hosts, machine, network, processes
from launcher.lab.layout import Host, Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """Status of a host; `disk` (own data) and `memory` (private memory) in bytes."""

    name: str
    ip: str
    network: bool
    booted: bool
    sshd: bool
    dockerd: bool
    images: tuple[str, ...]
    containers: int
    disk: int
    memory: int

    @property
    def up(self) -> bool:
        """True when all parts are up."""
        return self.network and self.booted and self.sshd and self.dockerd


def observe(lab: Lab) -> list[HostStatus]:
    """Return the status of all hosts of a lab."""
    return [_observe(host) for host in lab.hosts]


def to_json(lab: Lab, states: list[HostStatus]) -> str:
    """Format the states as a JSON document."""
    document: dict[str, Any] = {
        "name": lab.name,
        "accelerator": lab.accelerator,
        "gpus": lab.gpus,
        "troubles": [str(trouble) for trouble in lab.troubles],
        "inventory": str(lab.inventory),
        "up": all(state.up for state in states),
        "hosts": [{**asdict(state), "up": state.up} for state in states],
    }
    return json.dumps(document, indent=2)


def to_text(states: list[HostStatus]) -> str:
    """Format the states as an aligned table."""
    head = (
        "HOST",
        "IP",
        "NETWORK",
        "BOOTED",
        "SSHD",
        "DOCKERD",
        "CONTAINERS",
        "DISK",
        "MEMORY",
        "IMAGES",
    )
    rows = [head, *(_row(state) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(state: HostStatus) -> tuple[str, ...]:
    flags = (
        "up" if flag else "down"
        for flag in (state.network, state.booted, state.sshd, state.dockerd)
    )
    return (
        *(
            state.name,
            state.ip,
            *flags,
            str(state.containers),
            _gigabytes(state.disk),
            _gigabytes(state.memory),
        ),
        ", ".join(state.images) or "-",
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _observe(host: Host) -> HostStatus:
    dockerd = hosts.docker_answers(host)
    return HostStatus(
        name=host.name,
        ip=host.ip,
        network=network.address(host) == host.ip,
        booted=processes.init_pid(host) is not None,
        sshd=hosts.ssh_answers(host),
        dockerd=dockerd,
        images=tuple(_docker(host, "images", "--format", "{{.Repository}}:{{.Tag}}"))
        if dockerd
        else (),
        containers=len(_docker(host, "ps", "--quiet")) if dockerd else 0,
        disk=_disk(host),
        memory=sum(processes.memory(process.pid) for process in processes.host_processes(host)),
    )


def _docker(host: Host, *arguments: str) -> list[str]:
    return machine.attempt(*hosts.docker_argv(host, *arguments)).stdout.split()


def _disk(host: Host) -> int:
    fields = machine.attempt(
        "du", "--summarize", "--one-file-system", "--block-size=1", str(host.root)
    ).stdout.split()
    return int(fields[0]) if fields else 0
