"""`vlaunch schema`: the JSON Schema of inventories, for editors."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the inventory's JSON Schema, made from the model that validates inventories."""
    from launcher.inventory.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
