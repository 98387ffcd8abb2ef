"""Flags of `vlaunch batch`: a whole job without a job file, or its tuning beside one."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.app.options import DP_FLAGS
from launcher.batch.checked_job import CheckedJob
from launcher.inventory.mistakes import YamlPath

F = TypeVar("F", bound=Callable[..., Any])

_Flag = tuple[YamlPath, Mapping[str, Any]]


def _flag(key: str, **overrides: Any) -> _Flag:
    """Return a job file key and the click options that replace the key's own."""
    return tuple(key.split(".")), overrides


# The flags of keys that most jobs need; `--set` has all. `--system` and `--chat` turn the prompt
# into messages.
FLAGS: Mapping[str, _Flag] = {
    "model": _flag("model", metavar="MODEL"),
    "input": _flag(
        "read.paths",
        metavar="PATH",
        multiple=True,
        help="File, folder or pattern on this machine, nodes:/path, s3://, gs:// or hdfs://;"
        " repeatable.",
    ),
    "output": _flag("write.path", metavar="PATH"),
    "name": _flag("job", metavar="NAME", help="Name of the job (default: derived from the job)."),
    "format": _flag("read.format"),
    "output_format": _flag("write.format"),
    "id": _flag("read.id", metavar="COLUMN"),
    "limit": _flag("read.limit", metavar="N"),
    "column": _flag(
        "prompt.column",
        metavar="COLUMN",
        help="Column that holds the prompt (default: prompt; of text files: text).",
    ),
    "template": _flag("prompt.template", metavar="TEXT"),
    "system": _flag(
        "prompt.chat", metavar="TEXT", help="System message; the prompt becomes a chat."
    ),
    "chat": _flag(
        "prompt.chat", type=bool, is_flag=True, help="Send the prompt as a chat's user message."
    ),
    "keep": _flag(
        "keep",
        metavar="COLUMN",
        multiple=True,
        help="Column to write beside the answer (default: all).",
    ),
    "max_tokens": _flag("sampling.max_tokens"),
    "temperature": _flag("sampling.temperature"),
    "tp": _flag("engine.tp"),
    "pp": _flag("engine.pp"),
    "replicas": _flag("engine.replicas", type=str, metavar="N|N-M"),
    "batch_size": _flag("engine.batch_size"),
    "dp": _flag(
        "data_parallel.size", help="Data parallel size over the nodes, instead of replicas."
    ),
    "engine_arg": _flag(
        "engine.args",
        metavar="NAME=VALUE",
        multiple=True,
        help="Engine argument of vLLM; repeatable.",
    ),
}
SET = "set"  # the flag for any key


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
    yield click.option(
        flag_name(SET),
        SET,
        metavar="KEY=VALUE",
        multiple=True,
        help="Any key of a job file, such as limits.errors=10; repeatable. `vlaunch schema --job`"
        " lists them.",
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
    job_values = {name: values[name] for name in (*FLAGS, SET)}
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
