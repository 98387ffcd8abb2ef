"""The shape of an inventory file: every key, its type and its explanation.

Rules between keys are in `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from launcher.inventory import values
from launcher.model import Ports, ServeDefaults

_PORTS = Ports()


class Section(BaseModel):
    """A mapping in the file. A known key without a value counts as not written.

    `entries` names the lists whose items have keys of the top level too, and what one item is
    called.
    """

    entries: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.known()
        return {key: item for key, item in value.items() if item is not None or key not in known}

    @classmethod
    def known(cls) -> dict[str, FieldInfo]:
        """Return the fields by the keys they have in the file, where a key may be a word of
        Python's, such as `class`.
        """
        return {field.alias or name: field for name, field in cls.model_fields.items()}


def shorthand(key: str, *kinds: type) -> Callable[[object], object]:
    """Let `section: VALUE` stand for `section: {key: VALUE}`."""

    def read(value: object) -> object:
        return {key: value} if isinstance(value, kinds) and not isinstance(value, bool) else value

    return read


class RaySection(Section):
    """Ray, where the image has none or for its settings; `none` for a cluster without it."""

    version: values.RayVersion = Field(
        default="2.60.0",
        description="Ray to add to an image that has none; none: the cluster runs without Ray.",
    )
    object_store: values.Size | None = Field(
        default=None,
        description="Object store per node, such as 2GiB; Ray chooses when it is left out.",
    )
    token_auth: bool = Field(
        default=True, description="Let only holders of a generated token talk to Ray."
    )


class SshSection(Section):
    """How to log in. What is left out comes from `~/.ssh/config` and the agent."""

    user: values.User | None = Field(default=None, description="Login name.")
    port: values.Port | None = Field(default=None, description="SSH port.")
    identity: values.LocalPath | None = Field(
        default=None,
        description="Private key on this machine; relative paths start at the inventory's folder.",
    )
    jump: values.Jump | None = Field(
        default=None, description="Host to go through, as [user@]host[:port]."
    )
    known_hosts: values.LocalPath | None = Field(
        default=None,
        description="File of known host keys; relative paths start at the inventory's folder.",
    )
    connect_timeout: float | None = Field(
        default=None, gt=0, le=600, description="Seconds until a login is given up (10)."
    )


class NodeNetworkSection(Section):
    """The network of one node, where it differs."""

    interface: values.Interface | None = Field(
        default=None, description="Network interface that has the node's `ip`."
    )
    hca: list[values.Hca] | None = Field(
        default=None,
        description=(
            "RDMA devices NCCL may use, such as [mlx5_0, mlx5_1]; NCCL chooses when it is left out."
        ),
    )


class NetworkSection(NodeNetworkSection):
    """The network between the nodes."""

    fabric: Literal["ethernet", "infiniband", "roce"] = Field(
        default="ethernet",
        description=(
            "infiniband and roce give the containers the RDMA devices and the rights to use them."
        ),
    )
    require: Literal["auto", "gdrdma", "rdma", "any"] = Field(
        default="auto",
        description=(
            "What the network between nodes must at least be, or `serve` refuses; auto: what this"
            " hardware can do."
        ),
    )


class SecretSection(Section):
    """Where a secret comes from: exactly one of the four.

    Its value is never written in the inventory.
    """

    env: values.EnvName | None = Field(
        default=None, description="Environment variable of the launcher."
    )
    file: values.LocalPath | None = Field(
        default=None, description="File on this machine, mode 0600, with only the value."
    )
    command: values.NonEmpty | None = Field(
        default=None, description="Command on this machine that prints it (no shell)."
    )
    prompt: values.Question | None = Field(
        default=None, description="true, or the text to show: it is asked for in the terminal."
    )


class PortsSection(Section):
    """TCP ports, the same on every node."""

    gcs: values.Port = Field(default=_PORTS.gcs, description="Ray's cluster store, on the head.")
    dashboard: values.Port = Field(
        default=_PORTS.dashboard, description="Ray's dashboard and job API, on the head."
    )
    client: values.Port = Field(
        default=_PORTS.client, description="Ray client server, on the head."
    )
    node_manager: values.Port = Field(
        default=_PORTS.node_manager, description="Ray's node manager."
    )
    object_manager: values.Port = Field(
        default=_PORTS.object_manager, description="Ray's object manager."
    )
    runtime_env_agent: values.Port = Field(
        default=_PORTS.runtime_env_agent, description="Ray's runtime environment agent."
    )
    dashboard_agent_grpc: values.Port = Field(
        default=_PORTS.dashboard_agent_grpc, description="Ray's dashboard agent, gRPC."
    )
    dashboard_agent_http: values.Port = Field(
        default=_PORTS.dashboard_agent_http, description="Ray's dashboard agent, HTTP."
    )
    metrics_export: values.Port = Field(
        default=_PORTS.metrics_export, description="Ray's metrics for Prometheus."
    )
    worker_min: values.Port = Field(
        default=_PORTS.worker_min, description="First port for Ray's worker processes."
    )
    worker_max: values.Port = Field(
        default=_PORTS.worker_max, description="Last port for Ray's worker processes."
    )
    api: values.Port = Field(
        default=_PORTS.api, description="The OpenAI-compatible endpoint, on the head."
    )
    mp_master: values.Port = Field(
        default=_PORTS.mp_master,
        description=(
            "Where ranks meet, on the first of their nodes: `mp` ones, and data-parallel ones of"
            " batches; servers beside each other take the next ones."
        ),
    )
    dp_rpc: values.Port = Field(
        default=_PORTS.dp_rpc,
        description="Where replicas of the `mp` backend meet, on the first of their nodes.",
    )
    group: values.Port = Field(
        default=_PORTS.group, description="Where the nodes' agents meet, on the head."
    )
    probe: values.Port = Field(
        default=_PORTS.probe, description="Where the ranks of the network check meet, on the head."
    )


RayItem = Annotated[
    RaySection,
    BeforeValidator(shorthand("version", str, float), json_schema_input_type=str | RaySection),
]


def _argument(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Argument = Annotated[
    values.NonEmpty, BeforeValidator(_argument, json_schema_input_type=str | int | float)
]


class ServeSection(Section):
    """What `vlaunch serve` uses where its flags are silent."""

    model: values.Model | None = Field(default=None, description="Model to serve.")
    tp: int | None = Field(
        default=None, ge=1, le=1024, description="Tensor parallel size; GPUs per node by default."
    )
    pp: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Pipeline parallel size; the number of nodes by default.",
    )
    dp: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Replicas of the model behind one endpoint (data parallel size).",
    )
    backend: Literal["ray", "mp"] = Field(
        default="ray",
        description=(
            "ray, or mp: vLLM's own multi-node mode, without Ray. With `ray: none` mp is the"
            " default."
        ),
    )
    bind: values.Bind = Field(
        default=ServeDefaults().bind, description="Address the endpoint listens on."
    )
    args: list[Argument] = Field(
        default_factory=list, description="More arguments for `vllm serve`, each word an item."
    )
    supervise: bool = Field(
        default=True, description="Start the server again when a rank, a node or the engine dies."
    )
    canary: float = Field(
        default=5.0, ge=1, le=300, description="Seconds between two looks at whether it lives."
    )
    stuck: float = Field(
        default=300.0,
        ge=10,
        le=86400,
        description="Seconds in which nothing at all moves, until it counts as dead.",
    )
    restarts: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description=(
            "Restarts within an hour, until it is given up; by default as many as it takes."
        ),
    )


class MountSection(Section):
    """A bind mount, the same on every node."""

    source: values.NodePath = Field(description="Path on the nodes.")
    target: values.NodePath = Field(description="Path in the containers.")
    read_only: bool = Field(default=False, description="Let the containers only read it.")


def _mount(value: object) -> object:
    if not isinstance(value, str):
        return value
    source, _, rest = value.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise values.should("should be SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths")
    return {"source": source, "target": target, "read_only": mode == "ro"}


MountItem = Annotated[
    MountSection, BeforeValidator(_mount, json_schema_input_type=str | MountSection)
]
Docker = Annotated[list[values.Word], Field(min_length=1)]
Env = Annotated[values.EnvMap, Field(default_factory=dict)]


class NodeSection(Section):
    """One node, or a range of alike nodes. What is set here wins over the cluster-wide value."""

    host: values.Hosts = Field(
        description="Host name or address to log in to, or a range such as gpu[01-16]."
    )
    name: values.Names | None = Field(
        default=None, description="Name in output and container names; the host by default."
    )
    ip: values.Ips | None = Field(
        default=None,
        description=(
            "Address the other nodes reach it by, or a range; `host` by default, if an address."
        ),
    )
    gpus: int = Field(ge=1, le=128, description="GPUs to use (with `accelerator: cpu`: slots).")
    head: bool | None = Field(
        default=None, description="This node runs Ray's head and rank 0; the first node by default."
    )
    connection: Literal["ssh", "local"] | None = Field(
        default=None, description="Overrides the cluster's `connection`."
    )
    ssh: SshSection = Field(
        default_factory=SshSection, description="Overrides the cluster's `ssh`, key by key."
    )
    docker: Docker | None = Field(default=None, description="Overrides the cluster's `docker`.")
    hf_home: values.NodePath | None = Field(
        default=None, description="Overrides the cluster's `hf_home`."
    )
    state_dir: values.NodePath | None = Field(
        default=None, description="Overrides the cluster's `state_dir`."
    )
    network: NodeNetworkSection = Field(
        default_factory=NodeNetworkSection,
        description="Overrides the cluster's `network`, key by key.",
    )
    env: Env = Field(description="Added to the cluster's `env`; the node's value wins.")


class InventoryFile(Section):
    """A vlaunch inventory: the machines, and what to run on them."""

    entries: ClassVar[Mapping[str, str]] = {"nodes": "a node"}

    cluster: values.ClusterName = Field(
        description="Name of the cluster; part of container names and labels."
    )
    image: values.Image = Field(
        description="vLLM image, the same on every node; a tag or a digest."
    )
    accelerator: Literal["nvidia", "amd", "cpu"] = Field(
        default="nvidia", description="What the model runs on."
    )
    ray: RayItem = Field(
        default_factory=RaySection, description="Ray's version, its settings, or none."
    )
    connection: Literal["ssh", "local"] = Field(
        default="ssh", description="ssh, or local: the machine the launcher runs on."
    )
    ssh: SshSection = Field(default_factory=SshSection, description="How to log in.")
    docker: Docker = Field(
        default_factory=lambda: ["docker"], description="Command words, such as [sudo, -n, docker]."
    )
    hf_home: values.NodePath = Field(
        default="/data/huggingface",
        description="Hugging Face cache on the nodes, mounted into the containers.",
    )
    state_dir: values.NodePath | None = Field(
        default=None,
        description="Where the launcher keeps files on the nodes; in the login's home by default.",
    )
    shm: values.Shm = Field(
        default="private", description="Shared memory: private, host, or a size such as 10GiB."
    )
    network: NetworkSection = Field(
        default_factory=NetworkSection, description="How the nodes reach each other."
    )
    env: Env = Field(description="Environment of the containers on every node.")
    mounts: list[MountItem] = Field(
        default_factory=list, description="More directories to mount into the containers."
    )
    secrets: dict[values.EnvName, SecretSection] = Field(
        default_factory=dict,
        description="Environment variables whose values come from elsewhere and are never shown.",
    )
    secrets_in: Literal["disk", "memory"] = Field(
        default="disk",
        description=(
            "Where secrets lie on the nodes; in memory, a rebooted node needs `vlaunch up`."
        ),
    )
    ports: PortsSection = Field(
        default_factory=PortsSection, description="TCP ports, free on every node."
    )
    serve: ServeSection = Field(
        default_factory=ServeSection, description="Defaults of `vlaunch serve`."
    )
    cap: int = Field(default=32, ge=1, le=512, description="Nodes talked to at the same time.")
    head: values.NonEmpty | None = Field(
        default=None, description="Name of the head, instead of `head: true` on a node."
    )
    nodes: Annotated[list[NodeSection], BeforeValidator(values.few_enough)] = Field(
        min_length=1, description="The machines; the first is the head by default."
    )
