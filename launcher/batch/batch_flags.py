"""The flags that say what a batch job is: all of it without a job file, or what may change between
its runs beside one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.app import options

if TYPE_CHECKING:
    from launcher.batch.shape import Job

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("path", metavar="[JOB.yaml]", required=False, type=click.Path(path_type=Path)),
    click.option(
        "--allow",
        metavar="FOLDER",
        multiple=True,
        type=click.Path(path_type=Path),
        help="A folder that JOB.yaml's paths may lead into, beside its own.",
    ),
    options.MODEL,
    click.option(
        "--input",
        metavar="PATH",
        multiple=True,
        help="File, folder or pattern of this machine; nodes:/path; s3://, gs:// or hdfs://.",
    ),
    click.option(
        "--output",
        metavar="PATH",
        help="Folder of the answers: here, nodes:/path, or an object store.",
    ),
    click.option(
        "--name",
        metavar="NAME",
        help="The job's name (default: one that follows from what it does).",
    ),
    click.option(
        "--format",
        type=click.Choice(["text", "jsonl", "csv", "parquet"]),
        help="Of the input (default: by its name).",
    ),
    click.option(
        "--output-format",
        type=click.Choice(["parquet", "jsonl"]),
        help="Of the answers (default: parquet).",
    ),
    click.option("--id", metavar="COLUMN", help="Column that names a row in `errors/`."),
    click.option(
        "--limit", type=click.IntRange(1), metavar="N", help="Take only the first N rows."
    ),
    click.option(
        "--column",
        metavar="COLUMN",
        help="Column that holds the prompt (default: prompt; of text files: text).",
    ),
    click.option(
        "--template",
        metavar="TEXT",
        help="The prompt, as a template such as 'Translate: {{ text }}'.",
    ),
    click.option("--system", metavar="TEXT", help="System message; the prompt becomes a chat."),
    click.option("--chat", is_flag=True, help="Send the prompt as a chat's user message."),
    click.option(
        "--keep",
        metavar="COLUMN",
        multiple=True,
        help="Column to write beside the answer (default: all).",
    ),
    click.option("--max-tokens", type=int, help="Longest answer, in tokens."),
    click.option(
        "--temperature", type=float, help="Randomness; 0 always takes the likeliest token."
    ),
    click.option("--tp", type=int, help="Tensor parallel size of a replica."),
    click.option("--pp", type=int, help="Pipeline parallel size of a replica."),
    click.option(
        "--replicas", metavar="N|N-M", help="Copies of the model, or the least and the most."
    ),
    click.option("--batch-size", type=int, help="Rows that a replica is given at a time."),
    click.option(
        "--data-parallel-size", type=int, help="Ranks over the nodes, instead of replicas."
    ),
    click.option(
        "--engine-arg", metavar="NAME=VALUE", multiple=True, help="An engine argument of vLLM's."
    ),
)


def job(function: F) -> F:
    """Add the argument and the flags that say what a job is."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read(asked: Mapping[str, Any]) -> Job:
    """Return the checked job that a command line describes; raises JobError."""
    from launcher.batch import flags

    words = dict(asked)
    path, allow = words.pop("path"), words.pop("allow")
    said = flags.Flags(**words)
    if path is None:
        if allow:
            raise click.UsageError(
                "--allow is about the paths in a JOB.yaml; those of flags may lead anywhere"
            )
        if not said.said():
            raise click.UsageError(
                "name a job file, or say what to answer with --model, --input and --output"
            )
        return flags.job(said, Path.cwd())
    return flags.over(path, said, allow=allow)
