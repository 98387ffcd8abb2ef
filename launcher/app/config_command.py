"""`vlaunch config`: the inventory as vlaunch reads it, with its defaults and each node's values."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from launcher.app import options
from launcher.app.session import load_inventory
from launcher.app.terminal import dump_json
from launcher.core.domain import ClusterSettings, Inventory, Node, NodeSettings
from launcher.inventory import engine_args


@click.command(params=[options.INVENTORY, options.JSON])
def config(named: str | None, as_json: bool) -> None:
    """Validate the inventory and print it in full, with defaults, ranges and cluster-wide values
    merged into every node.

    The output is an inventory with the same meaning. No node is contacted.
    """
    import yaml

    document = resolve_inventory(load_inventory(None, named))
    if as_json:
        click.echo(dump_json(document))
    else:
        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


def resolve_inventory(inventory: Inventory) -> dict[str, Any]:
    """Return an inventory file with the same meaning, with every value spelled out."""
    document = {
        item.name: _to_plain(getattr(inventory, item.name)) for item in fields(ClusterSettings)
    }
    # They are in the servers' arguments already.
    shared = tuple(engine_args.to_flags(inventory.engine_args))
    document["serve"]["args"] = list(inventory.serve.args[len(shared) :])
    network = {name: getattr(inventory, name) for name in ("fabric", "require", "private")}
    return {
        **document,
        "network": network,
        "nodes": [_node_values(node) for node in inventory.nodes],
    }


def _node_values(node: Node) -> dict[str, Any]:
    settings = {item.name: _to_plain(getattr(node, item.name)) for item in fields(NodeSettings)}
    return {
        "name": node.name,
        "host": node.host,
        "ip": node.ip,
        "gpus": list(node.gpu_ids) or node.gpus,
        "head": node.head,
        "network": _to_plain({"interface": node.interface, "hca": node.hca or None}),
        **{name: value for name, value in settings.items() if value is not None},
    }


def _to_plain(value: Any) -> Any:
    """Return a value for YAML and JSON, without keys that have no value."""
    if is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
