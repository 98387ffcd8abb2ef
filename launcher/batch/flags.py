"""A checked job, or all its mistakes, from a job file or the flags of `vlaunch batch`.

Flags become the keys of a file, so that the same rules apply; mistakes name the flag.
"""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.batch import build, inputs, job_paths, rules
from launcher.batch.batch_flags import FLAGS, SET, flag_name
from launcher.batch.checked_job import HINT, CheckedJob, JobError, count_mistakes, mistakes_error
from launcher.batch.draft import Draft, draft_job
from launcher.batch.identity import identity_digest, is_tuning
from launcher.batch.job import SHORT_FORMS
from launcher.batch.job_paths import PathBounds, PathError
from launcher.batch.job_spec import identity_of
from launcher.inventory import document
from launcher.inventory.document import Document
from launcher.inventory.engine_args import python_name
from launcher.inventory.mistakes import Mistake, YamlPath, describe_value
from launcher.inventory.mistakes import format_key as label

_HINT = "`vlaunch batch --help` explains every option; nothing was changed"
_REQUIRED = {
    "model": "the model to run",
    "input": "the files with the rows",
    "output": "the folder for the answers",
}
# Tuning: may change between two runs of a job, so these flags are allowed beside its file; of
# `--set`, the keys in `identity.TUNING`.
_TUNING = ("tp", "pp", "replicas", "batch_size", "engine_arg", SET)
MAX_BYTES = 1024 * 1024


def job_from_flags(options: Mapping[str, Any], folder: Path) -> CheckedJob:
    """Return the job described by flags alone (`batch_flags.FLAGS`); raises JobError.

    Relative paths start at `folder`. Without `--name`, the name follows from the content: the same
    command is the same job.
    """
    within = PathBounds(folder=folder)
    where, mistakes = _flag_values(options)
    problems = [
        (f"--{name}", f"is missing: {description}")
        for name, description in _REQUIRED.items()
        if name not in options
    ]
    problems += [*mistakes, *_contradictions(options, where)]
    if "system" in options or "chat" in options:
        problems += _write_messages(options, within, where)
    empty = Document(data={}, lines={}, mistakes=())
    job_file, file_mistakes = check_document(_overlay(empty, where), within, name="batch")
    problems += [
        (_flag_for(mistake.yaml_path, options), mistake.text)
        for mistake in file_mistakes
        if not _is_missing(mistake, options)
    ]
    if problems or job_file is None:
        raise _job_error(problems)
    if ("job",) in where:
        return job_file
    return replace(job_file, job=f"{_base_name(job_file)}-{_flags_digest(job_file)[:8]}")


def _contradictions(
    options: Mapping[str, Any], where: dict[YamlPath, object]
) -> list[tuple[str, str]]:
    """Remove the first of two exclusive flags from `where`, and report the second."""
    problems = []
    for first, second in ("column", "template"), ("system", "chat"):
        if first in options and second in options:
            where.pop(FLAGS[first][0], None)
            problems.append((f"--{second}", f"should be left out with --{first}"))
    return problems


def _base_name(job: CheckedJob) -> str:
    """Return a name for an unnamed job, from its first input."""
    last = re.split(r"[/:]+", job.sources[0].text.rstrip("/*"))[-1].partition(".")[0]
    return job_name(Path(last))[:24].strip("-_.") or "rows"


def job_from_file(
    path: Path, options: Mapping[str, Any], *, allow: Sequence[Path] = ()
) -> CheckedJob:
    """Return the job of the file at `path`, overridden by flags; raises JobError.

    Only tuning options are allowed beside a file: the rest is the job's identity.

    Args:
        path: the file. Relative paths in it start at its folder, and must lead into it.
        options: the flags beside it.
        allow: more folders that its paths may lead into.
    """
    content = parse_job_file(read_job_file(path))
    tuning = {name: value for name, value in options.items() if name in _TUNING}
    where, unwritten = _flag_values(tuning, _replica_section(content))
    job, mistakes = check_document(
        _overlay(content, where), job_paths.job_bounds(path, allow), name=job_name(path)
    )
    flag_mistakes = [mistake for mistake in mistakes if _is_flag_mistake(mistake, where, content)]
    problems = [*_identity_flags(options, path), *unwritten]
    problems += [(_flag_for(mistake.yaml_path, options), mistake.text) for mistake in flag_mistakes]
    of_file = mistakes_error(
        path, content, [mistake for mistake in mistakes if mistake not in flag_mistakes]
    )
    if problems:
        raise _job_error(problems, of_file.mistakes)
    if job is None:
        raise of_file
    return replace(job, path=path)


