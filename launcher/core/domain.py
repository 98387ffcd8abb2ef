"""Frozen value types shared by all layers, without behaviour beyond lookups.

Inventory sections are such types: `launcher/inventory` validates their types, bounds and defaults,
and editors show the descriptions below their fields.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
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
    """The source of a secret: exactly one of the four.

    Its value is never written in the inventory.
    """

    env: values.EnvName | None = None
    """Environment variable of the launcher."""
    file: values.LocalPath | None = None
    """File on this machine, mode 0600, with only the value."""
    command: values.NonEmpty | None = None
    """Command on this machine that prints it (no shell)."""
    prompt: values.Question | None = None
    """true, or the text of the prompt: the value is entered in the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """SSH settings. Omitted keys come from `~/.ssh/config` and the SSH agent."""

    user: values.User | None = None
    """SSH user."""
    port: values.Port | None = None
    """SSH port."""
    identity: values.LocalPath | None = None
    """Private key on this machine; relative paths start at the inventory's directory."""
    jump: values.Jump | None = None
    """Host to go through, as [user@]host[:port]."""
    known_hosts: values.LocalPath | None = None
    """File of known host keys; relative paths start at the inventory's directory."""
    connect_timeout: Annotated[float, values.Bounds(gt=0, le=600)] | None = None
    """Seconds to wait for an SSH connection (default: 10)."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Inventory keys for all nodes that a node may override."""

    connection: Connection = "ssh"
    """ssh, or local: the machine the launcher runs on."""
    ssh: FromMapping[Ssh] = field(default_factory=Ssh)
    """SSH settings."""
    docker: values.ArgvItems = field(default_factory=lambda: ("docker",))
    """Command words, such as [sudo, -n, docker]."""
    hf_home: values.NodePath = "/data/huggingface"
    """Hugging Face cache on the nodes, mounted into the containers."""
    state_dir: values.NodePath | None = None
    """Directory of the launcher's files on the nodes; in the SSH user's home by default."""
    cache_dir: values.NodePath | None = None
    """Compile cache of engines, on a local disk of each node; below `state_dir` by default."""
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
    """Settings of Ray, and its version for images without it; `none`: a cluster without Ray."""

    version: values.RayVersion = "2.60.0"
    """Ray to add to an image that has none; none: the cluster runs without Ray."""
    object_store: values.Size | None = None
    """Object store per node, such as 2GiB; Ray chooses by default."""
    token_auth: bool = True
    """Require a generated token for access to Ray."""

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
    """Rendezvous of ranks, on the first of their nodes: of `mp` servers and data-parallel batches;
    further servers on that node use the next ports.
    """
    dp_rpc: values.Port = 29550
    """Rendezvous of replicas of the `mp` backend, on the first of their nodes."""
    group: values.Port = 29560
    """Connections of the nodes' agents, on the head."""
    probe: values.Port = 29500
    """Rendezvous of the network check's ranks, on the head."""
    copy: values.Port = 29570
    """Model and image copies from node to node."""
    metrics: values.Port = 29580
    """Prometheus metrics of servers, on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDefaults:
    """Defaults for options of `vlaunch serve`."""

    model: values.Model | None = None
    """Model to serve."""
    tp: Annotated[int, values.Bounds(ge=1, le=1024)] | None = None
    """Tensor parallel size; GPUs per node by default."""
    pp: Annotated[int, values.Bounds(ge=1, le=1024)] | None = None
    """Pipeline parallel size; the number of nodes by default."""
    dp: Annotated[int, values.Bounds(ge=1, le=1024)] = 1
    """Replicas of the model behind one endpoint (data parallel size)."""
    plan: Literal["default", "auto"] = "default"
    """Parallelism if none is given: auto: as `vlaunch plan` chooses; default: TP is the GPUs per
    node, PP the number of nodes."""
    backend: Backend = "ray"
    """ray, or mp: vLLM's own multi-node mode, without Ray. With `ray: none` mp is the default."""
    bind: values.Bind | None = None
    """Address the endpoint listens on: 0.0.0.0 by default; with `front:`, only where the front
    reaches it."""
    args: tuple[values.Argument, ...] = field(default_factory=tuple)
    """More arguments for `vllm serve`, one item each."""
    supervise: bool = True
    """Restart the server when a rank, a node or the engine dies."""
    canary: Annotated[float, values.Bounds(ge=1, le=300)] = 5.0
    """Seconds between two health checks."""
    stuck: Annotated[float, values.Bounds(ge=60, le=86400)] = 360.0
    """Seconds without a step until a hanging engine is stopped; vLLM itself gives up after 300."""
    restarts: Annotated[int, values.Bounds(ge=0, le=100)] | None = None
    """Limit of restarts within an hour; unlimited by default."""
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
class TlsSettings:
    """The certificate of the front: `self-signed`, none (`off`), or files on this machine."""

    kind: Literal["self-signed", "off"] = "self-signed"
    """self-signed: `vlaunch up` issues one; off: plain HTTP, with keys readable on the network."""
    cert: values.LocalPath | None = None
    """Certificate and its chain (PEM); relative paths start at the inventory's directory."""
    key: values.LocalPath | None = None
    """Its private key (PEM, without a passphrase)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """One address in front of all servers, with keys and limits: HAProxy, as a container."""

    node: values.NonEmpty | None = None
    """Node of the front; the head by default."""
    nodes: tuple[values.NonEmpty, ...] = ()
    """Several nodes with the same front; limits of keys then count on each of them."""
    address: values.HostName | None = None
    """Name or address that clients use; the `ip` of its first node by default."""
    bind: values.Bind = "0.0.0.0"  # noqa: S104 - users reach the front from outside
    """Address the front listens on."""
    port: values.Port = 8443
    """Port for clients."""
    metrics: values.Port = 29590
    """Port of its Prometheus metrics, on the node's `ip`."""
    tls: Annotated[
        FromMapping[TlsSettings],
        values.Converter(values.expand_shorthand("kind", str), str | FromMapping[TlsSettings]),
    ] = field(default_factory=TlsSettings)
    """self-signed, off, or {cert: FILE, key: FILE}."""
    hold: Annotated[float, values.Bounds(ge=0, le=3600), values.DURATION] = 60.0
    """Time that requests wait while no replica of their server is up; then they get a 503."""
    timeout: Annotated[float, values.Bounds(ge=1, le=86400), values.DURATION] = 3600.0
    """Time that a server may take between two parts of its answer."""
    max_body: values.Size = 64 << 20
    """Largest request, such as 64MiB."""
    image: values.Image = "haproxy:3.2"
    """Image with HAProxy 2.6 or newer; a tag or a digest."""

    @property
    def scheme(self) -> str:
        """Scheme of its URL."""
        return "http" if self.tls.kind == "off" else "https"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Distribution of model files to the nodes."""

    spread: Literal["asked", "auto"] = "asked"
    """auto: `serve` and `batch` first copy or download a missing model to the nodes; asked: only
    with `--fetch`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A bind mount, the same on every node."""

    source: values.NodePath
    """Path on the nodes."""
    target: values.NodePath
    """Path in the containers."""
    read_only: bool = False
    """Mount it read-only."""


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
    """Docker's logging of the containers, as in Docker Compose."""

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
    """Source of a missing image: registry: every node pulls it; nodes: a node that has it, or else
    the head, which pulls it, copies it to the others."""
    accelerator: Accelerator = "nvidia"
    """Hardware that runs the model."""
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
    """Give the containers all rights on their nodes; `devices` and `cap_add` give single ones."""
    logging: FromMapping[Logging] = field(default_factory=Logging)
    """Docker's logging of the containers."""
    mounts: tuple[MountItem, ...] = field(default_factory=tuple)
    """More directories to mount into the containers."""
    secrets: Mapping[values.EnvName, FromMapping[SecretSource]] = field(default_factory=dict)
    """Environment variables with values from elsewhere that are never shown."""
    secrets_in: SecretsIn = "disk"
    """Storage of secrets on the nodes; with memory, a rebooted node needs `vlaunch up`."""
    ports: FromMapping[Ports] = field(default_factory=Ports)
    """TCP ports, free on every node."""
    engine_args: Mapping[values.EngineArg, values.JsonValue] = field(default_factory=dict)
    """vLLM's engine arguments by name, for servers and batch jobs, such as {max_model_len: 8192};
    `serve: args` and a job's own arguments override them.
    """
    serve: FromMapping[ServeDefaults] = field(default_factory=ServeDefaults)
    """Defaults of `vlaunch serve`."""
    front: FromMapping[FrontSettings] | None = None
    """One address in front of all servers, with TLS, keys and limits; none by default."""
    models: FromMapping[ModelSettings] = field(default_factory=ModelSettings)
    """The files of models on the nodes."""
    cap: Annotated[int, values.Bounds(ge=1, le=512)] = 32
    """Maximum number of nodes to contact at the same time."""
    lock_wait: Annotated[int, values.Bounds(ge=0, le=86400)] = 0
    """Seconds to wait for another operator's command to release the cluster's lock; `--lock-wait`
    can only raise it.
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
    def front_nodes(self) -> tuple[Node, ...]:
        """The nodes of the front, in inventory order; none without `front`."""
        if self.front is None:
            return ()
        names = self.front.nodes or (self.front.node or self.head.name,)
        return tuple(node for node in self.nodes if node.name in names)

    @property
    def front_url(self) -> str:
        """The URL of the front for clients, without a path."""
        assert self.front is not None  # noqa: S101 - callers have one
        host = self.front.address or self.front_nodes[0].ip
        host = f"[{host}]" if ":" in host else host
        return f"{self.front.scheme}://{host}:{self.front.port}"

    def server_url(self, server: str) -> str:
        """Return the URL of a server behind the front, for clients; replicas share it."""
        return f"{self.front_url}/{server.partition('.')[0]}/v1"

    def api_bind(self, nodes: Sequence[Node]) -> str:
        """Return the address on which APIs on these nodes listen, unless a server has its own;
        empty if each listens on its node's `ip`.
        """
        if self.serve.bind is not None:
            return self.serve.bind
        if self.front is None:
            return "0.0.0.0"  # noqa: S104 - users reach the endpoint from outside
        fronts = {node.name for node in self.front_nodes}
        if len(fronts) == 1 and {node.name for node in nodes} == fronts:
            return "127.0.0.1"
        return nodes[0].ip if len(nodes) == 1 else ""

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
