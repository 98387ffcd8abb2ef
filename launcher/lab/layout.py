"""The nouns of a practice cluster: which hosts there are, and what everything they own is called.

Every name follows from the lab's own name, so that `down` finds the remains of a half-made or
crashed lab without a record.
"""

from __future__ import annotations

import ipaddress
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.core.errors import RequestError
from launcher.lab import gpu_trouble
from launcher.lab.gpu_models import BUSES, MODELS
from launcher.lab.gpu_trouble import Trouble

LabAccelerator = Literal["cpu", "nvidia", "amd"]
LabRdma = Literal["", "infiniband", "roce"]
_ACCELERATORS: dict[str, LabAccelerator] = {"nvidia": "nvidia", "amd": "amd"}
_RDMA: dict[str, LabRdma] = {"infiniband": "infiniband", "roce": "roce"}

RECORD = "lab.json"
HF_HOME = "/data/huggingface"
FIRST_HOST = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One practice host. Interface names are short because Linux allows 15 characters."""

    lab: str
    name: str
    ip: str
    dir: Path

    @property
    def netns(self) -> str:
        """Its network namespace, as `ip netns` shows it."""
        return f"{self.lab}-{self.name}"

    @property
    def link(self) -> str:
        """The machine's end of its cable."""
        return f"vle{tag(self.lab)}-{self.name.removeprefix('node')}"

    @property
    def marker(self) -> str:
        """The environment entry that every process started for it carries."""
        return f"{marker(self.lab)}{self.name}"

    @property
    def root(self) -> Path:
        """What only this host has of the file system: `/etc`, `/var`, `/root`, …"""
        return self.dir / "fs"

    @property
    def programs(self) -> Path:
        """What lies over the machine's /usr/local/bin, if anything: programs of stand-in GPUs."""
        return self.dir / "programs"

    @property
    def docker_socket(self) -> Path:
        """Its Docker daemon's socket, seen from the machine."""
        return self.root / "run/docker.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A practice cluster: its hosts stand on one bridge, their files below `dir`.

    `gpus` are slots of its processors, or stand-ins of `gpu_model` with `troubles`; `rdma` is the
    fabric that stand-in cards are of.
    """

    name: str
    dir: Path
    subnet: str
    nodes: int
    gpus: int
    accelerator: LabAccelerator = "cpu"
    gpu_model: str = "h100"
    rdma: LabRdma = ""
    troubles: tuple[Trouble, ...] = ()

    @property
    def bridge(self) -> str:
        """The switch the hosts are plugged into."""
        return bridge(self.name)

    @property
    def gateway(self) -> str:
        """The machine's own address on the bridge."""
        return str(ipaddress.ip_network(self.subnet)[1])

    @property
    def prefix(self) -> int:
        """The subnet's prefix length."""
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
        """The inventory that is written for it."""
        return self.dir / "inventory.yaml"

    @property
    def identity(self) -> Path:
        """The client key that the hosts accept."""
        return self.dir / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The hosts' own keys."""
        return self.dir / "known_hosts"

    def host(self, name: str) -> Host:
        """Return the host called `name`; raises KeyError."""
        return {host.name: host for host in self.hosts}[name]


def tag(name: str) -> str:
    """Return eight characters that stand for a lab's name where Linux leaves no room for it."""
    return f"{zlib.crc32(name.encode()):08x}"


def bridge(name: str) -> str:
    """Return the name of a lab's bridge."""
    return f"vlb{tag(name)}"


def is_netns(netns: str, name: str) -> bool:
    """Tell whether a network namespace is a host's of the lab called `name`, and not of one whose
    name only starts so.
    """
    return re.fullmatch(rf"{re.escape(name)}-node\d+", netns) is not None


def marker(name: str) -> str:
    """Return what the environment of every process of a lab holds, up to the host's name."""
    return f"VLAUNCH_LAB={name}/"


def default_dir(name: str) -> Path:
    """Return where a lab lives when nothing else is said."""
    return Path("/var/lib") / name


def make(
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
    """Return a lab as asked for; raises RequestError when it cannot exist.

    `troubles` are words like `node1:lost:3` (`gpu_trouble`).
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise RequestError(
            f"a practice cluster cannot be called `{name}`",
            hint="use lower-case letters, digits and `-`, at most 31 characters",
        )
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise RequestError(
            f"`{subnet}` is not a subnet: {error}", hint="write it like 10.77.0.0/24"
        ) from None
    room = network.num_addresses - FIRST_HOST - 1
    if not 1 <= nodes <= room:
        raise RequestError(
            f"{nodes} hosts do not fit into {subnet}", hint=f"ask for 1 to {max(room, 0)} nodes"
        )
    _gpus(gpus, accelerator, gpu_model, troubles)
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
        troubles=gpu_trouble.read(troubles, hosts=names, gpus=gpus),
    )


def _gpus(gpus: int, accelerator: str, model: str, troubles: Sequence[str]) -> None:
    """Raise RequestError when hosts cannot have such GPUs."""
    if accelerator != "nvidia" and troubles:
        raise RequestError(
            "`--gpu-trouble` needs GPUs that `nvidia-smi` tells of, and these hosts have none",
            hint="add `--accelerator nvidia`",
        )
    if accelerator not in _ACCELERATORS:
        if gpus < 0:
            raise RequestError("a host cannot have fewer than 0 slots")
    elif not 1 <= gpus <= len(BUSES):
        raise RequestError(f"a host has 1 to {len(BUSES)} stand-in GPUs, not {gpus}")
    elif accelerator == "nvidia" and model not in MODELS:
        raise RequestError(
            f"there is no stand-in for the GPU `{model}`", hint=f"choose one of {', '.join(MODELS)}"
        )


def save(lab: Lab) -> None:
    """Write the lab's record into its directory; it also marks the directory as one that may be
    removed.
    """
    lab.dir.mkdir(parents=True, exist_ok=True)
    record = {
        "name": lab.name,
        "subnet": lab.subnet,
        "nodes": lab.nodes,
        "gpus": lab.gpus,
        "accelerator": lab.accelerator,
        "gpu_model": lab.gpu_model,
        "rdma": lab.rdma,
        "troubles": [str(each) for each in lab.troubles],
    }
    (lab.dir / RECORD).write_text(json.dumps(record) + "\n")


def load(directory: Path) -> Lab | None:
    """Read the lab that was made in `directory`; None where there is no record or it cannot be
    read.
    """
    try:
        record: dict[str, Any] = json.loads((directory / RECORD).read_text())
        return make(
            name=str(record["name"]),
            directory=directory,
            subnet=str(record["subnet"]),
            nodes=int(record["nodes"]),
            gpus=int(record["gpus"]),
            accelerator=str(record.get("accelerator", "cpu")),
            gpu_model=str(record.get("gpu_model", "h100")),
            rdma=str(record.get("rdma", "")),
            troubles=[str(each) for each in record.get("troubles", ())],
        )
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return None
