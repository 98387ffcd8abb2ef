"""Frozen value types shared by all layers, without behaviour beyond lookups.

Inventory sections are such types: `launcher/inventory` validates their types, bounds and defaults,
and editors show the descriptions below their fields.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from launcher.core import values
from launcher.core.values import FromMapping

Accelerator = Literal["nvidia", "amd", "cpu"]
Backend = Literal["ray", "mp"]
Connection = Literal["ssh", "local"]
SecretsIn = Literal["disk", "memory"]
ImageSource = Literal["registry", "nodes"]
Fabric = Literal["ethernet", "infiniband", "roce"]
# Levels of the network between nodes, lowest first.
Level = Literal["any", "rdma", "gdrdma"]
Required = Literal["auto", "gdrdma", "rdma", "any"]
LEVELS: tuple[Level, ...] = ("any", "rdma", "gdrdma")
LEVEL_LABELS: Mapping[Level, str] = {
    "any": "any transport",
    "rdma": "RDMA",
    "gdrdma": "RDMA with GPUDirect",
}
Argv = tuple[str, ...]


def long_options(**values: object) -> Argv:
    """Return command line options such as `--max-rows 5` from keyword arguments."""
    return tuple(
        item
        for name, value in values.items()
        for item in (f"--{name.replace('_', '-')}", str(value))
    )


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A value that prints as `***`; only `reveal()` returns it.

    Secrets leave the control machine on standard input only, into files of mode 0600.
    """

    _value: str

    def reveal(self) -> str:
        """Return the value; call this only to write it to a node."""
        return self._value

    def __repr__(self) -> str:
        return "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSource:
    """Where a secret comes from: exactly one of the four.

    Its value is never written in the inventory.
    """

    env: values.EnvName | None = None
    """Environment variable of the launcher."""
    file: values.LocalPath | None = None
    """File on this machine, mode 0600, with only the value."""
    command: values.NonEmpty | None = None
    """Command on this machine that prints it (no shell)."""
    prompt: values.Question | None = None
    """true, or the text to show: it is asked for in the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """How to log in. What is left out comes from `~/.ssh/config` and the agent."""

    user: values.User | None = None
    """Login name."""
    port: values.Port | None = None
    """SSH port."""
    identity: values.LocalPath | None = None
    """Private key on this machine; relative paths start at the inventory's folder."""
    jump: values.Jump | None = None
    """Host to go through, as [user@]host[:port]."""
    known_hosts: values.LocalPath | None = None
    """File of known host keys; relative paths start at the inventory's folder."""
    connect_timeout: Annotated[float, values.Bounds(gt=0, le=600)] | None = None
    """Seconds until a login is given up (10)."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Inventory keys for all nodes that a node may override."""

    connection: Connection = "ssh"
    """ssh, or local: the machine the launcher runs on."""
    ssh: FromMapping[Ssh] = field(default_factory=Ssh)
    """How to log in."""
    docker: values.ArgvItems = field(default_factory=lambda: ("docker",))
    """Command words, such as [sudo, -n, docker]."""
    hf_home: values.NodePath = "/data/huggingface"
    """Hugging Face cache on the nodes, mounted into the containers."""
    state_dir: values.NodePath | None = None
    """Where the launcher keeps files on the nodes; in the login's home by default."""
    cache_dir: values.NodePath | None = None
    """Where engines keep what they compile, on a disk of each node's own; below `state_dir` by
    default.
    """
    env: Mapping[values.EnvName, values.EnvValue] = field(default_factory=dict)
    """Environment of the containers on every node."""


