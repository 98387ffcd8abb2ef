"""`vlaunch schema`: the JSON Schema of inventories and of batch jobs, for editors."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--job", is_flag=True, help="The schema of the files of `vlaunch batch`.")
def schema(job: bool) -> None:
    """Print the inventory's JSON Schema (or a batch job's), made from the model that validates
    it.
    """
    from launcher.inventory.json_schema import json_schema

    if not job:
        click.echo(json.dumps(json_schema(), indent=2))
        return
    from launcher.batch.schema import JobFile

    click.echo(json.dumps(json_schema(JobFile), indent=2))
