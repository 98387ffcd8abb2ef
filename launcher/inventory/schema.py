"""The shape of an inventory file: every key, its type and its explanation.

Sections that are nouns, such as `Ports`, have theirs in `launcher.model`; here is what the file
writes otherwise. Rules between keys are in `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from launcher.inventory import values
from launcher.model import (
    Accelerator,
    Connection,
    Fabric,
    Inventory,
    Logging,
    Mount,
    Node,
    Ports,
    RaySettings,
    Required,
    SecretsIn,
    SecretSource,
    ServeDefaults,
    Ssh,
)
from launcher.values import (
    Bounds,
    Capability,
    Device,
    EnvName,
    NodePath,
    NonEmpty,
    Ulimit,
    UlimitName,
    should,
)

# What the nouns say: a default stands once.
_CLUSTER: Mapping[str, Any] = {each.name: each.default for each in fields(Inventory)}
_NODE: Mapping[str, Any] = {each.name: each.default for each in fields(Node)}
_T = TypeVar("_T")


def _without_unset(value: Any, known: Iterable[str]) -> Any:
    """A known key without a value counts as not written."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None or key not in known}


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
        return _without_unset(value, cls.known())

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


class _FromMapping:
    """Reads a mapping in the file as a dataclass, by the rules of a `Section`."""

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Take a mapping, whose lists become tuples; each value is as strict as a section's."""
        known = [each.name for each in fields(source)]

        def read(value: Any) -> Any:
            value = _without_unset(value, known)
            if not isinstance(value, dict):
                return value
            return {
                key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
            }

        schema = handler(source)
        itself: Any = handler.resolve_ref_schema(schema)
        itself["strict"] = False  # or it wants an instance
        return core_schema.no_info_before_validator_function(read, schema)


FromMapping = Annotated[_T, _FromMapping()]


def is_section(kind: Any) -> bool:
    """Tell whether a type is a mapping with keys of its own."""
    return isinstance(kind, type) and (issubclass(kind, Section) or is_dataclass(kind))


