"""Hosts of a lab cluster, and the names and paths of everything that belongs to them.

All names derive from the lab's name, so that `lab down` finds the remains of an incomplete or
crashed lab without a record.
"""

import ipaddress
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.core.errors import RequestError
from launcher.core.sizes import format_count
from launcher.lab import gpu_trouble
from launcher.lab.gpu_models import BUSES, MODELS
from launcher.lab.gpu_trouble import GpuTrouble

LabAccelerator = Literal["cpu", "nvidia", "amd"]
LabRdma = Literal["", "infiniband", "roce"]
_ACCELERATORS: dict[str, LabAccelerator] = {"nvidia": "nvidia", "amd": "amd"}
_RDMA: dict[str, LabRdma] = {"infiniband": "infiniband", "roce": "roce"}

RECORD = "lab.json"
HF_HOME = "/data/huggingface"
FIRST_HOST = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Lab host. Interface names are short because Linux allows 15 characters."""

    lab: str
    name: str
    ip: str
    dir: Path

    @property
    def netns(self) -> str:
        """Network namespace, as in `ip netns`."""
        return f"{self.lab}-{self.name}"

    @property
    def link(self) -> str:
        """Interface of the machine at the other end of the host's cable."""
        return f"vle{name_hash(self.lab)}-{self.name.removeprefix('node')}"

    @property
    def marker(self) -> str:
        """Environment entry of all processes started for the host."""
        return f"{marker(self.lab)}{self.name}"

    @property
    def root(self) -> Path:
        """Host's own part of the file system: `/etc`, `/var`, `/root`, …"""
        return self.dir / "fs"

    @property
    def programs(self) -> Path:
        """Overlay of /usr/local/bin, for the programs of simulated GPUs."""
        return self.dir / "programs"

    @property
    def docker_socket(self) -> Path:
        """Socket of the host's Docker daemon, as a path on the machine."""
        return self.root / "run/docker.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Lab cluster: hosts on one bridge, with files below `dir`.

    `gpus` counts CPU slots, or simulated GPUs of `gpu_model` with the faults `troubles`; `rdma` is
    the fabric of the simulated network cards.
    """

    name: str
    dir: Path
    subnet: str
    nodes: int
    gpus: int
    accelerator: LabAccelerator = "cpu"
    gpu_model: str = "h100"
    rdma: LabRdma = ""
    troubles: tuple[GpuTrouble, ...] = ()

    @property
    def bridge(self) -> str:
        """Bridge that connects the hosts."""
        return bridge(self.name)

    @property
    def gateway(self) -> str:
        """Address of the machine on the bridge."""
        return str(ipaddress.ip_network(self.subnet)[1])

    @property
    def prefix(self) -> int:
        """Prefix length of the subnet."""
        return ipaddress.ip_network(self.subnet).prefixlen

    @property
    def hosts(self) -> tuple[Host, ...]:
        """node1, node2, … in order."""
        network = ipaddress.ip_network(self.subnet)
        return tuple(
            Host(
                lab=self.name,
                name=f"node{number}",
                ip=str(network[FIRST_HOST + number - 1]),
                dir=self.dir / "hosts" / f"node{number}",
            )
            for number in range(1, self.nodes + 1)
        )

    @property
    def inventory(self) -> Path:
        """Generated inventory."""
        return self.dir / "inventory.yaml"

    @property
    def identity(self) -> Path:
        """Client key that the hosts accept."""
        return self.dir / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Host keys."""
        return self.dir / "known_hosts"

    def host(self, name: str) -> Host:
        """Return the host called `name`; raises KeyError."""
        return {host.name: host for host in self.hosts}[name]


def name_hash(name: str) -> str:
    """Return an eight-character hash of a lab's name, for names that Linux limits."""
    return f"{zlib.crc32(name.encode()):08x}"


def bridge(name: str) -> str:
    """Return the name of a lab's bridge."""
    return f"vlb{name_hash(name)}"


