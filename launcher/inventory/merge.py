"""A valid inventory file → the nouns of `launcher.core.domain`: ranges expanded, cluster-wide
values merged under nodes' own.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from launcher.core import domain
from launcher.inventory import engine_args
from launcher.inventory.schema import InventoryFile, NodeSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A node and the item of `nodes` it comes from.

    While mistakes are looked for, `ip` and `name` may be empty.
    """

    entry: int
    node: domain.Node


def place(file: InventoryFile, folder: Path) -> list[Placed]:
    """Expand every entry of `nodes`. Ranges of unequal length leave gaps, which `rules` reports."""
    placed = []
    for index, entry in enumerate(file.nodes):
        names, ips = entry.name or entry.host, entry.ip or _addresses(entry.host)
        rows = itertools.islice(
            itertools.zip_longest(entry.host, names, ips, fillvalue=""), len(entry.host)
        )
        placed += [
            Placed(entry=index, node=_node(file, entry, _ssh(file.ssh, entry.ssh, folder), *row))
            for row in rows
        ]
    return placed


def inventory(file: InventoryFile, placed: list[Placed], path: Path) -> domain.Inventory:
    """Put the checked parts together; the head is decided here."""
    head = head_name(file, placed)
    backend: domain.Backend = "mp" if file.ray.off else file.serve.backend
    settings = {item.name: getattr(file, item.name) for item in fields(domain.ClusterSettings)}
    args = (*engine_args.flags(file.engine_args), *file.serve.args)
    settings["serve"] = replace(file.serve, backend=backend, args=args)
    settings["secrets"] = {name: _secret(name, source) for name, source in file.secrets.items()}
    return domain.Inventory(
        **settings,
        path=path,
        nodes=tuple(replace(expanded.node, head=expanded.node.name == head) for expanded in placed),
        fabric=file.network.fabric,
        require=file.network.require,
        private=file.network.private,
    )


def head_name(file: InventoryFile, placed: list[Placed]) -> str:
    """Name the head: what `head` says, else the node that says `head: true`, else the first."""
    if file.head:
        return file.head
    return next(
        (expanded.node.name for expanded in placed if file.nodes[expanded.entry].head),
        placed[0].node.name,
    )


def _node(file: InventoryFile, entry: NodeSection, ssh: domain.Ssh, *identity: str) -> domain.Node:
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


def _addresses(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(host if _is_address(host) else "" for host in hosts)


def _is_address(host: str) -> bool:
    return ":" in host or all(part.isdigit() for part in host.split("."))


def _ssh(cluster: domain.Ssh, node_ssh: domain.Ssh, folder: Path) -> domain.Ssh:
    overrides = {key: item for key, item in asdict(node_ssh).items() if item is not None}
    merged = replace(cluster, **overrides)
    return replace(
        merged,
        identity=_from(folder, merged.identity),
        known_hosts=_from(folder, merged.known_hosts),
    )


def _from(folder: Path, path: str | None) -> str | None:
    return None if path is None else str(folder / _expanded(Path(path)))


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no home to be found: the path fails where it is opened, with its name
        return path


def _secret(name: str, source: domain.SecretSource) -> domain.SecretSource:
    prompt = f"Value of {name}" if source.prompt == "" else source.prompt
    return replace(source, prompt=prompt)
