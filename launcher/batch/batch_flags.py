"""Flags of `vlaunch batch`: a whole job without a job file, or its tuning beside one."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.app.options import DP_FLAGS
from launcher.batch.shape import CheckedJob
from launcher.inventory.mistakes import YamlPath

F = TypeVar("F", bound=Callable[..., Any])

# Job file key of each flag, with click options that override the key's type and help. `--system`
# and `--chat` turn the prompt into messages.
FLAGS: Mapping[str, tuple[YamlPath, Mapping[str, Any]]] = {
    "model": (("model",), {"metavar": "MODEL"}),
    "input": (
        ("read", "paths"),
        {
            "metavar": "PATH",
            "multiple": True,
            "help": "File, folder or pattern on this machine, nodes:/path, s3://, gs:// or hdfs://;"
            " repeatable.",
        },
    ),
    "output": (("write", "path"), {"metavar": "PATH"}),
    "name": (
        ("job",),
        {
            "metavar": "NAME",
            "help": "Name of the job (default: derived from the job).",
        },
    ),
    "format": (
        ("read", "format"),
        {"help": "Format of the input; text has a row per line (default: from the file name)."},
    ),
    "output_format": (
        ("write", "format"),
        {
            "help": "Format of the output (default: parquet); openai: the input has requests of"
            " OpenAI's Batch API."
        },
    ),
    "id": (("read", "id"), {"metavar": "COLUMN"}),
    "limit": (("read", "limit"), {"metavar": "N"}),
    "column": (
        ("prompt", "column"),
        {
            "metavar": "COLUMN",
            "help": "Column that holds the prompt (default: prompt; of text files: text).",
        },
    ),
    "template": (("prompt", "template"), {"metavar": "TEXT"}),
    "system": (
        ("prompt", "chat"),
        {"metavar": "TEXT", "help": "System message; the prompt becomes a chat."},
    ),
    "chat": (
        ("prompt", "chat"),
        {"type": bool, "is_flag": True, "help": "Send the prompt as a chat's user message."},
    ),
    "keep": (
        ("keep",),
        {
            "metavar": "COLUMN",
            "multiple": True,
            "help": "Column to write beside the answer (default: all).",
        },
    ),
    "max_tokens": (("sampling", "max_tokens"), {}),
    "temperature": (("sampling", "temperature"), {}),
    "tp": (("engine", "tp"), {}),
    "pp": (("engine", "pp"), {}),
    "replicas": (
        ("engine", "replicas"),
        {
            "type": str,
            "metavar": "N|N-M",
            "help": "Number of replicas, or their minimum and maximum.",
        },
    ),
    "batch_size": (("engine", "batch_size"), {}),
    "dp": (
        ("data_parallel", "size"),
        {"help": "Data parallel size over the nodes, instead of replicas."},
    ),
    "engine_arg": (
        ("engine", "args"),
        {"metavar": "NAME=VALUE", "multiple": True, "help": "Engine argument of vLLM; repeatable."},
    ),
}


def flag_name(name: str) -> str:
    """Return a flag as typed on the command line."""
    return f"--{name.replace('_', '-')}"


def _options() -> Iterator[Callable[[F], F]]:
    folder = click.Path(path_type=Path)
    yield click.argument("path", metavar="[JOB.yaml]", required=False, type=folder)
    yield click.option(
        "--allow",
        metavar="FOLDER",
        multiple=True,
        type=folder,
        help="Allow paths of JOB.yaml in this folder, besides its own; repeatable.",
    )
    # Not the classes of `schema.py`: pydantic takes longer than all of `--help`.
    schema = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    for name, (where, overrides) in FLAGS.items():
        key = _key_schema(schema, where)
        names = DP_FLAGS if name == "dp" else (flag_name(name),)
        yield click.option(
            *names, **{"type": _option_type(key), "help": key["description"], **overrides}
        )


def _key_schema(schema: Mapping[str, Any], where: YamlPath) -> Mapping[str, Any]:
    """Return the JSON Schema of a job file key."""
    shape = schema
    for step in where:
        for form in (shape, *shape.get("anyOf", ())):
            if "$ref" in form:
                shape = schema["$defs"][form["$ref"].rpartition("/")[2]]
        shape = shape["properties"][step]
    return shape


def _option_type(key: Mapping[str, Any]) -> Any:
    """Return click's type of a key; bounds are checked later, as for files."""
    for form in (key, *key.get("anyOf", ())):
        if "enum" in form:
            return click.Choice(form["enum"])
        if form.get("type") in ("integer", "number"):
            return int if form["type"] == "integer" else float
    return str


def job_options(function: F) -> F:
    """Add the argument and the flags that describe a job."""
    for option in reversed([*_options()]):
        function = option(function)
    return function


def parse_options(job_flags: Mapping[str, Any]) -> CheckedJob:
    """Return the checked job described by a command line; raises JobError."""
    from launcher.batch import flags

    values = dict(job_flags)
    path, allow = values.pop("path"), values.pop("allow")
    job_values = {name: values[name] for name in FLAGS}
    options = {
        name: value
        for name, value in job_values.items()
        if value is not None and value != () and value is not False
    }
    if path is None:
        if allow:
            raise click.UsageError(
                "--allow applies only to paths in JOB.yaml; paths in options are not restricted"
            )
        if not options:
            raise click.UsageError("pass a job file, or --model, --input and --output")
        return flags.job_from_flags(options, Path.cwd())
    return flags.job_from_file(path, options, allow=allow)
