"""The nouns every layer shares: plain frozen values, no behaviour beyond looking things up, no
imports from the project.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Accelerator = Literal["nvidia", "amd", "cpu"]
Backend = Literal["ray", "mp"]
SecretsIn = Literal["disk", "memory"]
Fabric = Literal["ethernet", "infiniband", "roce"]
# What the network between nodes must at least be, the least first.
Level = Literal["any", "rdma", "gdrdma"]
LEVELS: tuple[Level, ...] = ("any", "rdma", "gdrdma")
LEVEL_WORDS: Mapping[Level, str] = {
    "any": "any transport",
    "rdma": "RDMA",
    "gdrdma": "RDMA with GPUDirect",
}
Argv = tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A value that must never be shown: `str`, `repr` and formatting give `***`; `reveal()` gives
    the value.

    Secrets leave the control machine on standard input only, into files of mode 0600.
    """

    _value: str

    def reveal(self) -> str:
        """Return the value itself; call this only where the bytes are written to a node."""
        return self._value

    def __repr__(self) -> str:
        return "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSource:
    """Where the inventory says a secret comes from; exactly one field is set.

    `prompt` is the question to ask a person.
    """

    env: str | None = None
    file: str | None = None
    command: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """How to log in to one node; `None` leaves the choice to `~/.ssh/config` and the agent."""

    user: str | None = None
    port: int | None = None
    identity: str | None = None
    jump: str | None = None
    known_hosts: str | None = None
    connect_timeout: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One server, with the cluster's values and its own overrides already merged."""

    name: str
    host: str
    ip: str
    gpus: int
    head: bool = False
    connection: Literal["ssh", "local"] = "ssh"
    ssh: Ssh = field(default_factory=Ssh)
    docker: Argv = ("docker",)
    hf_home: str = "/data/huggingface"
    state_dir: str | None = None
    interface: str | None = None
    hca: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Ray as the containers run it; a version of `none` is no Ray.

    `object_store` is in bytes; `None` leaves it to Ray.
    """

    version: str = "2.60.0"
    object_store: int | None = None
    token_auth: bool = True

    @property
    def off(self) -> bool:
        """True when the cluster has no Ray: servers are of the `mp` backend, and there are no batch
        jobs.
        """
        return self.version == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """TCP ports on every node; everything runs in the host's network, so they must be free there.

    Defaults are Ray's own where Ray has one; the ones Ray would pick at random are pinned, so that
    a firewall can be told
    (https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations).
    """

    gcs: int = 6379
    dashboard: int = 8265
    client: int = 10001
    node_manager: int = 6380
    object_manager: int = 6381
    runtime_env_agent: int = 6382
    dashboard_agent_grpc: int = 6383
    dashboard_agent_http: int = 52365
    metrics_export: int = 6384
    worker_min: int = 10002
    worker_max: int = 19999
    api: int = 8000
    mp_master: int = 29501
    dp_rpc: int = 29550
    group: int = 29560
    probe: int = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDefaults:
    """What `vlaunch serve` uses where its flags are silent.

    `tp`/`pp` of `None` mean: derive from the cluster.

    With `supervise` the server is looked at every `canary` seconds, counts as dead when nothing at
    all has moved for `stuck` seconds, and is started again at most `restarts` times in an hour
    (`None`: as many as it takes).
    """

    model: str | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int = 1
    backend: Backend = "ray"
    bind: str = "0.0.0.0"  # noqa: S104 - users reach the endpoint from outside
    args: tuple[str, ...] = ()
    supervise: bool = True
    canary: float = 5.0
    stuck: float = 300.0
    restarts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bind mount, the same on every node.

    Docker makes a missing source as an empty directory of root's; with `must_exist` the container
    does not start instead.
    """

    source: str
    target: str
    read_only: bool = False
    must_exist: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A validated inventory: what was asked for. `path` is the file it came from."""

    path: Path
    cluster: str
    image: str
    nodes: tuple[Node, ...]
    accelerator: Accelerator = "nvidia"
    ray: RaySettings = field(default_factory=RaySettings)
    fabric: Fabric = "ethernet"
    require: Level | Literal["auto"] = "auto"
    shm: int | Literal["private", "host"] = "private"
    mounts: tuple[Mount, ...] = ()
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    secrets_in: SecretsIn = "disk"
    ports: Ports = field(default_factory=Ports)
    serve: ServeDefaults = field(default_factory=ServeDefaults)
    cap: int = 32

    @property
    def head(self) -> Node:
        """The node that runs Ray's head (and rank 0)."""
        return next(node for node in self.nodes if node.head)

    @property
    def workers(self) -> tuple[Node, ...]:
        """All nodes but the head, in inventory order."""
        return tuple(node for node in self.nodes if not node.head)

    @property
    def gpus(self) -> int:
        """Accelerators (or CPU slots) in the whole cluster."""
        return sum(node.gpus for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node called `name`; raises KeyError."""
        return {node.name: node for node in self.nodes}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a node answered to one command.

    `timed_out` means the deadline ended it (`code` is then 124).
    """

    node: str
    code: int
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """True when the command ended by itself with exit status 0."""
        return self.code == 0 and not self.timed_out

    @property
    def tail(self) -> str:
        """The last lines of what it said, errors preferred: the evidence to show."""
        return "\n".join((self.err.strip() or self.out.strip()).splitlines()[-6:])


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts `gpu2` before `gpu10`."""
    return [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    ]


def fold(names: tuple[str, ...] | list[str]) -> str:
    """Fold node names that differ in one number, in the order given: `('gpu01', 'gpu02', 'gpu04')`
    → `gpu[01-02,04]`.

    The notation is the one inventories accept (and ClusterShell's node sets use).
    """
    groups: dict[tuple[str, str], list[str]] = {}
    plain: list[tuple[tuple[str, str] | None, str]] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if match is None or _is_ip(name):
            plain.append((None, name))
            continue
        key = (match[1], match[3])
        if key not in groups:
            plain.append((key, name))
        groups.setdefault(key, []).append(match[2])
    return ",".join(name if key is None else _fold_group(key, groups[key]) for key, name in plain)


def _fold_group(key: tuple[str, str], digits: list[str]) -> str:
    if len(digits) == 1:
        return f"{key[0]}{digits[0]}{key[1]}"
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(runs[-1][-1]) + 1 == int(digit) and len(runs[-1][-1]) == len(digit):
            runs[-1].append(digit)
        else:
            runs.append([digit])
    inside = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{key[0]}[{inside}]{key[1]}"


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