@dataclass(frozen=True, kw_only=True)
class Node(NodeSettings):
    """A server, with the cluster's settings and its own overrides merged."""

    name: str
    host: str
    ip: str
    gpus: int
    # GPUs of the host, as indexes or driver UUIDs; empty: the first `gpus`.
    gpu_ids: tuple[str, ...] = ()
    head: bool = False
    interface: str | None = None
    hca: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Ray, where the image has none or for its settings; `none` for a cluster without it."""

    version: values.RayVersion = "2.60.0"
    """Ray to add to an image that has none; none: the cluster runs without Ray."""
    object_store: values.Size | None = None
    """Object store per node, such as 2GiB; Ray chooses when it is left out."""
    token_auth: bool = True
    """Let only holders of a generated token talk to Ray."""

    @property
    def off(self) -> bool:
        """True for a cluster without Ray: no batch jobs, and servers use the `mp` backend."""
        return self.version == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """TCP ports, the same on every node."""

    # Containers use the host's network, so these ports must be free. Defaults are Ray's if it has
    # any; ports that Ray would choose at random are fixed for firewalls
    # (https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations).
    gcs: values.Port = 6379
    """Ray's cluster store, on the head."""
    dashboard: values.Port = 8265
    """Ray's dashboard and job API, on the head."""
    client: values.Port = 10001
    """Ray client server, on the head."""
    node_manager: values.Port = 6380
    """Ray's node manager."""
    object_manager: values.Port = 6381
    """Ray's object manager."""
    runtime_env_agent: values.Port = 6382
    """Ray's runtime environment agent."""
    dashboard_agent_grpc: values.Port = 6383
    """Ray's dashboard agent, gRPC."""
    dashboard_agent_http: values.Port = 52365
    """Ray's dashboard agent, HTTP."""
    metrics_export: values.Port = 6384
    """Ray's metrics for Prometheus."""
    worker_min: values.Port = 10002
    """First port for Ray's worker processes."""
    worker_max: values.Port = 19999
    """Last port for Ray's worker processes."""
    api: values.Port = 8000
    """The OpenAI-compatible endpoint, on the head."""
    mp_master: values.Port = 29501
    """Where ranks meet, on the first of their nodes: `mp` ones, and data-parallel ones of batches;
    servers beside each other take the next ones.
    """
    dp_rpc: values.Port = 29550
    """Where replicas of the `mp` backend meet, on the first of their nodes."""
    group: values.Port = 29560
    """Where the nodes' agents meet, on the head."""
    probe: values.Port = 29500
    """Where the ranks of the network check meet, on the head."""
    copy: values.Port = 29570
    """Where a node serves models to the next one, while they are copied."""
    metrics: values.Port = 29580
    """Where the head's agent tells Prometheus how servers are, on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDefaults:
    """What `vlaunch serve` uses where its flags are silent."""

    model: values.Model | None = None
    """Model to serve."""
    tp: Annotated[int, values.Bounds(ge=1, le=1024)] | None = None
    """Tensor parallel size; GPUs per node by default."""
    pp: Annotated[int, values.Bounds(ge=1, le=1024)] | None = None
    """Pipeline parallel size; the number of nodes by default."""
    dp: Annotated[int, values.Bounds(ge=1, le=1024)] = 1
    """Replicas of the model behind one endpoint (data parallel size)."""
    plan: Literal["default", "auto"] = "default"
    """Who chooses the split where none is named: `auto` is `vlaunch plan`, `default` GPUs per node
    and nodes."""
    backend: Backend = "ray"
    """ray, or mp: vLLM's own multi-node mode, without Ray. With `ray: none` mp is the default."""
    bind: values.Bind = "0.0.0.0"  # noqa: S104 - users reach the endpoint from outside
    """Address the endpoint listens on."""
    args: tuple[values.Argument, ...] = field(default_factory=tuple)
    """More arguments for `vllm serve`, each word an item."""
    supervise: bool = True
    """Start the server again when a rank, a node or the engine dies."""
    canary: Annotated[float, values.Bounds(ge=1, le=300)] = 5.0
    """Seconds between two looks at whether it lives."""
    stuck: Annotated[float, values.Bounds(ge=60, le=86400)] = 360.0
    """Seconds without a step until an engine that hangs is ended; vLLM itself ends it at 300."""
    restarts: Annotated[int, values.Bounds(ge=0, le=100)] | None = None
    """Restarts within an hour, until it is given up; by default as many as it takes."""
    timeout: Annotated[float, values.Bounds(ge=1, le=86400)] = 1800.0
    """Seconds to wait for the first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A server as requested on the command line, recorded on the head for a later rollback.

    Placement chooses `tp`, `pp` and `dp` if they are None. `nodes` and `gpus` (per node) limit the
    placement; `env` applies to this server's processes only.
    """

    name: str = "default"
    model: str
    backend: Backend
    host: str
    port: int
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    args: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def spec_fields(self) -> dict[str, Any]:
        """Return the fields of ServerSpec, without those of a subclass."""
        return {name: getattr(self, name) for name in ServerSpec.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How the files of models get to the nodes."""

    spread: Literal["asked", "auto"] = "asked"
    """auto: `serve` and `batch` first bring a model to nodes that lack it, as with `--fetch`;
    asked: only then.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bind mount, the same on every node."""

    source: values.NodePath
    """Path on the nodes."""
    target: values.NodePath
    """Path in the containers."""
    read_only: bool = False
    """Let the containers only read it."""


MountItem = Annotated[
    FromMapping[Mount], values.Converter(values.parse_mount, str | FromMapping[Mount])
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingMount(Mount):
    """A bind mount with a source that must exist for the container to start.

    For other mounts, Docker creates a missing source as an empty directory owned by root.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """What Docker does with the containers' logs, written as in Docker Compose."""

    driver: values.LogDriver | None = None
    """Docker's log driver, such as local or journald; the daemon's own by default."""
    options: Mapping[values.LogOption, values.Argument] | None = None
    """Its options, such as {max-size: 20m, max-file: 5}, which json-file and local have by default;
    {} leaves it to the daemon.
    """


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Inventory keys of the cluster as a whole."""

    cluster: values.ClusterName
    """Name of the cluster; part of container names and labels."""
    image: values.Image
    """vLLM image, the same on every node; a tag or a digest."""
    image_source: ImageSource = "registry"
    """Where `up` has a missing image from: every node its registry, or `nodes`: one that has it, or
    else the head, which pulls it, gives it to the others."""
    accelerator: Accelerator = "nvidia"
    """What the model runs on."""
    ray: Annotated[
        FromMapping[RaySettings],
        values.Converter(
            values.expand_shorthand("version", str, float), str | FromMapping[RaySettings]
        ),
    ] = field(default_factory=RaySettings)
    """Ray's version, its settings, or none."""
    shm: values.Shm = "private"
    """Shared memory: private, host, or a size such as 10GiB."""
    devices: tuple[values.Device, ...] = field(default_factory=tuple)
    """More devices for the containers, as HOST[:CONTAINER][:rwm], such as /dev/gdrdrv."""
    cap_add: tuple[values.Capability, ...] = field(default_factory=tuple)
    """More Linux capabilities for the containers, such as SYS_PTRACE."""
    ulimits: Mapping[values.UlimitName, values.Ulimit] = field(default_factory=dict)
    """Limits of the containers' processes, such as nofile: a number or SOFT:HARD; -1 is none."""
    privileged: bool = False
    """Give the containers every right on their nodes; `devices` and `cap_add` give single ones."""
    logging: FromMapping[Logging] = field(default_factory=Logging)
    """What Docker does with the containers' logs."""
    mounts: tuple[MountItem, ...] = field(default_factory=tuple)
    """More directories to mount into the containers."""
    secrets: Mapping[values.EnvName, FromMapping[SecretSource]] = field(default_factory=dict)
    """Environment variables whose values come from elsewhere and are never shown."""
    secrets_in: SecretsIn = "disk"
    """Where secrets lie on the nodes; in memory, a rebooted node needs `vlaunch up`."""
    ports: FromMapping[Ports] = field(default_factory=Ports)
    """TCP ports, free on every node."""
    engine_args: Mapping[values.EngineArg, values.JsonValue] = field(default_factory=dict)
    """vLLM's engine arguments by name, for servers and batch jobs, such as {max_model_len: 8192};
    `serve: args` and a job's own go over them.
    """
    serve: FromMapping[ServeDefaults] = field(default_factory=ServeDefaults)
    """Defaults of `vlaunch serve`."""
    models: FromMapping[ModelSettings] = field(default_factory=ModelSettings)
    """The files of models on the nodes."""
    cap: Annotated[int, values.Bounds(ge=1, le=512)] = 32
    """Nodes talked to at the same time."""
    lock_wait: Annotated[int, values.Bounds(ge=0, le=86400)] = 0
    """Seconds to wait for another operator's command to release the cluster's lock; `--lock-wait`
    may say more.
    """


@dataclass(frozen=True, kw_only=True)
class Inventory(ClusterSettings):
    """A validated inventory; `path` is its file."""

    path: Path
    nodes: tuple[Node, ...]
    fabric: Fabric = "ethernet"
    require: Required = "auto"
    private: bool = False
    _by_name: Mapping[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Checks look up nodes for every pair.
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})

    @property
    def head(self) -> Node:
        """The node of Ray's head and of rank 0."""
        return next(node for node in self.nodes if node.head)

    @property
    def workers(self) -> tuple[Node, ...]:
        """All nodes except the head, in inventory order."""
        return tuple(node for node in self.nodes if not node.head)

    @property
    def gpus(self) -> int:
        """Accelerators (or CPU slots) in the whole cluster."""
        return sum(node.gpus for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node called `name`; raises KeyError."""
        return self._by_name[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one command on a node; a command that exceeds its deadline has `code` 124."""

    node: str
    code: int
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """True for a command that exited with status 0 before its deadline."""
        return self.code == 0 and not self.timed_out

    @property
    def tail(self) -> str:
        """The last six lines of standard error, or else of standard output, as evidence.

        Omits the advice that Docker's client appends to errors, and curl's line for an HTTP error
        that has a body.
        """
        err = "" if self.err.startswith("curl: (22) ") else self.err
        lines = (err.strip() or self.out.strip() or self.err.strip()).splitlines()
        if lines[1:] and lines[-1].startswith(("Run 'docker ", "See 'docker ")):
            lines = "\n".join(lines[:-1]).rstrip().splitlines()
        return "\n".join(lines[-6:])


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that places `gpu2` before `gpu10`."""
    return [
        (0, int(part)) if part.isdecimal() else (1, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def fold(names: tuple[str, ...] | list[str]) -> str:
    """Fold node names that differ in one number: `('gpu01', 'gpu02', 'gpu04')` → `gpu[01-02,04]`.

    Keeps the order. Inventories accept the same notation, which is that of ClusterShell's node
    sets.
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
    if "." not in text and ":" not in text:
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
