"""A valid inventory file → the nouns of `launcher.model`: ranges expanded, cluster-wide values
merged under nodes' own.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from launcher import model
from launcher.inventory.schema import InventoryFile, NodeSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A node and the item of `nodes` it comes from.

    While mistakes are looked for, `ip` and `name` may be empty.
    """

    entry: int
    node: model.Node


def place(file: InventoryFile, folder: Path) -> list[Placed]:
    """Expand every entry of `nodes`. Ranges of unequal length leave gaps, which `rules` reports."""
    placed = []
    for at, entry in enumerate(file.nodes):
        names, ips = entry.name or entry.host, entry.ip or _addresses(entry.host)
        together = itertools.islice(
            itertools.zip_longest(entry.host, names, ips, fillvalue=""), len(entry.host)
        )
        placed += [
            Placed(entry=at, node=_node(file, entry, _ssh(file.ssh, entry.ssh, folder), *one))
            for one in together
        ]
    return placed


def inventory(file: InventoryFile, placed: list[Placed], path: Path) -> model.Inventory:
    """Put the checked parts together; the head is decided here."""
    head = head_name(file, placed)
    backend: model.Backend = "mp" if file.ray.off else file.serve.backend
    return model.Inventory(
        path=path,
        cluster=file.cluster,
        image=file.image,
        nodes=tuple(dataclasses.replace(one.node, head=one.node.name == head) for one in placed),
        accelerator=file.accelerator,
        ray=file.ray,
        fabric=file.network.fabric,
        require=file.network.require,
        shm=file.shm,
        devices=tuple(file.devices),
        cap_add=tuple(file.cap_add),
        ulimits=file.ulimits,
        privileged=file.privileged,
        logging=file.logging,
        mounts=tuple(file.mounts),
        secrets={name: _secret(name, source) for name, source in file.secrets.items()},
        secrets_in=file.secrets_in,
        ports=file.ports,
        serve=dataclasses.replace(file.serve, backend=backend),
        cap=file.cap,
    )


def head_name(file: InventoryFile, placed: list[Placed]) -> str:
    """Name the head: what `head` says, else the node that says `head: true`, else the first."""
    if file.head:
        return file.head
    return next(
        (one.node.name for one in placed if file.nodes[one.entry].head), placed[0].node.name
    )


def _node(file: InventoryFile, entry: NodeSection, ssh: model.Ssh, *who: str) -> model.Node:
    host, name, ip = who
    hca = file.network.hca if entry.network.hca is None else entry.network.hca
    return model.Node(
        name=name,
        host=host,
        ip=ip,
        gpus=entry.gpus if isinstance(entry.gpus, int) else len(entry.gpus),
        gpu_ids=() if isinstance(entry.gpus, int) else entry.gpus,
        connection=entry.connection or file.connection,
        ssh=ssh,
        docker=tuple(entry.docker or file.docker),
        hf_home=entry.hf_home or file.hf_home,
        state_dir=entry.state_dir or file.state_dir,
        cache_dir=entry.cache_dir or file.cache_dir,
        interface=entry.network.interface or file.network.interface,
        hca=tuple(hca or ()),
        env={**file.env, **entry.env},
    )


def _addresses(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(host if _is_address(host) else "" for host in hosts)


def _is_address(host: str) -> bool:
    return ":" in host or all(part.isdigit() for part in host.split("."))


def _ssh(cluster: model.Ssh, own: model.Ssh, folder: Path) -> model.Ssh:
    said = {key: item for key, item in dataclasses.asdict(own).items() if item is not None}
    merged = dataclasses.replace(cluster, **said)
    return dataclasses.replace(
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


def _secret(name: str, source: model.SecretSource) -> model.SecretSource:
    asked = f"Value of {name}" if source.prompt == "" else source.prompt
    return dataclasses.replace(source, prompt=asked)
