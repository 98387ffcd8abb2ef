"""`vlaunch schema`: JSON Schemas of inventories and batch jobs, for editors."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--job", is_flag=True, help="The schema of the files of `vlaunch batch`.")
def schema(job: bool) -> None:
    """Print the inventory's JSON Schema (or a batch job's), made from the model that validates
    it.
    """
    from launcher.batch.schema import JobFile
    from launcher.inventory.schema import json_schema

    document = json_schema(JobFile) if job else json_schema()
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