def known(section: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section, or of a dataclass that is one, by their keys in the file."""
    return section.known() if issubclass(section, Section) else _known(section)


@cache
def _known(noun: Any) -> Mapping[str, FieldInfo]:
    config = ConfigDict(use_attribute_docstrings=True)
    around = create_model("Around", __config__=config, noun=(noun, ...))
    shown = around.model_json_schema()["$defs"][noun.__name__]["properties"]
    hints = get_type_hints(noun, include_extras=True)
    return {
        name: FieldInfo(annotation=hints[name], description=shown[name].get("description"))
        for name in (each.name for each in fields(noun))
    }


class NodeNetworkSection(Section, use_attribute_docstrings=True):
    """The network of one node, where it differs."""

    interface: values.Interface | None = None
    """Network interface that has the node's `ip`."""
    hca: list[values.Hca] | None = None
    """RDMA devices NCCL may use, such as [mlx5_0, mlx5_1]; NCCL chooses when it is left out."""


class NetworkSection(NodeNetworkSection):
    """The network between the nodes."""

    fabric: Fabric = _CLUSTER["fabric"]
    """infiniband and roce give the containers the RDMA devices and the rights to use them."""
    require: Required = _CLUSTER["require"]
    """What the network between nodes must at least be, or `serve` refuses; auto: what this hardware
    can do.
    """


RayItem = Annotated[
    FromMapping[RaySettings],
    BeforeValidator(
        shorthand("version", str, float), json_schema_input_type=str | FromMapping[RaySettings]
    ),
]


def _mount(value: object) -> object:
    if not isinstance(value, str):
        return value
    source, _, rest = value.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise should("should be SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths")
    return {"source": source, "target": target, "read_only": mode == "ro"}


MountItem = Annotated[
    FromMapping[Mount], BeforeValidator(_mount, json_schema_input_type=str | FromMapping[Mount])
]
Docker = Annotated[list[values.Word], Field(min_length=1)]
Env = Annotated[values.EnvMap, Field(default_factory=dict)]


class NodeSection(Section, use_attribute_docstrings=True):
    """One node, or a range of alike nodes. What is set here wins over the cluster-wide value."""

    host: values.Hosts
    """Host name or address to log in to, or a range such as gpu[01-16]."""
    name: values.Names | None = None
    """Name in output and container names; the host by default."""
    ip: values.Ips | None = None
    """Address the other nodes reach it by, or a range; `host` by default, if an address."""
    gpus: values.Gpus
    """GPUs to use: how many, or which, such as [4, 5, 6, 7] (with `accelerator: cpu`: slots)."""
    head: bool | None = None
    """This node runs Ray's head and rank 0; the first node by default."""
    connection: Connection | None = None
    """Overrides the cluster's `connection`."""
    ssh: FromMapping[Ssh] = Field(default_factory=Ssh)
    """Overrides the cluster's `ssh`, key by key."""
    docker: Docker | None = None
    """Overrides the cluster's `docker`."""
    hf_home: NodePath | None = None
    """Overrides the cluster's `hf_home`."""
    state_dir: NodePath | None = None
    """Overrides the cluster's `state_dir`."""
    cache_dir: NodePath | None = None
    """Overrides the cluster's `cache_dir`."""
    network: NodeNetworkSection = Field(default_factory=NodeNetworkSection)
    """Overrides the cluster's `network`, key by key."""
    env: Env
    """Added to the cluster's `env`; the node's value wins."""


class InventoryFile(Section, use_attribute_docstrings=True):
    """A vlaunch inventory: the machines, and what to run on them."""

    entries: ClassVar[Mapping[str, str]] = {"nodes": "a node"}

    cluster: values.ClusterName
    """Name of the cluster; part of container names and labels."""
    image: values.Image
    """vLLM image, the same on every node; a tag or a digest."""
    accelerator: Accelerator = _CLUSTER["accelerator"]
    """What the model runs on."""
    ray: RayItem = Field(default_factory=RaySettings)
    """Ray's version, its settings, or none."""
    connection: Connection = _NODE["connection"]
    """ssh, or local: the machine the launcher runs on."""
    ssh: FromMapping[Ssh] = Field(default_factory=Ssh)
    """How to log in."""
    docker: Docker = Field(default_factory=lambda: list(_NODE["docker"]))
    """Command words, such as [sudo, -n, docker]."""
    hf_home: NodePath = _NODE["hf_home"]
    """Hugging Face cache on the nodes, mounted into the containers."""
    state_dir: NodePath | None = None
    """Where the launcher keeps files on the nodes; in the login's home by default."""
    cache_dir: NodePath | None = None
    """Where engines keep what they compile, on a disk of each node's own; below `state_dir` by
    default.
    """
    shm: values.Shm = _CLUSTER["shm"]
    """Shared memory: private, host, or a size such as 10GiB."""
    devices: list[Device] = Field(default_factory=list)
    """More devices for the containers, as HOST[:CONTAINER][:rwm], such as /dev/gdrdrv."""
    cap_add: list[Capability] = Field(default_factory=list)
    """More Linux capabilities for the containers, such as SYS_PTRACE."""
    ulimits: dict[UlimitName, Ulimit] = Field(default_factory=dict)
    """Limits of the containers' processes, such as nofile: a number or SOFT:HARD; -1 is none."""
    privileged: bool = _CLUSTER["privileged"]
    """Give the containers every right on their nodes; `devices` and `cap_add` give single ones."""
    logging: FromMapping[Logging] = Field(default_factory=Logging)
    """What Docker does with the containers' logs."""
    network: NetworkSection = Field(default_factory=NetworkSection)
    """How the nodes reach each other."""
    env: Env
    """Environment of the containers on every node."""
    mounts: list[MountItem] = Field(default_factory=list)
    """More directories to mount into the containers."""
    secrets: dict[EnvName, FromMapping[SecretSource]] = Field(default_factory=dict)
    """Environment variables whose values come from elsewhere and are never shown."""
    secrets_in: SecretsIn = _CLUSTER["secrets_in"]
    """Where secrets lie on the nodes; in memory, a rebooted node needs `vlaunch up`."""
    ports: FromMapping[Ports] = Field(default_factory=Ports)
    """TCP ports, free on every node."""
    serve: FromMapping[ServeDefaults] = Field(default_factory=ServeDefaults)
    """Defaults of `vlaunch serve`."""
    cap: Annotated[int, Bounds(ge=1, le=512)] = _CLUSTER["cap"]
    """Nodes talked to at the same time."""
    head: NonEmpty | None = None
    """Name of the head, instead of `head: true` on a node."""
    nodes: Annotated[list[NodeSection], BeforeValidator(values.few_enough)] = Field(min_length=1)
    """The machines; the first is the head by default."""
