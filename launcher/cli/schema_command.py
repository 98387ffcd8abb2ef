"""`vlaunch schema`: JSON Schemas of inventories and batch jobs, for editors."""

import json

import click


@click.command()
@click.option("--job", is_flag=True, help="Print the schema of job files of `vlaunch batch`.")
def schema(job: bool) -> None:
    """Print the JSON Schema of inventories, or of batch jobs."""
    from launcher.batch.job import Job
    from launcher.inventory.schema import json_schema

    document = json_schema(Job) if job else json_schema()
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
