"""A checked file → a `CheckedJob`, with every default filled in."""

from dataclasses import fields, replace
from pathlib import Path

from launcher.batch import inputs, rules
from launcher.batch.checked_job import CheckedJob
from launcher.batch.draft import Draft
from launcher.batch.job import Job, Prompt, Sampling
from launcher.batch.job_paths import PathBounds
from launcher.core.domain import Inventory
from launcher.inventory.engine_args import python_name


def build_job(draft: Draft, *, name: str, within: PathBounds) -> CheckedJob:
    """Return the job of a draft without mistakes; `name` is its default name."""
    file, paths, mode = draft.file, draft.paths, draft.mode
    assert paths.to is not None  # noqa: S101 - without mistakes
    requests = file.write.format == "openai"
    read = replace(file.read, format=file.read.format or inputs.common_format(paths.names))
    prompt = file.prompt or Prompt(column="text" if read.format == "text" else "prompt")
    generates = mode != "predict" and file.task == "generate" and not requests
    tokens = file.sampling.max_tokens or rules.DEFAULT_TOKENS
    args = {python_name(key): value for key, value in file.engine.args.items()}
    predict, preprocess = file.predict, file.preprocess
    code: dict[str, Path] = {}
    for files in paths.code.values():
        code |= files
    values = {attribute.name: getattr(file, attribute.name) for attribute in fields(Job)}
    values |= {
        "job": file.job or name,
        "mode_": mode,
        "read": replace(read, id="custom_id") if requests else read,
        "prompt": None if mode == "predict" or requests else prompt,
        "sampling": replace(file.sampling, max_tokens=tokens, n=None) if generates else Sampling(),
        "keep": {} if requests else file.keep,
        "engine": replace(file.engine, args=args),
        "predict": predict and replace(predict, class_=paths.targets["predict"]),
        "preprocess": preprocess and replace(preprocess, function=paths.targets["preprocess"]),
    }
    return CheckedJob(**values, sources=paths.sources, to=paths.to, code=code, inside=within.inside)


def with_defaults(job: CheckedJob, inventory: Inventory) -> CheckedJob:
    """Return the job with the inventory's engine arguments as defaults; null leaves one to vLLM."""
    if job.mode == "predict":
        return job
    defaults = {python_name(key): value for key, value in inventory.engine_args.items()}
    merged = {**defaults, **job.engine.args}
    args = {key: value for key, value in merged.items() if value is not None}
    return replace(job, engine=replace(job.engine, args=args))