def read_job_file(path: Path) -> str:
    """Return the text of the job file at `path`; raises JobError."""
    try:
        return document.read_file(path, max_bytes=MAX_BYTES, kind="job file")
    except document.UnusableFile as error:
        hint = HINT if error.line is None else ""
        raise JobError(f"`{path}` cannot be used", [error.describe(path)], hint=hint) from error


def parse_job_file(content: str) -> Document:
    """Parse the YAML of a job file."""
    return document.parse_document(content, first_key="read")


def check_document(
    content: Document, within: PathBounds, *, name: str
) -> tuple[CheckedJob | None, list[Mistake]]:
    """Return the job, or its mistakes.

    Args:
        content: the parsed file, with line numbers.
        within: base and bounds of its paths.
        name: the job's name if the document has none; may be empty.
    """
    mistakes = list(content.mistakes)
    if content.data is None:
        return None, mistakes
    draft, wrong = draft_job(content, within)
    mistakes += wrong
    if draft is None:
        return None, mistakes
    mistakes += _rule_mistakes(draft)
    if not (draft.file.job or name) and draft.is_valid("job"):
        mistakes.append(
            Mistake(
                yaml_path=(),
                text="`job` is missing: name of the job (the file's name is not a valid one)",
            )
        )
    return (None if mistakes else build.build_job(draft, name=name, within=within)), mistakes


def _rule_mistakes(draft: Draft) -> list[Mistake]:
    mistakes = [mistake for rule in rules.ALL for mistake in rule(draft)]
    return [mistake for mistake in mistakes if draft.is_valid(*mistake.yaml_path)]


def job_name(path: Path) -> str:
    """Return the job name for a file name: `My Job.yaml` → `my-job`; possibly empty."""
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower())[:40].strip("-_.")


def _replica_section(content: Document) -> str:
    """Return the section that holds `replicas` and `batch_size`."""
    return "predict" if "predict" in (content.data or {}) else "engine"


def _set_flag(key: str) -> str:
    return f"{flag_name(SET)} {label(key)}"


