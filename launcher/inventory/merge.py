"""Conversion of inventory files to `launcher.core.domain`, expanding and merging nodes."""

import itertools
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from launcher.core import domain
from launcher.inventory import engine_args
from launcher.inventory.schema import InventoryFile, NodeSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedNode:
    """A node and the index of its entry; `ip` and `name` may be empty during validation."""

    entry: int
    node: domain.Node


def expand_nodes(file: InventoryFile, folder: Path) -> list[ExpandedNode]:
    """Expand every entry of `nodes`; ranges of unequal length leave gaps for the rules."""
    nodes = []
    for index, entry in enumerate(file.nodes):
        names, ips = entry.name or entry.host, entry.ip or _literal_addresses(entry.host)
        rows = itertools.islice(
            itertools.zip_longest(entry.host, names, ips, fillvalue=""), len(entry.host)
        )
        nodes += [
            ExpandedNode(
                entry=index,
                node=_merge_node(file, entry, _merge_ssh(file.ssh, entry.ssh, folder), *row),
            )
            for row in rows
        ]
    return nodes


def build_inventory(file: InventoryFile, nodes: list[ExpandedNode], path: Path) -> domain.Inventory:
    """Build the inventory and choose its head."""
    head = head_name(file, nodes)
    backend: domain.Backend = "mp" if file.ray.off else file.serve.backend
    settings = {item.name: getattr(file, item.name) for item in fields(domain.ClusterSettings)}
    args = (*engine_args.to_flags(file.engine_args), *file.serve.args)
    settings["serve"] = replace(file.serve, backend=backend, args=args)
    settings["secrets"] = {
        name: _fill_prompt(name, source) for name, source in file.secrets.items()
    }
    return domain.Inventory(
        **settings,
        path=path,
        nodes=tuple(replace(item.node, head=item.node.name == head) for item in nodes),
        fabric=file.network.fabric,
        require=file.network.require,
        private=file.network.private,
    )


def head_name(file: InventoryFile, nodes: list[ExpandedNode]) -> str:
    """Return the name of the head: `head`, else the node with `head: true`, else the first node."""
    if file.head:
        return file.head
    return next(
        (item.node.name for item in nodes if file.nodes[item.entry].head),
        nodes[0].node.name,
    )


def _merge_node(
    file: InventoryFile, entry: NodeSection, ssh: domain.Ssh, *identity: str
) -> domain.Node:
    host, name, ip = identity
    hca = file.network.hca if entry.network.hca is None else entry.network.hca
    return domain.Node(
        name=name,
        host=host,
        ip=ip,
        gpus=entry.gpus if isinstance(entry.gpus, int) else len(entry.gpus),
        gpu_ids=() if isinstance(entry.gpus, int) else entry.gpus,
        connection=entry.connection or file.connection,
        ssh=ssh,
        docker=entry.docker or file.docker,
        hf_home=entry.hf_home or file.hf_home,
        state_dir=entry.state_dir or file.state_dir,
        cache_dir=entry.cache_dir or file.cache_dir,
        interface=entry.network.interface or file.network.interface,
        hca=hca or (),
        env={**file.env, **entry.env},
    )


def _literal_addresses(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(host if _is_address(host) else "" for host in hosts)


def _is_address(host: str) -> bool:
    return ":" in host or all(part.isdigit() for part in host.split("."))


def _merge_ssh(cluster: domain.Ssh, node_ssh: domain.Ssh, folder: Path) -> domain.Ssh:
    overrides = {key: item for key, item in asdict(node_ssh).items() if item is not None}
    merged = replace(cluster, **overrides)
    return replace(
        merged,
        identity=_resolve_path(folder, merged.identity),
        known_hosts=_resolve_path(folder, merged.known_hosts),
    )


def _resolve_path(folder: Path, path: str | None) -> str | None:
    return None if path is None else str(folder / _expand_home(Path(path)))


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no home folder: opening the path will fail with its name
        return path


def _fill_prompt(name: str, source: domain.SecretSource) -> domain.SecretSource:
    prompt = f"Value of {name}" if source.prompt == "" else source.prompt
    return replace(source, prompt=prompt)
