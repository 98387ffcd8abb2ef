"""Schema of inventory files: keys, types and descriptions.

Sections such as `Ports` and most top-level keys come from `launcher.core.domain`; this module adds
those with a different form in the file. `rules` has rules between keys. `vlaunch schema` prints the
JSON Schema; `schema.json` in this folder is a copy for editors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, TypeAdapter, model_validator
from pydantic.fields import FieldInfo

from launcher.core.descriptions import field_descriptions
from launcher.core.domain import (
    ClusterSettings,
    Connection,
    Fabric,
    Inventory,
    NodeSettings,
    Required,
    Ssh,
)
from launcher.core.values import (
    STRICT,
    ArgvItems,
    Bounds,
    EnvName,
    EnvValue,
    FromMapping,
    NodePath,
    NonEmpty,
    key_of,
    without_unset,
)
from launcher.inventory import values


class Section(BaseModel):
    """A mapping in a file; keys without a value count as unset.

    `entries` maps list keys to the name of one item, for lists with items that share keys with the
    top level.
    """

    entries: ClassVar[Mapping[str, str]] = {}

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, value: Any) -> Any:
        return without_unset(value, fields_of(cls)) if isinstance(value, dict) else value


def is_section(annotation: Any) -> bool:
    """Return whether a type is a mapping with fixed keys."""
    return isinstance(annotation, type) and (
        issubclass(annotation, Section) or is_dataclass(annotation)
    )


def sections_in(annotation: Any) -> Iterator[type[Any]]:
    """Yield the section types inside a type, such as that of a list's items."""
    if is_section(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def fields_of(section: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by key; a key may be a Python keyword such as `class`."""
    return _fields_of(section)


@cache
def _fields_of(section: Any) -> Mapping[str, FieldInfo]:
    if issubclass(section, Section):
        return {item.alias or name: item for name, item in section.model_fields.items()}
    hints = get_type_hints(section, include_extras=True)
    descriptions_by_field = field_descriptions(section)
    return {
        key_of(item.name): FieldInfo(
            annotation=hints[item.name], description=descriptions_by_field.get(item.name)
        )
        for item in fields(section)
    }


def type_adapter(root: Any) -> TypeAdapter[Any]:
    """Return the validator of files of type `root`."""
    return _type_adapter(root)


@cache
def _type_adapter(root: Any) -> TypeAdapter[Any]:
    marked: Any = FromMapping
    return TypeAdapter(marked[root] if is_dataclass(root) else root)


@dataclass(frozen=True, kw_only=True)
class NodeNetworkSection:
    """The network of one node, where it differs."""

    interface: values.Interface | None = None
    """Network interface that has the node's `ip`."""
    hca: tuple[values.Hca, ...] | None = None
    """RDMA devices for NCCL, such as [mlx5_0, mlx5_1]; NCCL chooses by default."""


@dataclass(frozen=True, kw_only=True)
class NetworkSection(NodeNetworkSection):
    """The network between the nodes."""

    fabric: Fabric = Inventory.fabric
    """infiniband and roce give the containers the RDMA devices and the rights to use them."""
    require: Required = Inventory.require
    """Minimum transport between nodes that `serve` accepts; auto: the best of this hardware."""
    private: bool = Inventory.private
    """Trust this network: copies of models are sent unencrypted, with less load on the nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeSection:
    """One node, or a range of equal nodes. Keys set here override the cluster-wide values."""

    host: values.Hosts
    """Host name or address for SSH, or a range such as gpu[01-16]."""
    name: values.Names | None = None
    """Name in output and container names; the host by default."""
    ip: values.Ips | None = None
    """Address for the other nodes, or a range; `host` by default, if that is an address."""
    gpus: values.Gpus
    """GPUs to use: how many, or which, such as [4, 5, 6, 7] (with `accelerator: cpu`: slots)."""
    head: bool | None = None
    """Make this node the head, with Ray's head and rank 0; the first node by default."""
    connection: Connection | None = None
    """Overrides the cluster's `connection`."""
    ssh: FromMapping[Ssh] = field(default_factory=Ssh)
    """Overrides the cluster's `ssh`, key by key."""
    docker: ArgvItems | None = None
    """Overrides the cluster's `docker`."""
    hf_home: NodePath | None = None
    """Overrides the cluster's `hf_home`."""
    state_dir: NodePath | None = None
    """Overrides the cluster's `state_dir`."""
    cache_dir: NodePath | None = None
    """Overrides the cluster's `cache_dir`."""
    network: FromMapping[NodeNetworkSection] = field(default_factory=NodeNetworkSection)
    """Overrides the cluster's `network`, key by key."""
    env: Mapping[EnvName, EnvValue] = field(default_factory=dict)
    """Added to the cluster's `env`; the node's value wins."""


@dataclass(frozen=True, kw_only=True)
class InventoryFile(NodeSettings, ClusterSettings):
    """A vlaunch inventory: the machines, and what to run on them."""

    __pydantic_config__: ClassVar[Any] = STRICT
    entries: ClassVar[Mapping[str, str]] = {"nodes": "a node"}

    network: FromMapping[NetworkSection] = field(default_factory=NetworkSection)
    """The network between the nodes."""
    head: NonEmpty | None = None
    """Name of the head, instead of `head: true` on a node."""
    nodes: Annotated[
        tuple[FromMapping[NodeSection], ...],
        Bounds(min_length=1),
        BeforeValidator(values.limit_node_count),
    ]
    """The machines; the first is the head by default."""


def json_schema(root: type[Any] = InventoryFile) -> dict[str, Any]:
    """Return the JSON Schema of files of type `root`; a test compares it with `schema.json`."""
    schema = type_adapter(root).json_schema(mode="validation")
    shapes = {root.__name__: schema, **schema.get("$defs", {})}
    for section in {root, *_nested_sections(root)}:
        shape = shapes[section.__name__]
        shape["description"] = " ".join(shape["description"].split())
        for key, info in fields_of(section).items():
            if info.description:
                # Pydantic's keeps the line breaks of the source.
                key_shape = {**shape["properties"][key], "description": info.description}
                shape["properties"][key] = dict(sorted(key_shape.items()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _nested_sections(section: type[Any]) -> Iterator[type[Any]]:
    for info in fields_of(section).values():
        for inner in sections_in(info.annotation):
            yield inner
            yield from _nested_sections(inner)