def _identity_flags(options: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
    """Yield the flags that are not allowed beside a job file."""
    text = f"cannot be combined with a job file; change it in {path.name}, or leave the file out"
    for name, value in options.items():
        if name not in _TUNING:
            yield flag_name(name), text
        elif name == SET:
            keys = [assignment.partition("=")[0] for assignment in value]
            other = [key for key in keys if not (is_tuning(key) or key.startswith("engine.args."))]
            yield from ((_set_flag(key), text) for key in other)


def _is_flag_mistake(mistake: Mistake, where: Mapping[YamlPath, object], content: Document) -> bool:
    """Return True if a mistake is about a flag's key, or a section that only flags write."""
    if mistake.yaml_path in where:
        return True
    return mistake.yaml_path not in content.lines and _contains(mistake.yaml_path, where)


def _contains(section: YamlPath, where: Iterable[YamlPath]) -> bool:
    return bool(section) and any(yaml_path[: len(section)] == section for yaml_path in where)


def _flag_values(
    options: Mapping[str, Any], stage: str = "engine"
) -> tuple[dict[YamlPath, object], list[tuple[str, str]]]:
    """Return the flags' values by job file key, and the mistakes in flags themselves."""
    where: dict[YamlPath, object] = {}
    problems: list[tuple[str, str]] = []
    for name, value in options.items():
        if name in ("engine_arg", SET):
            _add_assignments(name, value, where, problems)
        elif name not in ("system", "chat"):
            yaml_path = FLAGS[name][0]
            target = (stage, *yaml_path[1:]) if name in ("replicas", "batch_size") else yaml_path
            where[target] = list(value) if isinstance(value, tuple) else value
    return where, problems


def _add_assignments(
    name: str,
    texts: Iterable[str],
    where: dict[YamlPath, object],
    problems: list[tuple[str, str]],
) -> None:
    """Add the values of `--engine-arg NAME=VALUE` or `--set KEY=VALUE` to `where`."""
    form = "KEY=VALUE" if name == SET else "NAME=VALUE"
    for text in texts:
        key, equals, value = text.partition("=")
        yaml_path = tuple(key.split(".")) if name == SET else ("engine", "args", key)
        if not equals:
            problems.append((flag_name(name), f"should be {form}, not {describe_value(text)}"))
        elif yaml_path in where:
            problems.append((flag_name(name), f"should name {describe_value(key)} once"))
        else:
            where[yaml_path] = _parse_value(value)


def _write_messages(
    options: Mapping[str, Any], within: PathBounds, where: dict[YamlPath, object]
) -> list[tuple[str, str]]:
    """Write the prompt as chat messages: an optional system message and the user's."""
    where.pop(("prompt", "column"), None)
    content = where.pop(("prompt", "template"), None)
    if content is None:
        column = options.get("column") or ("text" if _is_text(options, within) else "prompt")
        if not column.isidentifier():
            flag = "--system" if "system" in options else "--chat"
            return [
                (
                    "--column",
                    (
                        f"{describe_value(column)} should be written with --template beside"
                        f" {flag}, which makes a template"
                    ),
                )
            ]
        content = f"{{{{ {column} }}}}"
    system = [{"role": "system", "content": options["system"]}] if "system" in options else []
    where["prompt", "chat"] = [*system, {"role": "user", "content": content}]
    return []


def _is_text(options: Mapping[str, Any], within: PathBounds) -> bool:
    if "format" in options or not options.get("input"):
        return bool(options.get("format") == "text")
    try:
        source = job_paths.parse_source(options["input"][0], within)
        name = (
            inputs.list_files(source, within)[0].path.name
            if source.where == "control"
            else source.text
        )
    except PathError:  # reported by the check
        return False
    return inputs.format_of(name) == "text"


def _parse_value(text: str) -> object:
    """Parse the value of NAME=VALUE: JSON, Python's True, False and None, else text."""
    constants: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        value: object = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value


def _overlay(document: Document, where: Mapping[YamlPath, object]) -> Document:
    """Return the document with the values of `where` set, on copies."""
    data, lines = dict(document.data or {}), dict(document.lines)
    for yaml_path, value in where.items():
        section, key = _copy_section(data, yaml_path[:-1]), str(yaml_path[-1])
        if yaml_path[:2] == ("engine", "args"):
            for other in [name for name in section if python_name(name) == python_name(key)]:
                del section[other]
        section[key] = value
        for length in range(1, len(yaml_path)):
            lines.setdefault(yaml_path[:length], 1)
        lines[yaml_path] = 1
    return Document(
        data=data if document.data is not None else None, lines=lines, mistakes=document.mistakes
    )


def _copy_section(data: dict[str, Any], where: YamlPath) -> dict[str, Any]:
    """Copy the mappings along `where` and return the last; a short form becomes a mapping."""
    for step in where:
        inside = data.get(str(step))
        if not isinstance(inside, dict):
            inside = {SHORT_FORMS.get(str(step), "class"): inside} if inside else {}
        copy = dict(inside)
        data[str(step)] = copy
        data = copy
    return data


def _flag_for(where: YamlPath, options: Mapping[str, Any]) -> str:
    """Return the flag of a mistake's key, preferring one that is set."""
    if not where:
        return ""
    for text in options.get(SET, ()):
        key = text.partition("=")[0]
        if where[: key.count(".") + 1] == tuple(key.split(".")):
            return _set_flag(key)
    if where[:2] == ("engine", "args"):
        return f"--engine-arg {label(str(where[2]))}" if len(where) > 2 else "--engine-arg"
    if where[:2] == ("prompt", "chat"):
        return _message_flag(where, options)
    if where[0] == "predict":
        where = ("engine", *where[1:])
    candidates = [name for name, (yaml_path, _) in FLAGS.items() if _overlaps(yaml_path, where)]
    candidates.sort(key=lambda name: name not in options)
    return flag_name(candidates[0]) if candidates else ""


def _message_flag(where: YamlPath, options: Container[str]) -> str:
    """Return the flag that sets a chat message."""
    if where[2:3] == (0,) and "system" in options:
        return "--system"
    return next((f"--{name}" for name in ("template", "column") if name in options), "--chat")


def _overlaps(first: YamlPath, second: YamlPath) -> bool:
    """Return True if one of two paths is a prefix of the other."""
    return all(key == other for key, other in zip(first, second, strict=False))


def _is_missing(mistake: Mistake, options: Container[str]) -> bool:
    """Return True if the mistake only repeats that a required flag is missing."""
    missing = {FLAGS[name][0] for name in _REQUIRED if name not in options}
    if mistake.about_key and any(yaml_path[:1] == mistake.yaml_path[:1] for yaml_path in missing):
        return True
    return mistake.yaml_path == () and ("model",) in missing


def _flags_digest(job: CheckedJob) -> str:
    values = identity_of(job, ())
    values |= {f"read {index}": source.text for index, source in enumerate(job.sources)}
    return identity_digest(values | {"write": job.to.text})


def _job_error(problems: Sequence[tuple[str, str]], lines: Sequence[str] = ()) -> JobError:
    mistakes = [
        *lines,
        *(f"{flag}: {text}" if flag else text for flag, text in dict.fromkeys(problems)),
    ]
    where = "the job" if lines else "the options"
    return JobError(f"{count_mistakes(len(mistakes))} in {where}", mistakes, hint=_HINT)
