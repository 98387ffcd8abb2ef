"""`vlaunch schema`: the schemas for editors."""

from __future__ import annotations

import json

from click.testing import CliRunner

from launcher.batch.job import Job
from launcher.cli.schema_command import schema
from launcher.inventory.schema import json_schema


def test_the_inventorys_schema_is_printed_by_default() -> None:
    """As JSON, without other output."""
    result = CliRunner().invoke(schema, [])

    assert (result.exit_code, json.loads(result.stdout)) == (0, json_schema())


def test_a_jobs_schema_is_printed_on_request() -> None:
    """For the files of `vlaunch batch`."""
    result = CliRunner().invoke(schema, ["--job"])

    assert (result.exit_code, json.loads(result.stdout)) == (0, json_schema(Job))