def is_netns(netns: str, name: str) -> bool:
    """Return True if a network namespace belongs to a host of the lab called exactly `name`."""
    return re.fullmatch(rf"{re.escape(name)}-node\d+", netns) is not None


def marker(name: str) -> str:
    """Return the environment entry of a lab's processes, without the host's name."""
    return f"VLAUNCH_LAB={name}/"


def default_dir(name: str) -> Path:
    """Return the default directory of a lab."""
    return Path("/var/lib") / name


def make_lab(
    *,
    name: str,
    directory: Path | None,
    subnet: str,
    nodes: int,
    gpus: int,
    accelerator: str = "cpu",
    gpu_model: str = "h100",
    rdma: str = "",
    troubles: Sequence[str] = (),
) -> Lab:
    """Create a lab; raises RequestError for invalid values.

    `troubles` are arguments like `node1:lost:3` (`gpu_trouble`).
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise RequestError(
            f"a lab cluster cannot be named `{name}`",
            hint="use lower-case letters, digits and `-`, at most 31 characters",
        )
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise RequestError(
            f"`{subnet}` is not a subnet: {error}", hint="write it like 10.77.0.0/24"
        ) from None
    capacity = network.num_addresses - FIRST_HOST - 1
    if not 1 <= nodes <= capacity:
        raise RequestError(
            f"{subnet} has no room for {format_count(nodes, 'host')}",
            hint=f"use 1 to {max(capacity, 0)} nodes",
        )
    _check_gpus(gpus, accelerator, gpu_model, troubles)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    return Lab(
        name=name,
        dir=(directory or default_dir(name)).absolute(),
        subnet=subnet,
        nodes=nodes,
        gpus=gpus,
        accelerator=_ACCELERATORS.get(accelerator, "cpu"),
        gpu_model=gpu_model,
        rdma=_RDMA.get(rdma, ""),
        troubles=gpu_trouble.parse_troubles(troubles, hosts=names, gpus=gpus),
    )


def _check_gpus(gpus: int, accelerator: str, model: str, troubles: Sequence[str]) -> None:
    """Raise RequestError for an invalid combination of GPU options."""
    if accelerator != "nvidia" and troubles:
        raise RequestError(
            "`--gpu-trouble` needs GPUs that `nvidia-smi` lists, and these hosts have none",
            hint="add `--accelerator nvidia`",
        )
    if accelerator not in _ACCELERATORS:
        if gpus < 0:
            raise RequestError("a host cannot have fewer than 0 slots")
    elif not 1 <= gpus <= len(BUSES):
        raise RequestError(f"a host has 1 to {len(BUSES)} simulated GPUs, not {gpus}")
    elif accelerator == "nvidia" and model not in MODELS:
        raise RequestError(
            f"cannot simulate the GPU `{model}`", hint=f"choose one of {', '.join(MODELS)}"
        )


def save_lab(lab: Lab) -> None:
    """Write the lab's record, which also marks its directory as safe to remove."""
    lab.dir.mkdir(parents=True, exist_ok=True)
    record = {
        "name": lab.name,
        "subnet": lab.subnet,
        "nodes": lab.nodes,
        "gpus": lab.gpus,
        "accelerator": lab.accelerator,
        "gpu_model": lab.gpu_model,
        "rdma": lab.rdma,
        "troubles": [str(trouble) for trouble in lab.troubles],
    }
    (lab.dir / RECORD).write_text(json.dumps(record) + "\n")


def load_lab(directory: Path) -> Lab | None:
    """Read the lab's record from `directory`; None if it is missing or unreadable."""
    try:
        record: dict[str, Any] = json.loads((directory / RECORD).read_text())
        return make_lab(
            name=str(record["name"]),
            directory=directory,
            subnet=str(record["subnet"]),
            nodes=int(record["nodes"]),
            gpus=int(record["gpus"]),
            accelerator=str(record.get("accelerator", "cpu")),
            gpu_model=str(record.get("gpu_model", "h100")),
            rdma=str(record.get("rdma", "")),
            troubles=[str(trouble) for trouble in record.get("troubles", ())],
        )
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return None
